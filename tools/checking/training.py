# SPDX-License-Identifier: Apache-2.0
"""Training of large models, with their shipped configs and as the rows below change them,
and of the same models by others.  A row's figures are those of its metrics.jsonl."""
import functools
import gzip
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from checking.machine import may_lock, smi
from checking.small import homes, lora, refused
from checking.work import PACKED, ROOT, Job, harness, say

# Dense bf16 and fp16 with fp32 sums, TFLOP/s: NVIDIA's data sheets.
PEAK = (("H200 NVL", 835.0), ("H200", 989.4), ("H100 PCIe", 756.0), ("H100 NVL", 835.0),
        ("H100", 989.4), ("A100", 311.9), ("A10", 125.0), ("L40S", 362.0))


class Row(NamedTuple):
    name: str
    expected_s: float  # with its start, on a machine whose memory nothing has touched yet
    program: str
    config: str
    more: dict = {}
    steps: int = 5
    ranks: int = 1


def batch(micro, accumulated=1):
    return {"train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulated}


def states(dtype):
    return {"run.state_dtype": dtype, "run.master": "full"}


RESIDENT = homes(0, "none", "none")
OWN = {"run.gpu_attention": "own", "run.gpu_attention_backward": "own"}
LOG = {"run.task_log": True}

FP32 = states("fp32")  # as the peers have them

FIRST = (
    Row("1.5B resident", 13, "gpt2", "gpt2-1.5b", {**RESIDENT, **batch(16), **FP32, **LOG}),
    Row("1.5B offload, all states on the host", 13, "gpt2", "gpt2-1.5b",
        {**FP32, "zero_optimization.offload_optimizer.ratio": 1}),
    Row("1.5B offload, fp32 states", 15, "gpt2", "gpt2-1.5b", FP32),
    Row("1.5B as shipped", 18, "gpt2", "gpt2-1.5b"),
    Row("7B as shipped", 42, "gpt2", "gpt2-7b", LOG, 4),
    Row("7B 128K as shipped", 50, "gpt2", "gpt2-7b", {"train_batch_size": 64, **LOG}, 3),
    Row("7B 32K, fp32 states", 40, "gpt2", "gpt2-7b", FP32, 4),
    Row("7B 32K, fp8 states", 33, "gpt2", "gpt2-7b", states("fp8"), 4),
    Row("1.5B resident, own attention", 10, "gpt2", "gpt2-1.5b",
        {**RESIDENT, **batch(16), **FP32, **OWN}),
)
BESIDE = (  # proofs and no timings: they run beside each other
    Row("124M, 2 ranks on one GPU", 15, "gpt2", "gpt2-124m",
        {**batch(8, 2), "run.comm": "mpi"}, 4, 2),
    Row("124M, states on nvme", 20, "gpt2", "gpt2-124m",
        {**batch(8), "zero_optimization.offload_optimizer.device": "nvme"}, 4),
)
SECOND = (  # first what no GPU has run
    Row("14B 128K", 120, "gpt2", "gpt2-14b",
        {"train_batch_size": 64}, 2),
    Row("Qwen3 30B-A3B, LoRA", 95, "moe", "qwen3-30b-a3b", {
        **batch(8), **lora(16, "*self_attn*"), "model.seq": 2048,
        "run.master": "full"}, 3),
    Row("Llama 8B, LoRA on nf4", 48, "llama", "llama-3-8b-nf4", {
        **batch(8), "zero_optimization.offload_param.frozen_device": "none"}, 4),
    Row("1.5B Muon", 16, "gpt2", "gpt2-1.5b", {**batch(16), "optimizer.type": "Muon"}, 4),
)

TINY = {"gpt2": "quickstart", "llama": "llama-tiny", "moe": "moe-tiny"}


def config_of(c, row):
    """The row's config; with --tiny with the model of a small one."""
    config = json.loads((ROOT / f"configs/{row.config}.json").read_text())
    if c.o.tiny:
        small = json.loads((ROOT / f"configs/{TINY[row.program]}.json").read_text())
        kept = {k: v for k, v in config["model"].items() if k == "base_dtype"}
        config["model"] = {**small["model"], **kept}
    return config


def folder_of(c, row):
    return c.folder / re.sub("[^0-9A-Za-z]+", "-", row.name)


def settings_of(c, row):
    s = {"run.steps": row.steps, "run.save": False, "run.log_interval": 1,
         "run.device": "cuda", **row.more,
         "data.path": harness.text_file(c.folder), "data.bytes": True,
         "run.output": folder_of(c, row)}
    if c.o.tiny:
        s.pop("model.seq", None)
    if "nvme" in row.more.values():
        s["zero_optimization.offload_optimizer.nvme_path"] = c.o.nvme or c.folder
    if not may_lock():
        s.update({f"zero_optimization.offload_{x}.pin_memory": False
                  for x in ("param", "optimizer")})
    return s


@functools.cache
def peak():
    """TFLOP/s of this GPU, None if it is not known."""
    device = harness.first_line(*smi("name"))
    return next((p for name, p in PEAK if name in device), None)


def figures(lines):
    """What a row is compared by."""
    summary = [x["summary"] for x in lines if "summary" in x]
    if not summary:
        return {}
    s, steps = summary[-1], [x["seconds"] for x in lines if "loss" in x and "seconds" in x]
    gib = {tier: sum(x["allocated_bytes"] for x in lines if x.get("tier") == tier) / 2**30
           for tier in ("device", "cpu")}
    return {"step_s": statistics.median(steps[1:] or steps),
            "tokens_per_s": s.get("tokens_per_s"), "tflop_per_s": s["gflop_per_s"] / 1e3,
            "device_gib": gib["device"], "host_gib": gib["cpu"]}


def shown(f):
    of = peak()
    return (f"{f['step_s']:.3f} s  {f['tokens_per_s'] or 0:8.0f} tokens/s  "
            + (f"{f['tflop_per_s']:6.1f} TFLOP/s  " if "tflop_per_s" in f else "")
            + (f"{100 * f['tflop_per_s'] / of:.1f} % MFU  "
               if of and "tflop_per_s" in f else "")
            + f"{f['device_gib']:.1f} GiB on the GPU")


def job_of(c, row):
    path = folder_of(c, row).with_suffix(".json")
    path.write_text(json.dumps(config_of(c, row)))
    return Job(row.name, [*harness.ranks_line(row.ranks), c.programs[row.program], path,
                          *harness.settings(settings_of(c, row))], 2 * row.expected_s + 20)


def add(c, part, row, job, status, text, seconds):
    """The result of a row that has run."""
    out = folder_of(c, row)
    lines = harness.json_lines(out / "metrics.jsonl")
    f = figures(lines)
    limited = re.search(r"^limited by: .*", text, re.M)
    cannot = status and ("this run needs" in text or refused(text))
    result = "skipped" if cannot else c.outcome(status, job.limit_s)
    c.add(part, row.name, result if f or result != "passed" else "failed",
          f"{seconds:5.1f} s  " + (shown(f) if f else "; ".join(
              re.findall(r"^izar: .*", text, re.M)[:1])),
          seconds=seconds, **f, **c.clocks.busy(time.time() - seconds), more=row.more,
          lines=lines, text=text[-9000:], tail=text[-1500:])
    if limited and f:
        say(f"{'':<30}{limited[0]}")
    log = out / "tasks.jsonl"
    if log.is_file():
        with open(log, "rb") as a, gzip.open(c.out / f"tasks-{out.name}.jsonl.gz", "wb") as b:
            shutil.copyfileobj(a, b)
    shutil.rmtree(out, ignore_errors=True)


def rows(c, part, table):
    """Those for which there is time."""
    known = {r.name: r for r in table}
    for name in c.todo(part, known):
        if c.left() > (0 if c.o.tiny else known[name].expected_s):
            for ended in c.run([job_of(c, known[name])]):
                add(c, part, known[name], *ended)


def first(c):
    rows(c, "training", FIRST)


def second(c):
    rows(c, "training", SECOND)


# ---- others ------------------------------------------------------------------

ADAM_S = 60  # DeepSpeed compiles its Adam for the host at its first start
PEERS = {"deepspeed": ("deepspeed", ADAM_S + 66), "compile": ("torch", 30),
         "fsdp2": ("torch", 45)}  # what it imports, expected seconds
ONE_PROCESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0",
               "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
               "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", ""),  # it knows its own
               **({"PYTHONPATH": str(ROOT / "python")} if PACKED else {})}


