# SPDX-License-Identifier: Apache-2.0
"""izar beside what a user would take instead, on the same cores, alternating: ratios of
tokens per second, and of AdamW's parameters per second.  PyTorch, DeepSpeed and FSDP2
run in the Python of IZ_BENCH_PYTHON (default /usr/bin/python3); IZ_BENCH_LLMC names a
checkout of llm.c."""
import itertools
import json
import os
import pathlib
import statistics
import subprocess

from cases.kernels import parse
from harness import GPT, GPT2_124M, OFFLOAD, ROOT, first_line, gpt_config

ABOUT = "tokens per second against PyTorch, DeepSpeed, FSDP2 and llm.c"

PYTHON = os.environ.get("IZ_BENCH_PYTHON", "/usr/bin/python3")
LLMC = os.environ.get("IZ_BENCH_LLMC")
PEERS = ROOT / "bench" / "peers"

# name, model, samples, steps, types
SHAPES = (("GPT 6x384, vocabulary 256", GPT, 4, 8, ("fp32", "bf16")),
          ("GPT 6x384, vocabulary 50304", {**GPT, "vocab": 50304}, 4, 5, ("fp32",)),
          ("GPT-2 124M, 256 tokens", GPT2_124M, 4, 4, ("fp32", "bf16")))


COMPILE_S = 1800  # torch.compile, and the extensions that DeepSpeed builds
CPU = {"DS_ACCELERATOR": "cpu"}


def python_runs(program):
    return subprocess.run([PYTHON, "-c", program], env={**os.environ, **CPU},
                          capture_output=True, check=False).returncode == 0


def absent(b, name, how):
    print(f"  {name}: absent: {how}", flush=True)
    b.raw.append({"peer": name, "absent": how})


def median_s(seconds):
    """Without the first two steps, in which memory is touched."""
    return statistics.median(seconds[2:] or seconds)


def shape_args(model, samples, steps, threads):
    return [*(model[k] for k in ("layers", "heads", "width", "seq", "vocab")),
            samples, steps, threads]


def ours(b, model, samples, steps, ranks=None, dtype="fp32"):
    """Tokens per second of all ranks; `samples` of each."""
    config = gpt_config(samples, 1, OFFLOAD if ranks else {"stage": 0}, steps, model)
    config["bf16"] = {"enabled": dtype == "bf16"}
    return b.train(config, ranks).median("tokens_per_s")


def ratio(b, name, pairs, version):
    b.figure(f"izar / {name}", [o / p for o, p in pairs], "ratio", 1.0,
             note=f"{statistics.median(o for o, _ in pairs):.0f} and "
             f"{statistics.median(p for _, p in pairs):.0f} tokens/s, {version}")


def torch_modes():
    """Eager, and compiled where PyTorch can."""
    return ("eager", "compile") if python_runs(
        "import torch; torch.compile") else ("eager",)


def against_torch(b):
    threads = len(os.sched_getaffinity(0))
    if not python_runs("import torch"):
        absent(b, "PyTorch", "apt install python3-torch, or IZ_BENCH_PYTHON")
        return
    modes = torch_modes()
    if "compile" not in modes:
        absent(b, "torch.compile", "needs PyTorch 2 in IZ_BENCH_PYTHON")
    bf16_products = b.bf16_products()
    for name, model, samples, steps, types in SHAPES[:1] + SHAPES[2:] if b.quick \
            else SHAPES:
        for mode, dtype in itertools.product(modes, types):
            # PyTorch's products of bf16 take thirty times as long where the
            # processor has none.
            if dtype == "bf16" and not bf16_products:
                absent(b, f"{mode}, {name}, bf16", "this machine makes no products "
                       "of bf16")
                continue
            pairs, row = [], {}
            for _ in range(2 if b.quick else 5):
                row = b.call_json([PYTHON, PEERS / "gpt.py", mode,
                                   *shape_args(model, samples, steps, threads),
                                   dtype], timeout=COMPILE_S)[0]
                peer = samples * model["seq"] / median_s(row["seconds"])
                pairs.append((ours(b, model, samples, steps, dtype=dtype), peer))
            ratio(b, f"PyTorch {mode}, {name}, {dtype}", pairs,
                  f"torch {row['torch']}")


# What a peer on two ranks needs, and how to get it.
DEEPSPEED = ("import deepspeed",
             "pip install deepspeed in the Python of IZ_BENCH_PYTHON")
FSDP2 = ("""import re, torch
from torch.distributed.fsdp import fully_shard
assert [int(x) for x in re.findall(r"\\d+", torch.__version__)[:2]] >= [2, 8]""",
         "needs PyTorch 2.8 in IZ_BENCH_PYTHON; earlier ones fail without a GPU")


