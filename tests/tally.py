#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Counts the test cases that tests/record.sh left in result folders, says how long
each suite took, names the slowest cases and those that failed, and prints
"N passed, N failed, N skipped" as the last line.
"""
import collections
import json
import pathlib
import re
import sys
import xml.etree.ElementTree as ET

SKIPPED = 77  # meson's exit status for a skipped test
SLOWEST = 10  # so many are named


def cases(report, program):
    """Yields (name, verdict, message, seconds) for each case of one JUnit
    report."""
    for case in ET.parse(report).iter("testcase"):
        name = f'{case.get("classname") or program}::{case.get("name")}'
        seconds = float(case.get("time") or 0)
        for verdict, tags in (("failed", ("failure", "error")),
                              ("skipped", ("skipped",))):
            found = [case.find(tag) for tag in tags]
            found = [f for f in found if f is not None]
            if found:
                text = found[0].get("message") or found[0].text or ""
                yield name, verdict, text.strip(), seconds
                break
        else:
            yield name, "passed", "", seconds


def read_number(path):
    """What tests/record.sh wrote behind a test that ended, or None."""
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def verdicts(folder):
    """Yields what one recorded test counts as: its cases, or itself."""
    command = (folder / "command").read_text().strip()
    status = read_number(folder / "status")
    seen = []
    for report in sorted(folder.glob("*.xml")):
        try:
            seen += cases(report, pathlib.Path(command.split()[0]).name)
        except ET.ParseError as error:
            seen.append((report.name, "failed", f"unreadable: {error}", 0))
    yield from seen
    seconds = read_number(folder / "seconds") or 0
    if status is None:
        yield command, "failed", "killed or out of time", seconds
    elif status == SKIPPED and not seen:
        yield command, "skipped", "", seconds
    elif status not in (0, SKIPPED):
        if all(verdict != "failed" for _, verdict, *_ in seen):
            yield command, "failed", f"exit status {status}", seconds
    elif not seen:
        yield command, "passed", "", seconds


def all_verdicts(results):
    """Yields what the tests of one build folder count as."""
    failed = False
    for folder in sorted(p for p in results.iterdir() if p.is_dir()):
        for case in verdicts(folder):
            failed |= case[1] == "failed"
            yield case
    if read_number(results / "status") != 0 and not failed:
        yield f"meson test -C {results.parent}", "failed", "see its output", 0


def suites(results):
    """Yields (suite, seconds) for each test of one build folder, as meson noted
    them down: "izar:suite+another / test", or "test" where there is one suite."""
    notes = results.parent / "meson-logs/check-record.sh.json"
    for line in notes.read_text().splitlines() if notes.exists() else ():
        test = json.loads(line)
        suite = re.split(r"[:+]| / ", test["name"] if ":" in test["name"] else ":all")[1]
        yield f"{suite} in {results.parent.name}", test["duration"]


def main(folders):
    took = collections.Counter()
    for results in folders:
        for suite, seconds in suites(results):
            took[suite] += seconds
    print("the suites, of which several tests may have run at a time:")
    for suite, seconds in took.most_common():
        print(f"{seconds:6.0f} s  {suite}")
    count = {"passed": 0, "failed": 0, "skipped": 0}
    slow, failed = [], []
    for results in folders:
        for name, verdict, message, seconds in all_verdicts(results):
            count[verdict] += 1
            slow.append((seconds, f"{name} in {results.parent.name}"))
            if verdict == "failed":
                failed.append(f"FAILED {name}: {message.partition(chr(10))[0][:200]}")
    print("the slowest tests:")
    for seconds, name in sorted(slow, reverse=True)[:SLOWEST]:
        print(f"{seconds:6.0f} s  {name[:200]}")
    print("".join(f"{line}\n" for line in failed), end="")
    print(", ".join(f"{n} {verdict}" for verdict, n in count.items()))
    return 0 if count["passed"] and not count["failed"] else 1


if __name__ == "__main__":
    sys.exit(main([pathlib.Path(arg) for arg in sys.argv[1:]]))
