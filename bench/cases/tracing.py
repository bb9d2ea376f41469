# SPDX-License-Identifier: Apache-2.0
"""Runs of one config with and without a trace, in turns: the ratio of their median
steps."""
import statistics

from harness import OFFLOAD, ROOT, ranks_line

ABOUT = "steps with a trace against steps without"

CONFIG = {
    "train_batch_size": 16, "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": OFFLOAD,
    "model": {"layers": 6, "heads": 4, "width": 128, "seq": 128, "vocab": 256},
    "run": {"steps": 16, "workers": 1},
}
# As they are printed: those of the default window, and all but the first.
STEPS = {"window": range(3, 7), "run": range(2, CONFIG["run"]["steps"] + 1)}


def seconds(b, ranks, traced):
    """{step: seconds} of one run."""
    tool = [ROOT / "tools/trace", b.folder / "trace", "--no-starvz", "--"]
    lines = b.train(CONFIG, prefix=[*(tool if traced else []), *ranks_line(ranks)]).lines
    return {x["step"]: x["seconds"] for x in lines if "seconds" in x and "step" in x}


def run(b):
    for ranks in (1,) if b.quick else (1, 2):
        pairs = []
        for i in range(4 if b.quick else 16):
            order = (False, True) if i % 2 else (True, False)
            pairs.append({traced: seconds(b, ranks, traced) for traced in order})
        for name, steps in STEPS.items():
            b.figure(f"traced / not traced, {name}, {ranks} ranks",
                     [statistics.median(p[True][i] for i in steps) /
                      statistics.median(p[False][i] for i in steps) for p in pairs],
                     "ratio", 1.05, "less")