def python_with(module, env):
    """A Python that has it and PyTorch, or None.  It is not imported, which takes seconds;
    where that fails, the case tells why."""
    has = "import sys; from importlib.util import find_spec as f; " \
          f"sys.exit(not (f('torch') and f('{module}')))"
    for python in (sys.executable, shutil.which("python3"),
                   *map(str, Path("/opt").glob("*/.venv/bin/python3"))):
        if python and Path(python).exists() and not subprocess.run(
                [python, "-c", has], env=env, capture_output=True).returncode:
            return python
    return None


def theirs(said, model):
    """Figures of a peer, counted as ours are."""
    step_s, tokens = statistics.median(said["seconds"][2:]), 16 * model["seq"]
    flops = tokens * (6 * said["parameters"]
                      + 6 * model["layers"] * model["width"] * model["seq"])
    return {"step_s": step_s, "tokens_per_s": tokens / step_s,
            "tflop_per_s": flops / step_s / 1e12, "device_gib": said["gpu_gib"]}


def adam_job(c):
    """In vain if there is no time to train with it."""
    python = c.left() > ADAM_S + PEERS["deepspeed"][1] and c.todo("peers", ["deepspeed"]) \
        and python_with("deepspeed", {**c.env, **ONE_PROCESS})
    return [Job("DeepSpeed's Adam", [python, "-c", "from deepspeed.ops.adam import "
                                     "DeepSpeedCPUAdam as A; import torch; "
                                     "A([torch.zeros(9)])"], 90, ONE_PROCESS)] if python else []


