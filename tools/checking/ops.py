# SPDX-License-Identifier: Apache-2.0
"""Every op against double precision, twice each (tests/codelets/gpu/test_ops_gpu.c): a
process per group, because a broken kernel of one must not hide the others; side by side,
because most of the time goes to the references on the host's cores.  Products come first
and alone: their group also compares how much memory of the GPU is free."""
import itertools
import re

from checking.work import Job

GROUPS = ("attention", "experts", "matmul", "flat", "embedding", "classifier", "rows", "llama",
          "orthogonal", "pairs", "preference", "quant", "routers")
TINY = ("pairs", "quant")  # all of them take minutes on the stand-in


def nearest(text):
    """{kind of tensor: largest part of its bound} of what was compared."""
    near = {}
    for kind, what, part in re.findall(r"^(\w+) (\w+) \[[\d,]+\]: ([\d.]+) of the bound",
                                       text, re.M):
        near[f"{kind} {what}"] = max(near.get(f"{kind} {what}", 0), float(part))
    return near


def part(c):
    jobs = [Job(g, [c.programs["test_ops_gpu"], g], 120, {"IZ_SHOW": "1"})
            for g in c.todo("ops", TINY if c.o.tiny else GROUPS)]
    for job, status, text, seconds in itertools.chain(
            c.run([j for j in jobs if j.name == "matmul"]),
            c.run([j for j in jobs if j.name != "matmul"], len(GROUPS))):
        good = re.findall(r"\[       OK \] (\w+)", text)
        bad = sorted(set(re.findall(r"\[  FAILED  \] (\w+)$", text, re.M)))
        why = re.findall(r"^ERROR: .*|^no GPU.*|^izar: .*", text, re.M)
        c.add("ops", job.name, "failed" if bad else c.outcome(status, job.limit_s),
              f"{seconds:5.1f} s, {len(good)} passed, {len(bad)} failed "
              + "; ".join(why[:3]), passed=good, failed=bad, seconds=seconds,
              part_of_bound=nearest(text), tail="\n".join(why) or text[-2000:])
