# SPDX-License-Identifier: Apache-2.0
"""The disk tier: its rate against the disk's own, and a step with the optimizer on
disk against the longer of disk time and compute."""
import os
import pathlib

from harness import gpt_config

ABOUT = "disk tier against the disk's own O_DIRECT rate; step against the longer part"

STATE_BYTES = 8  # of fp32 states of a parameter: m and v, read and written


def rates(b, folder):
    rows = b.call_json([b.program("bench/bench_nvme"), folder,
                        768 if b.quick else 3072, 3 if b.quick else 8])
    b.raw += rows
    both = 0.0
    for what in ("read", "write", "both"):
        some = [r for r in rows if r["what"] == what]
        b.figure(f"disk, {what}", [r["disk"] for r in some], "GB/s")
        r = b.figure(f"ours, {what}", [r["ours"] for r in some], "GB/s")
        b.figure(f"ours / disk, {what}", [r["ours"] / r["disk"] for r in some],
                 "ratio", 0.9)
        both = r if what == "both" else both
    return both


def bytes_per_step(t):
    """From the disk and to it."""
    states = sum(x["allocated_bytes"] for x in t.lines
                 if x.get("memory") == "optimizer" and x["tier"] == "nvme")
    return 2 * states


def step(b, folder, micro, accum):
    model = {"width": 512, "heads": 8, "layers": 6}
    nvme = {"stage": 2, "offload_optimizer": {"device": "nvme",
                                              "nvme_path": str(folder)}}
    cpu = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    out = []
    for _ in range(2 if b.quick else 5):
        on_disk = b.train(gpt_config(micro, accum, nvme, 6, model))
        in_memory = b.train(gpt_config(micro, accum, cpu, 6, model))
        out.append((on_disk, in_memory))
    disk = b.call_json([b.program("bench/bench_nvme"), folder, 768, 1])
    rate = [r["disk"] for r in disk if r["what"] == "both"][0]
    name = f"{micro * accum} samples a step"
    disk_s = bytes_per_step(out[0][0]) * 1e-9 / rate
    b.figure(f"disk time of a step, {name}", disk_s, "s", better="less")
    b.figure(f"step in memory, {name}", [c.step_s for _, c in out], "s",
             better="less")
    b.figure(f"step on disk, {name}", [d.step_s for d, _ in out], "s",
             better="less")
    b.figure(f"step on disk / longer of both, {name}",
             [d.step_s / max(disk_s, c.step_s) for d, c in out], "ratio", 1.1,
             "less", note=f"their sum would be "
             f"{(disk_s + out[0][1].step_s) / max(disk_s, out[0][1].step_s):.2f}")


def run(b):
    # The build folder is on a disk; /tmp may be memory.
    folder = pathlib.Path(os.environ.get("IZ_BENCH_DISK", "build/bench-disk"))
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    rates(b, folder)
    step(b, folder, 1, 1)
    step(b, folder, 4, 1)
