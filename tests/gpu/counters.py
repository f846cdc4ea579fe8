#!/usr/bin/env python3
"""Counters of some kernels at 1 Mi rows, by Nsight Compute: what each waits for.

    counters.py BUILD_FOLDER        the folder of tests/gpu/prepare.sh

Runs `ncu` over `bench_kernels --counters` with caches emptied before each kernel and clocks left alone, and prints a
FIGURE line for each. Status 77: ncu is not here, or may not read the counters.
"""
import csv
import io
import re
import subprocess
import sys
from pathlib import Path

FIGURES = {
    "gpu__time_duration.sum": "duration",
    "sm__inst_issued.avg.pct_of_peak_sustained_active": "issue slots busy",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "multiprocessors",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "L2",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps active",
}
STALLS = ("barrier", "branch_resolve", "dispatch_stall", "drain", "imc_miss", "lg_throttle", "long_scoreboard",
          "math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", "short_scoreboard",
          "sleeping", "tex_throttle", "wait")
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
NOT_ALLOWED = re.compile(r"ERR_NVGPUCTRPERM|not supported|No kernels were profiled|Failed to (?:initialize|prepare)", re.I)


def skip(why):
    print(f"SKIPPED: {why}")
    sys.exit(77)


def run_ncu(program):
    metrics = [*FIGURES, *(STALL.format(reason) for reason in STALLS)]
    command = ["ncu", "--csv", "--page", "raw", "--profile-from-start", "off", "--clock-control", "none",
               "--cache-control", "all", "--metrics", ",".join(metrics), str(program), "--counters"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    except FileNotFoundError:
        skip("there is no ncu here")


def table_of(text):
    """Rows of the table, without the line of units, and the units."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[begin:]))))
    return rows[1:], rows[0] if rows else {}


def number(text):
    try:
        return float(text.replace(",", ""))
    except (AttributeError, ValueError):
        return None


def describe(row, units):
    parts = []
    for metric, name in FIGURES.items():
        value = number(row.get(metric))
        parts.append(f"{name} " + ("not known" if value is None else f"{value:.1f} {units.get(metric, '')}".rstrip()))
    stalls = [(number(row.get(STALL.format(reason))), reason) for reason in STALLS]
    stalls = sorted((stall for stall in stalls if stall[0] is not None), reverse=True)[:3]
    parts.append("stalls " + (", ".join(f"{name} {value:.1f}" for value, name in stalls) or "not known"))
    return "; ".join(parts)


def main():
    done = run_ncu(Path(sys.argv[1]) / "tests/bench/bench_kernels")
    print(done.stdout)
    print(done.stderr)
    names = re.findall(r"^launched: (.*)$", done.stdout + done.stderr, re.M)
    rows, units = table_of(done.stdout)
    if not rows and (found := NOT_ALLOWED.search(done.stdout + done.stderr)):
        skip(f"ncu can't read counters on this host: {found.group(0)}")
    if done.returncode != 0 or not names or len(rows) != len(names):
        print(f"[  FAILED  ] ncu: status {done.returncode}, {len(rows)} kernels of {len(names)}")
        sys.exit(1)
    for name, row in zip(names, rows):
        print(f"FIGURE {name}: {describe(row, units)}")
    print(f"[       OK ] counters of {len(rows)} kernels")


main()
