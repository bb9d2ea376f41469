# SPDX-License-Identifier: Apache-2.0
"""How the cost of a step grows: one thing grows at a time, and the exponent of a power
law is fitted to the step times.  The mathematics asks for an exponent of 1 in layers
and micro-batches, of 1 to 2 in width, and of 0 in ranks (of one global batch on the
same cores) and in chunks."""
import math
import statistics

from harness import GPT, OFFLOAD, gpt_config

ABOUT = "how the time of a step grows: fitted exponents"


def fit(xs, ys):
    """Slope of the least-squares line through the logarithms."""
    return statistics.linear_regression(map_log(xs), map_log(ys)).slope


def map_log(values):
    return [math.log(v) for v in values]


def small(**model):
    return {**GPT, "layers": 4, "heads": 4, "width": 128, "seq": 128, **model}


def sweep(b, name, values, make, most, ranks=None):
    """One series; `most` is the exponent that is still fine."""
    rounds = 2 if b.quick else 4
    times = {v: [] for v in values}
    for _ in range(rounds):
        for v in values:
            t = b.train(make(v), ranks(v) if ranks else None)
            times[v].append(min(x["seconds"] for x in t.steps))
    for v in values:
        b.figure(f"{name} {v}", [1e3 * s for s in times[v]], "ms", better="less")
    best = [min(times[v]) for v in values]
    b.figure(f"exponent in {name}", fit(values, best), "", most, "less")
    last = math.log(best[-1] / best[-2]) / math.log(values[-1] / values[-2])
    b.figure(f"exponent in {name}, last two", last, "", better="less")


def run(b):
    steps = 6 if b.quick else 12
    sweep(b, "layers", (2, 8, 32, 96) if b.quick else (2, 4, 8, 16, 32, 64, 128),
          lambda n: gpt_config(2, zero=OFFLOAD, steps=steps,
                               model=small(layers=n)), 1.05)
    sweep(b, "width", (128, 256, 512) if b.quick else (64, 128, 256, 512, 1024),
          lambda n: gpt_config(2, zero=OFFLOAD, steps=steps,
                               model=small(width=n)), 2.05)
    sweep(b, "micro-batches", (1, 4, 16) if b.quick else (1, 2, 4, 8, 16, 32, 64),
          lambda n: gpt_config(1, n, OFFLOAD, steps, small()), 1.05)
    chunks = (1, 8, 64)

    def chunked(n):
        width = 256
        unit = 12 * width * width
        return gpt_config(2, zero={**OFFLOAD, "sub_group_size": unit // n},
                          steps=steps, model=small(width=width))
    sweep(b, "chunks", chunks, chunked, 0.1)
    sweep(b, "ranks", (1, 2, 4),
          lambda n: gpt_config(4 // n, 1, OFFLOAD, steps, small(width=256),
                               workers=1 if n > 1 else 0), 0.6, lambda n: n)
