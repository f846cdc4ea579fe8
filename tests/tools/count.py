#!/usr/bin/env python3
"""Counts the tests in JUnit files of ctest and pytest: prints `passed failed skipped`.

A ctest entry is a whole cmocka program; its own tests are counted from what it printed. A program that failed without
saying which of its tests did (a crash, a timeout) is one failure more.
"""
import re
import sys
import xml.etree.ElementTree as ElementTree


def count_case(case):
    """(passed, failed, skipped) of one <testcase>."""
    status = case.get("status")
    bad = case.find("failure") is not None or case.find("error") is not None or status == "fail"
    skipped = case.find("skipped") is not None or status in ("notrun", "disabled")
    text = "".join(case.itertext())
    said = {word: sum(map(int, re.findall(rf"^\[  {word} *\] (\d+) test\(s\)", text, re.MULTILINE)))
            for word in ("PASSED", "FAILED", "SKIPPED")}
    if not any(said.values()):
        return (0, 1, 0) if bad else (0, 0, 1) if skipped else (1, 0, 0)
    if bad and not said["FAILED"]:
        said["FAILED"] = 1
    return said["PASSED"], said["FAILED"], said["SKIPPED"]


def main():
    totals = [0, 0, 0]
    for path in sys.argv[1:]:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            totals = [a + b for a, b in zip(totals, count_case(case))]
    print(*totals)


if __name__ == "__main__":
    main()
