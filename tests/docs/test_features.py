#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The README's table of features is that of docs/status.md, in short: each row there that
begins in bold, with its column GPU.  The list of families in docs/models.md is that of
models/families.c, and the config key has it, too.  As a program this writes both.
docs/monitor.md has every member of metrics.jsonl."""
import pathlib
import re
import textwrap

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
README, STATUS = ROOT / "README.md", ROOT / "docs/status.md"
TABLE = re.compile(r"(?<=\| Feature \| GPU \|\n\|---\|---\|\n)(\|.*\n)*")


def rows():
    for feature, gpu in re.findall(r"^\| \*\*(.*?)\.\*\*[^|]*\|[^|]*\|([^|]*)\|",
                                   STATUS.read_text(), re.M):
        row = f"| {feature} |{gpu}|\n"
        yield re.sub(r"\]\((?=[\w#])", "](docs/", row)


MODELS, FAMILIES = ROOT / "docs/models.md", ROOT / "models/families.c"
LIST = re.compile(r"<!-- families -->(.*?)\n\n", re.S)


def families():
    return re.findall(r'^    \{"(\w+)", "\w+ForCausalLM"', FAMILIES.read_text(), re.M)


def family_list():
    return "<!-- families -->\n" + textwrap.fill(
        ", ".join(f"`{f}`" for f in families()) + ".", 118) + "\n\n"


def test_the_docs_and_the_key_have_the_families():
    key = re.search(r"#define IZ_FAMILIES(.*?)\nenum", (
        ROOT / "models/families.h").read_text(), re.S)[1]
    assert "".join(re.findall('"(.*?)"', key)).split("|") == ["auto", *families()]
    assert LIST.search(MODELS.read_text())[0] == family_list(), \
        "tests/docs/test_features.py writes it"


def test_the_readme_has_the_features_of_the_status():
    found = TABLE.search(README.read_text())
    assert found[0].splitlines() == "".join(rows()).splitlines(), \
        "tests/docs/test_features.py writes it"
    assert max(map(len, found[0].splitlines())) <= 160


@pytest.mark.parametrize("file", ("metrics.c", "summary.c"))
def test_monitor_has_every_member(file):
    text = (ROOT / "docs/monitor.md").read_text()
    found = re.findall(r'\\"([a-z_]+)\\":', (ROOT / "runtime/report" / file).read_text())
    assert found and not [x for x in found if f"`{x}`" not in text]


if __name__ == "__main__":
    MODELS.write_text(LIST.sub(lambda _: family_list(), MODELS.read_text()))
    README.write_text(TABLE.sub(lambda _: "".join(rows()), README.read_text()))
