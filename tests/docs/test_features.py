#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The README's table of features is that of docs/status.md, in short: each row there that
begins in bold, with its column GPU.  As a program this writes it."""
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
README, STATUS = ROOT / "README.md", ROOT / "docs/status.md"
TABLE = re.compile(r"(?<=\| Feature \| GPU \|\n\|---\|---\|\n)(\|.*\n)*")


def rows():
    for feature, gpu in re.findall(r"^\| \*\*(.*?)\.\*\*[^|]*\|[^|]*\|([^|]*)\|",
                                   STATUS.read_text(), re.M):
        row = f"| {feature} |{gpu}|\n"
        yield re.sub(r"\]\((?=[\w#])", "](docs/", row)


def test_the_readme_has_the_features_of_the_status():
    found = TABLE.search(README.read_text())
    assert found[0].splitlines() == "".join(rows()).splitlines(), \
        "tests/docs/test_features.py writes it"
    assert max(map(len, found[0].splitlines())) <= 160


if __name__ == "__main__":
    README.write_text(TABLE.sub(lambda _: "".join(rows()), README.read_text()))
