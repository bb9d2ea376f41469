#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A function's name says where to look for it.

No name of a static function stands in three files of the product: one could
neither search for it nor recognise it in a profile.

A function that a header declares begins, behind iz_, with a word of its file, of
that header or of their room, or with the first word of a type of ours that it
takes or returns or that stands in that header (iz_dnn_get: of struct iz_dnn_set).
iz_X_cuda may begin as iz_X does.  Plural and singular are one.  What a .cuh has is
for the kernels of its room alone."""
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

DECLARED = re.compile(r"^(?!return\b|else\b|typedef\b)((?:\w+[\s*]+)+)iz_(\w+)\(([^;{]*)[;{]",
                      re.M)
TYPE = re.compile(r"\b(?:struct|enum|union) iz_(\w+)|^typedef \w+ iz_(\w+);", re.M)
# A number's type is as good as a struct, but has no name of ours.
NUMBERS = {"bf16", "f16", "float"}


def words(text):
    return {w.removesuffix("s") for w in re.split(r"[\W_]+", text)}


def types(text):
    return {(s or t).split("_")[0].removesuffix("s") for s, t in TYPE.findall(text)}


def badly_begun():
    """(function, header) of each whose first word says nothing."""
    may, where = collections.defaultdict(set), {}
    for folder in ("codelets", "runtime", "models"):
        for path in (ROOT / folder).rglob("*.*"):
            if path.suffix not in (".c", ".cu", ".h"):
                continue
            text = path.read_text()
            header = path.suffix == ".h"
            for result, name, takes in DECLARED.findall(text):
                may[name] |= words(f"{path.stem} {path.parent.name}")
                may[name] |= types(text if header else result + takes)
                if header:
                    where[name] = path.relative_to(ROOT)
    assert len(where) > 900, "found next to no functions: is this the tree?"
    return [(f"iz_{n}", h) for n, h in sorted(where.items())
            if n.split("_")[0].removesuffix("s") not in
            NUMBERS | may[n] | may.get(n.removesuffix("_cuda"), set())]


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
    badly = badly_begun()
    for name, header in badly:
        print(f"{header}: {name} begins with a word of neither its file nor its types")
    return 1 if many or badly else 0


if __name__ == "__main__":
    sys.exit(main())
