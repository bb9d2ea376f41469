#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Looks for a cycle of calls between the files of some libraries: what the linker
sees, so calls in inline functions of headers count too.  That an op hands over to
its GPU's side, NAME_cuda of codelets/ops/gpu_ops.h, is not counted: that side may
call what the op's file has for both.

usage: tests/cycles.py LIBRARY..."""
import graphlib
import pathlib
import re
import subprocess
import sys


def symbols(library):
    """Yields (object, letter, name) of nm for each member of an archive."""
    out = subprocess.run(["nm", "-A", "-P", library], check=True,
                         capture_output=True, text=True).stdout
    for line in out.splitlines():
        m = re.match(r"\S+?\[(\S+)\]:\s*(\S+)\s+(\w)", line)
        if m:
            yield m.group(1), m.group(3), m.group(2)


def members():
    """{codelets_task_run.c.o: codelets/task/run.c}; of a library whose build file is in
    a folder of its own {block.c.o: models/block.c}, {flat.cu.o:
    codelets/kernels/flat.cu}."""
    files = {}
    for folder in ("codelets", "runtime", "models"):
        for path in pathlib.Path(folder).rglob("*.c*"):
            files[str(path).replace("/", "_") + ".o"] = str(path)
            if str(path.parent) in ("models", "codelets/kernels"):
                files[path.name + ".o"] = str(path)
    return files


def calls(libraries):
    """{file: {file it uses: a name that it uses of it}}."""
    defined, wanted, files = {}, {}, members()
    for library in libraries:
        for member, letter, name in symbols(library):
            path = files.get(pathlib.Path(member).name)
            if not path:
                sys.exit(f"{library}: which file of the tree is {member}?")
            if letter == "U" and not name.endswith("_cuda"):
                wanted.setdefault(path, set()).add(name)
            elif letter in "TDBRC":
                defined[name] = path
    return {path: {defined[n]: n for n in sorted(names)
                   if n in defined and defined[n] != path}
            for path, names in wanted.items()}


def main(*libraries):
    graph = calls(libraries)
    if not graph:
        print("no calls found: are these libraries of this tree?")
        return 1
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        print("cycle of calls:")
        for b, a in zip(error.args[1], error.args[1][1:]):
            print(f"    {a} -> {b} ({graph[a][b]})")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
