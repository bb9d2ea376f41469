# SPDX-License-Identifier: Apache-2.0
"""From the command to the first step, without training."""
import mmap
import os
import pathlib
import time

from harness import gpt_config

ABOUT = "start of a large model: memory, initial weights"

MODELS = {"350M": {"layers": 24, "heads": 16, "width": 1024},
          "1.5B": {"layers": 48, "heads": 25, "width": 1600}}


def parameters(m, vocab, seq):
    c = m["width"]
    return m["layers"] * (12 * c * c + 13 * c) + (vocab + seq + 2) * c


def mapped(p):
    """Bytes."""
    try:
        pages = pathlib.Path(f"/proc/{p.pid}/statm").read_text().split()[0]
    except (OSError, IndexError):  # it is ending
        return 0
    return int(pages) * mmap.PAGESIZE


def warm(size):
    """A program whose weights are that large gets memory that was used just before: this
    holds as much until it has mapped three times that (gradients and states too).  A
    virtual machine may give free memory back to its host at any time, and gets it again
    far slower than a processor can write it."""
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, size, 1 << 20):
        memory[at:at + (1 << 20)] = b"\1" * (1 << 20)

    def let_go(p):
        end = time.monotonic() + 300
        while p.poll() is None and mapped(p) < 3 * size and time.monotonic() < end:
            time.sleep(0.001)
        memory.close()
    return let_go


def run(b):
    cores = len(os.sched_getaffinity(0))
    for name, shape in MODELS.items():
        model = {**shape, "seq": 1024, "vocab": 50257}
        # Only the weights are touched; states are zero pages until step 1.
        config = gpt_config(1, steps=0, model=model,
                            memory_limit_bytes=10 ** 13)
        gb = parameters(shape, 50257, 1024) * 4e-9
        size = int(gb * 1e9) >> 20 << 20
        rounds = []
        for i in range(7 if b.quick else 11):
            limit = b.call_json([b.program("bench/bench_touch"), cores, 1024, 2])[1]
            start = b.train(config, begun=warm(size)).last("start")
            if i:  # before the first one nothing of ours had used the memory
                rounds.append((limit, start, gb / start["weights_s"]))
        for key, what in (("constant", "filling new memory with a constant"),
                          ("normal", "filling new memory with the numbers"),
                          ("in_cache", "making the numbers in the cache")):
            b.figure(f"{what}, {name}", [r[key] for r, _, _ in rounds], "GB/s")
        b.figure(f"initial weights, {name} fp32", [x for _, _, x in rounds],
                 "GB/s", note=f"{gb:.1f} GB")
        b.figure(f"initial weights / filling with the numbers, {name}",
                 [x / r["normal"] for r, _, x in rounds], "ratio", 0.8)
        b.figure(f"initial weights / filling with a constant, {name}",
                 [x / r["constant"] for r, _, x in rounds], "ratio")
        b.figure(f"memory and StarPU, {name}",
                 [s["open_s"] for _, s, _ in rounds], "s", better="less")
