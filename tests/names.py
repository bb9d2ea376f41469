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
    r"^(?:template <[^>]*> )?"
    r"static (?:__\w+__ |inline |IZ_INLINE |IZ_SIMD |"
    r"const |unsigned |long |struct |enum )*"
    r"\w+(?:<[^<>]*>)?[\s*]+(?:__launch_bounds__\([^()]*\)\s+)?(\w+)\(", re.M)


def main():
    files = collections.defaultdict(set)
    for folder in ("codelets", "runtime", "models", "tools"):
        for path in (ROOT / folder).rglob("*.c*"):
            if path.suffix in (".c", ".cu"):
                for name in DEFINED.findall(path.read_text()):
                    files[name].add(str(path.relative_to(ROOT)))
    assert len(files) > 500, "found next to no functions: is this the tree?"
    many = {n: f for n, f in files.items() if len(f) > 2 and n != "main"}
    for name, where in sorted(many.items()):
        print(f"{name} stands in {len(where)} files: {', '.join(sorted(where))}")
    return 1 if many else 0


if __name__ == "__main__":
    sys.exit(main())
