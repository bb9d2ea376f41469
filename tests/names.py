#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""No name of a static function stands in three files of the product: one could
neither search for it nor recognise it in a profile."""
import collections
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
DEFINED = re.compile(
    r"^static (?:__\w+__ |inline |IZ_INLINE |const |unsigned |struct |enum )*"
    r"\w+[ \n*]+(\w+)\(", re.M)


def main():
    files = collections.defaultdict(set)
    for folder in ("codelets", "runtime", "models", "tools"):
        for path in (ROOT / folder).rglob("*.c*"):
            if path.suffix in (".c", ".cu"):
                for name in DEFINED.findall(path.read_text()):
                    files[name].add(str(path.relative_to(ROOT)))
    assert len(files) > 500, "found next to no functions: is this the tree?"
    many = {n: f for n, f in files.items()
            if len(f) > 2 and n not in ("main", "__launch_bounds__")}
    for name, places in sorted(many.items()):
        print(f"{name} stands in {len(places)} files: {', '.join(sorted(places))}")
    return 1 if many else 0


if __name__ == "__main__":
    sys.exit(main())
