#!/usr/bin/env python3
"""Runs the programs that ctest knows under valgrind, two at a time, and writes a JUnit file.

    under_valgrind.py BUILD_DIR JUNIT_FILE [--only REGEX] [--leave-out REGEX] [--seconds N]

An invalid access, a use of undefined memory, a definite leak or a failing test fails the program.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor

VALGRIND = ["valgrind", "--quiet", "--error-exitcode=99", "--leak-check=full", "--errors-for-leak-kinds=definite", "--show-leak-kinds=definite",
            "--num-callers=20"]


def tests_of(build_dir):
    listed = subprocess.run(["ctest", "--test-dir", build_dir, "--show-only=json-v1"], check=True,
                            capture_output=True)
    for test in json.loads(listed.stdout)["tests"]:
        properties = {p["name"]: p["value"] for p in test.get("properties", [])}
        environment = dict(entry.split("=", 1) for entry in properties.get("ENVIRONMENT", []))
        yield test["name"], test["command"], properties.get("WORKING_DIRECTORY", build_dir), environment


def run(test, seconds):
    """(exit status or None for a timeout, output)"""
    _, command, folder, environment = test
    try:
        done = subprocess.run(VALGRIND + command, cwd=folder, timeout=seconds,
                              env={**os.environ, **environment, "KVPOOL_UNDER_VALGRIND": "1"},
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return done.returncode, done.stdout.decode(errors="replace")
    except subprocess.TimeoutExpired as expired:
        return None, (expired.stdout or b"").decode(errors="replace") + f"\nnot done after {seconds} s\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build_dir")
    parser.add_argument("junit")
    parser.add_argument("--only", default="")
    parser.add_argument("--leave-out", default="^$")
    parser.add_argument("--seconds", type=int, default=300)
    arguments = parser.parse_args()
    tests = [test for test in tests_of(arguments.build_dir) if re.search(arguments.only, test[0])]
    wanted = [test for test in tests if not re.search(arguments.leave_out, test[0])]
    for test in tests:
        if test not in wanted:
            print(f"left out: {test[0]}")
    suite = ElementTree.Element("testsuite", name="valgrind")
    with ThreadPoolExecutor(max_workers=2) as workers:
        results = list(workers.map(lambda test: run(test, arguments.seconds), wanted))
    for (name, *_), (status, output) in zip(wanted, results):
        print(f"{'ok' if status == 0 else 'FAILED'}: {name} (status {status})")
        if status != 0:
            print(output)
        # One program is one test here: what it tests was counted where it ran without valgrind.
        case = ElementTree.SubElement(suite, "testcase", name=name)
        if status != 0:
            ElementTree.SubElement(case, "failure", message=f"status {status}")
    ElementTree.ElementTree(suite).write(arguments.junit)
    return 0 if wanted and all(status == 0 for status, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
