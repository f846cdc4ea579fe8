"""Processes as /proc shows them, and waiting for what they do."""
import os
import time
from pathlib import Path


def wait_until(condition, what, seconds=60.0):
    """The first true value of condition(); a bound against hanging, not a measurement."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"still not after {seconds} s: {what}"
        time.sleep(0.01)


def process_state(pid):
    """The state letter of /proc/PID/stat; None when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_running(pid):
    return process_state(pid) not in (None, "Z", "X")


def children(pid):
    """Processes whose parent this is, dead ones not included."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == pid and fields[0] not in "ZX":
                found.append(int(entry))
    return found


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