def peer(c, kind):
    """The 1.5B with 16 samples a step; with compile all of it is on the GPU."""
    module, expected_s = PEERS[kind]
    env = {**ONE_PROCESS, **({"DS_ACCELERATOR": "cpu"} if c.o.tiny else {})}
    python = python_with(module, {**c.env, **env})
    if not python:
        c.add("peers", kind, "skipped", f"no Python with {module}")
        return
    model = json.loads((ROOT / "configs/gpt2-1.5b.json").read_text())["model"]
    if c.o.tiny:
        model = {"layers": 2, "heads": 2, "width": 32, "seq": 16, "vocab": 256}
    shape = [model[k] for k in ("layers", "heads", "width", "seq", "vocab")]
    line = [python, ROOT / "bench/peers/gpt.py", kind, *shape, 16, 6, os.cpu_count(),
            *([] if c.o.tiny else ["bf16", "cuda"])]
    for job, status, text, seconds in c.run([Job(kind, line, 2 * expected_s + 20, env)]):
        said = [json.loads(x) for x in text.splitlines() if x.startswith('{"seconds')]
        f = theirs(said[0], model) if said else {}
        result = c.outcome(status, job.limit_s)
        c.add("peers", kind, result if f or result != "passed" else "failed",
              f"{seconds:5.1f} s  " + (shown(f) if f else ""), seconds=seconds, **f,
              **c.clocks.busy(time.time() - seconds), said=said, tail=text[-3000:])


def peers(c):
    for kind in c.todo("peers", PEERS):
        if c.left() > (0 if c.o.tiny else PEERS[kind][1]):
            peer(c, kind)
