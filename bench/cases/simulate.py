# SPDX-License-Identifier: Apache-2.0
"""Simulated steps against real ones on this machine's cores, on one rank and on
several, whose collectives are then real MPI.  A round measures the machine with as
many ranks as the runs have, so that collectives are measured between them, then for
each size trains and simulates with what was just measured."""
import os
import statistics

from harness import OFFLOAD, ROOT, Absent, gpt_config, ranks_line, simulate

ABOUT = "simulated steps against real ones: three sizes, 1 to 4 ranks"
NO_DATA = {"path": "none", "bytes": True}
RANKS = [r for r in (1, 2, 4) if r <= len(os.sched_getaffinity(0))]
# name, model, samples a step
SIZES = (("2.9M", {"layers": 4, "width": 240, "heads": 4}, 8),
         ("11M", {}, 8), ("39M", {"layers": 12, "width": 512, "heads": 8}, 8))


def run(b):
    if not (ROOT / "build-simgrid/models/gpt2").exists():
        raise Absent("needs tools/setup --simgrid")
    machine, ratios = b.folder / "machine.json", {}
    for _ in range(1 if b.quick else 4):
        for ranks in RANKS:
            b.call([*ranks_line(ranks), b.program("tools/calibrate"), machine])
            for name, model, samples in SIZES:
                config = gpt_config(1, samples // ranks, OFFLOAD, 8, model,
                                    device="cpu")
                real = b.train(config, ranks).step_s
                ratios.setdefault((name, ranks), []).append(
                    simulate({**config, "data": NO_DATA}, machine, "--ranks",
                             ranks)["step_s"] / real)
    for (name, ranks), r in ratios.items():
        where = f"{name} on {ranks} rank{'s' if ranks > 1 else ''}"
        b.figure(f"distance of simulated / real from 1, {where}",
                 [abs(x - 1) for x in r], "ratio", 0.15, "less",
                 note=f"it is {statistics.median(r):.3f}")
