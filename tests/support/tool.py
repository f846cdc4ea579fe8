"""kvpoolctl as a program: run to its end, started, or on a terminal of a given size."""
import fcntl
import json
import os
import pty
import struct
import subprocess
import termios

from support.daemon import build_dir

SECONDS_MAX = 120


def program():
    return str(build_dir() / "client" / "kvpoolctl" / "kvpoolctl")


def environment(**changes):
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "KVPOOLD_SOCKET", "TERM")}
    env.update(LC_ALL="C.UTF-8", **changes)
    return env


class Tool:
    def __init__(self, socket, path=None):
        self.socket = str(socket)
        self.path = path or program()
        self.started = []

    def command(self, *arguments):
        return [self.path, "--socket", self.socket, *map(str, arguments)]

    def run(self, *arguments, status=0, env=None, **options):
        done = subprocess.run(self.command(*arguments), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=SECONDS_MAX, env=env or environment(), check=False, **options)
        assert done.returncode == status, f"{arguments}: status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *arguments, **options):
        return json.loads(self.run("--json", *arguments, **options).stdout)

    def refused(self, *arguments, status=1, **options):
        """What standard error says: the error, and the hint (or None)."""
        done = self.run(*arguments, status=status, **options)
        lines = done.stderr.splitlines()
        assert lines[0].startswith("kvpoolctl: "), done.stderr
        assert len(lines) <= 2 and all(line.startswith("hint: ") for line in lines[1:]), done.stderr
        assert done.stdout == ""
        return lines[0].removeprefix("kvpoolctl: "), lines[1].removeprefix("hint: ") if len(lines) > 1 else None

    def start(self, *arguments):
        self.started.append(subprocess.Popen(self.command(*arguments), stdin=subprocess.DEVNULL,
                                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                             env=environment()))
        return self.started[-1]

    def close(self):
        for process in self.started:
            process.kill()
            process.communicate()

    def on_terminal(self, *arguments, width=80, height=40, **changes):
        """What is written to a terminal of that size."""
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        process = subprocess.Popen(self.command(*arguments), stdin=slave, stdout=slave, stderr=slave,
                                   env=environment(TERM="xterm-256color", **changes))
        os.close(slave)
        output = b""
        while True:
            try:
                piece = os.read(master, 65536)
            except OSError:  # the terminal has nobody on the other side any more
                break
            if not piece:
                break
            output += piece
        os.close(master)
        assert process.wait(SECONDS_MAX) == 0, output
        return output.decode().replace("\r\n", "\n")
