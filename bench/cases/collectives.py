# SPDX-License-Identifier: Apache-2.0
"""All-gather and reduce-scatter between the ranks of one host."""
import os

from harness import ranks_line

ABOUT = "collectives of one host against a copy of the same bytes, same cores"


def bound(ranks):
    """Each rank on a core of its own where there are enough: unbound, the system
    may put two that talk to each other on one core."""
    line = ranks_line(ranks)
    if ranks <= len(os.sched_getaffinity(0)):
        line[line.index("none")] = "core"
    return line


def run(b):
    for ranks in (2,) if b.quick else (2, 4):
        rows = b.call_json([*bound(ranks), b.program("bench/bench_coll"),
                            20 if b.quick else 60])
        b.raw += rows
        copy = {r["mib"]: r for r in rows if r["what"] == "copy"}
        for r in rows:
            if r["what"] == "copy":
                continue
            limit = copy[r["mib"]]
            # Bytes read and written a second over those of the copy.
            moved = r["moved"] / limit["moved"]
            scale = moved / limit["median"]
            memory = r["path"] == "memory"
            b.figure(f"{r['what']}, {r['mib']:.0f} MiB, {ranks} ranks, "
                     f"{r['path']} / copy",
                     [r[k] * scale for k in ("least", "median", "most")],
                     "ratio", 0.8 if memory and ranks == 2 else None,
                     note=f"{r['median']:.1f} GB/s of the buffer; in CPU time "
                     f"{r['cpu'] / limit['cpu'] * moved:.2f} of the copy")
