# SPDX-License-Identifier: Apache-2.0
"""The disk tier: its rate against the disk's own, and a step with the optimizer on
disk against the longer of disk time and compute."""
import os
import pathlib
import statistics

from harness import ROOT, gpt_config

ABOUT = "disk tier against the disk's own O_DIRECT rate; step against the longer part"


def rates(b, folder):
    """GB/s that the disk itself reads and writes at the same time."""
    rows = b.call_json([b.program("bench/bench_nvme"), folder,
                        384 if b.quick else 768, 7 if b.quick else 11])
    b.raw += rows
    disk = 0.0
    for what in ("read", "write", "both"):
        some = [r for r in rows if r["what"] == what]
        # The best shape of all rounds: the best of each would be the luckiest.
        shape = max((k for k in some[0] if k not in ("what", "ours")),
                    key=lambda k: statistics.median(r[k] for r in some))
        disk = b.figure(f"disk, {what}", [r[shape] for r in some], "GB/s",
                        note=shape)
        b.figure(f"ours, {what}", [r["ours"] for r in some], "GB/s")
        b.figure(f"ours / disk, {what}", [r["ours"] / r[shape] for r in some],
                 "ratio", 0.9)
    return disk


def bytes_per_step(t):
    """From the disk and to it."""
    return 2 * sum(x["allocated_bytes"] for x in t.lines
                   if x.get("memory") == "optimizer" and x["tier"] == "nvme")


def step(b, folder, rate, micro, clip, seq=256):
    """Without clipping a unit's update follows its gradient; with it, all updates
    follow the whole backward, and only the next forward runs beside them."""
    model = {"width": 512, "heads": 8, "layers": 6, "seq": seq}
    nvme = {"stage": 2, "offload_optimizer": {"device": "nvme",
                                              "nvme_path": str(folder)}}
    cpu = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    disk, memory, size = [], [], 0
    for _ in range(2 if b.quick else 5):
        t = b.train({**gpt_config(micro, 1, nvme, 8, model),
                     "gradient_clipping": clip})
        size = bytes_per_step(t)
        disk.append(t.step_s)
        memory.append(b.train({**gpt_config(micro, 1, cpu, 8, model),
                               "gradient_clipping": clip}).step_s)
    disk_s = size * 1e-9 / rate
    short = "" if seq == 256 else f" of {seq} tokens"
    name = f"{micro} samples{short}, {'clipping' if clip else 'no clipping'}"
    b.figure(f"disk time of a step, {name}", disk_s, "s", better="less")
    b.figure(f"step in memory, {name}", memory, "s", better="less")
    b.figure(f"step on disk, {name}", disk, "s", better="less")
    b.figure(f"step on disk / longer of both, {name}",
             [d / max(disk_s, c) for d, c in zip(disk, memory)], "ratio",
             None if clip else 1.1, "less",
             note=f"their sum: {(disk_s + memory[0]) / max(disk_s, memory[0]):.2f}")


def run(b):
    # The build folder is on a disk; /tmp may be memory.
    folder = pathlib.Path(os.environ.get("IZ_BENCH_DISK", ROOT / "build/bench-disk"))
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    rate = rates(b, folder)
    for clip in (0, 1.0):
        step(b, folder, rate, 1, clip, 64)  # the disk takes longer than the compute
        for micro in (1, 4):
            step(b, folder, rate, micro, clip)
