#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Counts the test cases that tests/record.sh left in result folders, names
those that failed, and prints "N passed, N failed, N skipped" as the last line.
"""
import pathlib
import sys
import xml.etree.ElementTree as ET

SKIPPED = 77  # meson's exit status for a skipped test


def cases(report, program):
    """Yields (name, verdict, message) for each case of one JUnit report."""
    for case in ET.parse(report).iter("testcase"):
        name = f'{case.get("classname") or program}::{case.get("name")}'
        for verdict, tags in (("failed", ("failure", "error")),
                              ("skipped", ("skipped",))):
            found = [case.find(tag) for tag in tags]
            found = [f for f in found if f is not None]
            if found:
                text = found[0].get("message") or found[0].text or ""
                yield name, verdict, text.strip()
                break
        else:
            yield name, "passed", ""


def read_status(folder):
    """The exit status of a test, or None where it never ended by itself."""
    try:
        return int((folder / "status").read_text())
    except (FileNotFoundError, ValueError):
        return None


def verdicts(folder):
    """Yields what one recorded test counts as: its cases, or itself."""
    command = (folder / "command").read_text().strip()
    status = read_status(folder)
    seen = []
    for report in sorted(folder.glob("*.xml")):
        try:
            seen += cases(report, pathlib.Path(command.split()[0]).name)
        except ET.ParseError as error:
            seen.append((report.name, "failed", f"unreadable: {error}"))
    yield from seen
    if status is None:
        yield command, "failed", "killed or out of time"
    elif status == SKIPPED and not seen:
        yield command, "skipped", ""
    elif status not in (0, SKIPPED):
        if all(verdict != "failed" for _, verdict, _ in seen):
            yield command, "failed", f"exit status {status}"
    elif not seen:
        yield command, "passed", ""


def all_verdicts(results):
    """Yields what the tests of one build folder count as."""
    failed = False
    for folder in sorted(p for p in results.iterdir() if p.is_dir()):
        for name, verdict, message in verdicts(folder):
            failed |= verdict == "failed"
            yield name, verdict, message
    if read_status(results) != 0 and not failed:
        yield f"meson test -C {results.parent}", "failed", "see its output"


def main(folders):
    count = {"passed": 0, "failed": 0, "skipped": 0}
    for results in folders:
        for name, verdict, message in all_verdicts(results):
            count[verdict] += 1
            if verdict == "failed":
                print(f"FAILED {name}: {message.partition(chr(10))[0][:200]}")
    print(", ".join(f"{n} {verdict}" for verdict, n in count.items()))
    return 0 if count["passed"] and not count["failed"] else 1


if __name__ == "__main__":
    sys.exit(main([pathlib.Path(arg) for arg in sys.argv[1:]]))