def against_sharded(b, kind, needs):
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    if not python_runs(needs[0]):
        absent(b, kind, needs[1])
        return
    name, model, samples, steps, _ = SHAPES[0]
    line = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", 2,
            PEERS / "gpt.py", kind]
    # The first start builds what DeepSpeed builds.
    b.call([*line, *shape_args(model, samples, 1, threads)], cwd=PEERS, env=CPU,
           timeout=COMPILE_S)
    pairs, row = [], {}
    for _ in range(2 if b.quick else 5):
        row = b.call_json([*line, *shape_args(model, samples, steps, threads)],
                          cwd=PEERS, env=CPU)[0]
        peer = 2 * samples * model["seq"] / median_s(row["seconds"])
        pairs.append((ours(b, model, samples, steps, 2), peer))
    ratio(b, f"{kind} on 2 ranks, {name}", pairs, row["version"])


# What is run one after the other for an update, ours; theirs: adam.py.
ADAM = {"fp32": ("adam fp32 gradient",),
        "mixed": ("norm2 bf16", "adam bf16 gradient and copy")}


def our_adam(b, threads, kernels):
    """Millions of parameters per second; None where the machine is too busy."""
    seconds = 0
    for name in kernels:
        found = parse(b.call([b.program("bench/bench_kernels"), threads, 2, name]))
        if name not in found:
            return None
        seconds += 1 / found[name][1]
    return 1 / seconds


def adam_ratio(b, kind, job, threads):
    """AdamW of one peer.  Its rate is of its CPU time, which flatters it on a busy
    machine."""
    pairs, row = [], {}
    for _ in range(3 if b.quick else 5):
        row = b.call_json([PYTHON, PEERS / "adam.py", kind, job, threads, 3],
                          env=CPU)[0]
        own = our_adam(b, threads, ADAM[job])
        if own:
            pairs.append((own, statistics.median(row["cpu"])))
    b.raw.append({"adam": kind, "job": job, "threads": threads, "pairs": pairs,
                  "wall": statistics.median(row["wall"])})
    if not pairs:
        raise RuntimeError("AdamW: the machine is too busy")
    # The aim for PyTorch's fused one is of all that an update of 16 bits needs.
    b.figure(f"izar / AdamW {kind}, {job}, {threads} threads",
             [o / p for o, p in pairs], "ratio",
             2.0 if (kind, job) == ("fused", "mixed") else 1.0,
             note=f"{statistics.median(o for o, _ in pairs):.0f} and "
             f"{statistics.median(p for _, p in pairs):.0f} M/s, {row['version']}")


def against_adam(b):
    """fp32: AdamW alone; mixed: all that parameters and gradients in bf16 need, with
    clipping."""
    kinds = {"fused": "import torch; torch.optim.AdamW([torch.nn.Parameter("
             "torch.ones(1))], fused=True)", "deepspeed": DEEPSPEED[0],
             "foreach": "import torch", "single": "import torch"}
    all_threads = len(os.sched_getaffinity(0))
    for kind, needs in kinds.items():
        if not python_runs(needs):
            absent(b, f"AdamW {kind}", "not in IZ_BENCH_PYTHON")
            continue
        b.call([PYTHON, PEERS / "adam.py", kind, "fp32", 1, 0], env=CPU,
               timeout=COMPILE_S)
        for job in ADAM if kind in ("fused", "deepspeed") else ("fp32",):
            for threads in sorted({1, all_threads}):
                adam_ratio(b, kind, job, threads)


def against_llmc(b):
    """The functions of llm.c's program for CPUs, built with its own flags."""
    if not LLMC:
        absent(b, "llm.c", "IZ_BENCH_LLMC=, a folder with its train_gpt2.c")
        return
    program = b.folder / "llmc_gpt"
    b.call(["cc", "-Ofast", "-march=native", "-fopenmp", "-DOMP", "-w", "-I", LLMC,
            PEERS / "llmc_gpt.c", "-o", program, "-lm"])
    version = first_line("git", "-C", LLMC, "describe", "--always", "--dirty") \
        if (pathlib.Path(LLMC) / ".git").exists() else "not a git checkout"
    threads = len(os.sched_getaffinity(0))
    for name, model, samples, _, _ in SHAPES:
        pairs = []
        for _ in range(2 if b.quick else 5):
            row = b.call_json([program, *shape_args(model, samples, 4, threads)[:-1]],
                              env={"OMP_NUM_THREADS": str(threads)})[0]
            peer = samples * model["seq"] / median_s(row["seconds"])
            pairs.append((ours(b, model, samples, 5), peer))
        ratio(b, f"llm.c, {name}", pairs, version)


def run(b):
    failed = []
    for peer, *more in ((against_adam,), (against_sharded, "deepspeed", DEEPSPEED),
                        (against_sharded, "fsdp2", FSDP2), (against_torch,),
                        (against_llmc,)):
        try:
            peer(b, *more)
        except (RuntimeError, OSError, LookupError, json.JSONDecodeError) as why:
            print(f"  {peer.__name__} {more[:1]}: {why}", flush=True)
            failed.append(str(why))
    if failed:
        raise RuntimeError("\n".join(failed))
