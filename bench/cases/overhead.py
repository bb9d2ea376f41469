# SPDX-License-Identifier: Apache-2.0
"""What the runtime itself costs: a task, its memory, its share of a step, and whether
the workers ever wait for the thread that submits."""
from harness import GPT2_124M, OFFLOAD, gpt_config

ABOUT = "the runtime itself: a task, its memory, its share of a step"


def doors(b):
    """us per task of our door, after the figures of both."""
    rows = b.call_json([b.program("bench/bench_overhead"), 20000,
                        5 if b.quick else 15])
    us = {d: [r["total_us"] for r in rows if r["door"] == d]
          for d in ("izar", "StarPU")}
    submit = [r["submit_us"] for r in rows if r["door"] == "izar"]
    kib = {d: b.call_json([b.program("bench/bench_overhead"), 20000,
                           d])[0]["kib_per_task"] for d in us}
    b.figure("a task through StarPU", us["StarPU"], "us", better="less")
    ours = b.figure("a task through iz_task_submit", us["izar"], "us", better="less")
    b.figure("  of that, its submission", submit, "us", better="less")
    b.figure("iz_task_submit / StarPU",
             [x / y for x, y in zip(us["izar"], us["StarPU"])], "ratio", 1.5,
             "less")
    b.figure("memory of 10,000 waiting tasks", kib["izar"] * 1e4 / 1024, "MiB",
             better="less", note=f"StarPU alone {kib['StarPU'] * 1e4 / 1024:.1f}")
    return ours


def step(b, name, config, us):
    t = b.train(config)
    tasks = t.tasks_per_step
    b.figure(f"runtime's share of a step, {name}",
             100 * tasks * us * 1e-6 / t.step_s, "%", 1.0, "less",
             note=f"{tasks:.0f} tasks, {t.step_s * 1e3:.0f} ms")
    s = t.last("submission")
    steps = t.summary["steps"]
    b.figure(f"a step's submission, {name}", s["seconds"] / steps * 1e3, "ms",
             better="less")
    b.figure(f"least lead of submission, in steps, {name}",
             s["least_lead_s"] / t.step_s, "steps", 0.0)


def run(b):
    us = doors(b)
    step(b, "GPT 6x384", gpt_config(zero=OFFLOAD, steps=12), us)
    step(b, "GPT 6x384, 4 micro-batches",
         gpt_config(accum=4, zero=OFFLOAD, steps=6), us)
    step(b, "GPT-2 124M", gpt_config(1, zero=OFFLOAD, steps=3 if b.quick else 6,
                                     model={**GPT2_124M, "seq": 1024}), us)
