#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Looks for cycles of calls between the files of some libraries: what the linker
sees, so calls in inline functions of headers count too.  That an op hands over to
its GPU's side, NAME_cuda of codelets/ops/gpu_ops.h, is not counted: that side may
call what the op's file has for both.

usage: tests/cycles.py LIBRARY..."""
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


def file_of(member):
    """codelets_task_run.c.o: codelets/task/run.c; of a library whose build file is in
    a folder of its own, block.c.o: models/block.c, and flat.cu.o:
    codelets/kernels/flat.cu.  None where the tree has no such file."""
    parts = pathlib.Path(member).name.removesuffix(".o").split("_")
    for cut in range(4):
        path = "/".join([*parts[:cut], "_".join(parts[cut:])])
        for folder in (".", "models", "codelets/kernels"):
            if (pathlib.Path(folder) / path).is_file():
                return str(pathlib.Path(folder) / path)
    return None


def calls(libraries):
    """{file: {file it uses: a name that it uses of it}}."""
    defined, wanted = {}, {}
    for library in libraries:
        for member, letter, name in symbols(library):
            path = file_of(member)
            if not path:
                sys.exit(f"{library}: which file of the tree is {member}?")
            if letter == "U" and not name.endswith("_cuda"):
                wanted.setdefault(path, set()).add(name)
            elif letter in "TDBRC":
                defined[name] = path
    return {path: {defined[n]: n for n in sorted(names)
                   if n in defined and defined[n] != path}
            for path, names in wanted.items()}


def cycles(graph):
    """The sets of files that reach each other (Tarjan's components)."""
    index, low, stack, found = {}, {}, [], []

    def visit(v):
        index[v] = low[v] = len(index)
        stack.append(v)
        for w in graph.get(v, ()):
            if w not in index:
                visit(w)
                low[v] = min(low[v], low[w])
            elif w in stack:
                low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            part = stack[stack.index(v):]
            del stack[stack.index(v):]
            if len(part) > 1:
                found.append(sorted(part))

    for v in list(graph):
        if v not in index:
            visit(v)
    return found


def main(*libraries):
    graph = calls(libraries)
    if not graph:
        print("no calls found: are these libraries of this tree?")
        return 1
    found = cycles(graph)
    for part in found:
        print("cycle of calls:")
        for a in part:
            for b, name in graph[a].items():
                if b in part:
                    print(f"    {a} -> {b} ({name})")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
