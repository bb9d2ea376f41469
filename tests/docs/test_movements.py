# SPDX-License-Identifier: Apache-2.0
"""Each function that docs/movements.md lists is there, and names the next one."""
import re

from test_adding import ROOT

PAGE = (ROOT / "docs/movements.md").read_text()


def body(path, name):
    """Of a function with this name, without comments."""
    text = re.sub(r"/\*.*?\*/", "", (ROOT / path).read_text(), flags=re.S)
    found = re.search(rf"^[a-z][^;{{}}]*\b{name}\([^;{{}}]*\)\n{{\n(.*?)^}}", text, re.S | re.M)
    assert found, f"no {name} in {path}"
    return found[1]


def lists():
    for block in re.findall(r"^```\n(.*?)^```", PAGE, re.S | re.M):
        yield [(path, name) for path, _, names in
               (line.partition(": ") for line in block.splitlines()) for name in names.split()]


def test_each_function_names_the_next():
    assert len(list(lists())) > 12
    for functions in lists():
        bodies = [body(*f) for f in functions]
        for text, f, (_, name) in zip(bodies, functions, functions[1:]):
            assert re.search(rf"\b{name}\b", text), f"{f} does not name {name}"
