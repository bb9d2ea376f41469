# SPDX-License-Identifier: Apache-2.0
"""The kernels on flat buffers against a loop that moves the same streams."""
import os
import re

ABOUT = "flat-buffer kernels against a loop that moves the same streams"

LINE = re.compile(r"^(\S.*?)\s+([\d.]+) GB/s\s+([\d.]+) M/s, limit .*ratio ([\d.]+)")


def parse(text):
    """{kernel: (GB/s, M/s, ratio to its limit)} of what bench_kernels prints."""
    return {m[1]: tuple(map(float, m.groups()[1:]))
            for m in map(LINE.match, text.splitlines()) if m}


def run(b):
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        rounds = [parse(b.call([b.program("bench/bench_kernels"), threads,
                                0.5 if b.quick else 2]))
                  for _ in range(1 if b.quick else 3)]
        names = list(dict.fromkeys(n for r in rounds for n in r))
        if not names:
            raise RuntimeError("bench_kernels printed no figure")
        for name in names:
            seen = [r[name] for r in rounds if name in r]
            b.figure(f"{name}, {threads} threads", [ratio for *_, ratio in seen],
                     "ratio", 0.95 if name.startswith("adam") else None,
                     note=f"{seen[0][0]:.1f} GB/s")
