# SPDX-License-Identifier: Apache-2.0
"""Small runs of every family and feature, against their losses on a CPU, which were
computed before; those that only lie elsewhere, against each other, bit for bit.  A text
that is generated in fp32 is that of the CPU."""
import json
import re
from typing import NamedTuple

from checking.work import Job, harness, say

STEPS = 6  # later a spike of the loss may part two runs that both are right
AT_ONCE = 3
# Of the loss of a step, relative.  In fp32 only the order of sums differs.  With 16 bits
# the GPU also rounds every activation, by 2^-9 (2^-12) of it and more or less at random; a
# loss is a mean over hundreds of tokens.  A router sends some tokens elsewhere in any type.
NEAR = {"fp32": 1e-6, "tf32": 1e-4, "fp16": 1e-4, "bf16": 2e-3}

ZERO = "zero_optimization."
BF16 = {"bf16.enabled": True}
FP16 = {"fp16.enabled": True, "fp16.loss_scale": 1024}  # no step is left out
MUON = {"optimizer.type": "Muon"}
FULL = {"run.recompute": "full", "activation_checkpointing.cpu_checkpointing": True}
CUDNN = {"run.gpu_attention": "cudnn", "run.gpu_attention_backward": "cudnn"}


def homes(stage, optimizer, param):
    return {ZERO + "stage": stage, ZERO + "offload_optimizer.device": optimizer,
            ZERO + "offload_param.device": param}


def lora(rank, targets="*attn*, *mlp*"):
    return {"lora.rank": rank, "lora.alpha": 2 * rank, "lora.targets": targets}


class Small(NamedTuple):
    name: str
    program: str
    config: str
    more: dict
    same: str = ""  # those with the same word here have the same bits


def table():
    rows = [Small(f"{name} {t}", program, config, more)
            for t, more in (("fp32", {}), ("bf16", BF16), ("fp16", FP16))
            for name, program, config in (
                ("gpt2", "gpt2", "quickstart"), ("llama", "llama", "llama-tiny"),
                ("moe", "moe", "moe-tiny"), ("lora", "gpt2", "lora"),
                ("vit", "vit", "vit-tiny"), ("dlrm", "dlrm", "dlrm-tiny"))]
    rows = [r._replace(same="gpt2" if r.name == "gpt2 bf16" else "") for r in rows]
    rows += [Small(f"gpt2 {name}", "gpt2", "quickstart", {**BF16, **more}, "gpt2")
             for name, more in (
                 ("stage 0", homes(0, "none", "none")), ("stage 2", homes(2, "cpu", "none")),
                 ("remainder, ratio 0.5", {"run.master": "remainder",
                                           ZERO + "offload_optimizer.ratio": 0.5}),
                 ("full, boundaries on host", FULL),
                 ("nvme", homes(3, "nvme", "nvme")),
                 ("ring 1, no overlap", {"run.ring": 1, "run.overlap": False}))]
    four = {**BF16, "gradient_accumulation_steps": 4}
    rows += [Small(f"gpt2 4 {name}", "gpt2", "quickstart", {**four, **more}, "gpt2 4")
             for name, more in (("stage 2", homes(2, "cpu", "none")),
                                ("depth first", {"run.schedule": "depth_first"}),
                                ("breadth first", {"run.schedule": "breadth_first"}))]
    rows += [Small(f"gpt2 {name}", "gpt2", "quickstart", more) for name, more in (
        ("muon fp32", MUON), ("muon bf16", {**BF16, **MUON}),
        ("lion bf16", {**BF16, "optimizer.type": "Lion", "optimizer.params.lr": 3e-4}),
        ("states bf16", {**BF16, "run.state_dtype": "bf16"}),
        ("states fp8", {**BF16, "run.state_dtype": "fp8"}),
        ("states fp8 on the GPU", {**BF16, "run.state_dtype": "fp8",
                                   **homes(3, "none", "none")}),
        ("odd sizes", {**BF16, "model.vocab": 257, "model.width": 132,
                       "model.seq": 127}),
        ("own attention", {**BF16, "run.gpu_attention": "own",
                           "run.gpu_attention_backward": "own"}),
        ("cudnn", {**BF16, **CUDNN, "model.width": 256}),
        *((f"text of {n}", {**more, "model.vocab": n, "run.sample_tokens": 8,
                            "run.sample_temperature": 0})
          for n, more in ((256, {}), (50257, BF16))))]
    rows += [Small(f"llama {name}", "llama", "llama-tiny", more) for name, more in (
        ("nf4 lora", {**BF16, **lora(8), "model.base_dtype": "nf4"}),
        ("int8 lora", {**BF16, **lora(8), "model.base_dtype": "int8"}),
        ("lora dropout", {**lora(8), "lora.dropout": 0.1}),
        ("lora rank 3", {**BF16, **lora(3)}),
        ("documents", {**BF16, "data.document_end": 32}),
        ("tf32", {"run.tf32": True}),
        ("heads of 64", {**BF16, "model.width": 256}),
        ("heads of 128, 1024 tokens", {**BF16, "model.width": 512, "model.seq": 1024,
                                       "train_micro_batch_size_per_gpu": 1}))]
    rows += [Small(f"moe {name}", "moe", "moe-tiny", {**BF16, **more}) for name, more in (
        ("lora", lora(4, "*")), ("experts in units", {"model.experts_per_unit": 3}))]
    return {r.name: r for r in rows}


TABLE = table()
# What a run on a CPU has no use for, and refuses or names in vain.
OF_THE_GPU = ("run.gpu_", "run.tf32", ZERO + "offload_optimizer.ratio")


def data_of(c, program):
    """What it trains on; of records, the same on every machine."""
    kind = {"vit": "shapes", "dlrm": "clicks"}.get(program)
    if not kind:
        return harness.text_file(c.folder)
    path = c.folder / f"{kind}.bin"
    if not path.is_file():
        list(c.run([Job(f"records {kind}", [c.programs["records"], kind, path, 4000], 60)]))
    return path


def command(c, row, device):
    more = row.more if device == "cuda" else {
        k: v for k, v in row.more.items() if not k.startswith(OF_THE_GPU)}
    s = {"run.output": c.folder / row.name.replace(" ", "-"), "run.steps": STEPS,
         "run.log_interval": 1, "run.eval_interval": 0, "run.save": False,
         "run.device": device, "data.path": data_of(c, row.program),
         "run.memory_limit_bytes": 8e9, "run.workers": 4 if device == "cuda" else 2, **more}
    if device == "cuda" and not c.o.tiny:
        s["run.device_memory_limit_bytes"] = 4e9
    if row.program in ("gpt2", "llama", "moe") and row.config != "lora":
        s.setdefault("run.sample_tokens", 0)
    if row.program == "moe":
        s["run.slices"] = 0
    for key in ("offload_optimizer", "offload_param"):
        if more.get(f"{ZERO}{key}.device") == "nvme":
            s[f"{ZERO}{key}.nvme_path"] = c.o.nvme or c.folder
    return Job(row.name, [c.programs[row.program], harness.ROOT / f"configs/{row.config}.json",
                          *harness.settings(s)],
               120, {"IZ_REFERENCE_GEMM": "256"})  # the rate of products is of no interest


def losses_of(c, name):
    path = c.folder / name.replace(" ", "-") / "metrics.jsonl"
    lines = [x for x in harness.json_lines(path) if "loss" in x and "step" in x]
    return {"losses": [float(x["loss"]) for x in lines],  # may be "nan"
            "norms": [x["grad_norm"] for x in lines]}


def generated(text):
    """The text that a run has generated, if it has, in a list."""
    return re.findall(r"^sample \(temperature .*\):\n(.*)", text, re.M)


def make_losses(c):
    """The file of losses on the CPU, a generated text behind them; what it has already is
    not computed again.  Returns how many runs failed."""
    path, failed = c.o.losses, 0
    known = json.loads(path.read_text()) if path.is_file() else {}
    jobs = [command(c, TABLE[n], "cpu") for n in c.todo("small", TABLE)
            if len(known.get(n, ())) < STEPS]
    for job, status, text, seconds in c.run(jobs, 2):
        losses = losses_of(c, job.name)["losses"]
        if status or len(losses) != STEPS:
            failed += 1
            say(f"{job.name}: exit {status}\n{text[-600:]}")
        else:
            known[job.name] = losses + generated(text)
            harness.write_json(path, {n: known[n] for n in TABLE if known.get(n)})
    say(f"{path}: losses of {len(known)} runs on the CPU")
    return failed


def refused(text):
    """What a program says that lacks something of this machine, or None; what a library
    does wrong in a step is no refusal."""
    found = re.search(r"^izar: (run\.gpu_attention|.*(O_DIRECT|capability)).*", text, re.M)
    return found and found[0]


def judged(c, row, status, text, want, first):
    """(status, how far off, why) of a run; first: what others of its word gave."""
    got = losses_of(c, row.name)
    if status and refused(text):
        return "skipped", None, refused(text)
    if status is None and c.left() <= 0:
        return "not finished", None, ""
    if status != 0 or len(got["losses"]) != STEPS:
        return "failed", None, f"exit {status}, {len(got['losses'])} steps"
    if row.same and got != first.setdefault(row.same, got):
        return "failed", None, f"other bits than others of {row.same!r}"
    if len(want or ()) < STEPS:
        return "failed", None, f"{c.o.losses} has no losses of it"
    kind = "bf16" if row.program == "moe" else next((t for t, on in (("tf32", "run.tf32"), ("fp16", "fp16.enabled"),
                                 ("bf16", "bf16.enabled")) if row.more.get(on)), "fp32")
    made, cpu = generated(text), want[STEPS:]
    # what 16 bits round may make another token the first
    if len(made) != len(cpu) or (kind == "fp32" and made != cpu):
        return "failed", None, f"generated {made}, a CPU {cpu}"
    bound = NEAR[kind] * (10 if "muon" in row.name else 1)
    off = [abs(a - b) / abs(b) for a, b in zip(got["losses"], want)]
    result = "passed" if all(x <= bound for x in off) else "failed"
    return result, max(off), f"bound {bound:.0e}"


def part(c):
    want = json.loads(c.o.losses.read_text()) if c.o.losses.is_file() else {}
    first = {TABLE[n].same: {k: r[k] for k in ("losses", "norms")}
             for (p, n), r in c.known.items()
             if p == "small" and n in TABLE and TABLE[n].same and r["status"] == "passed"}
    todo = [command(c, TABLE[n], "cuda") for n in c.todo("small", TABLE)]
    for job, status, text, seconds in c.run(todo, AT_ONCE):
        result, off, why = judged(c, TABLE[job.name], status, text, want.get(job.name),
                                  first)
        c.add("small", job.name, result, f"{seconds:5.1f} s  "
              + (f"off by {off:.1e}, " if off is not None else "") + why, off=off,
              seconds=seconds, tail=text[-1500:], **losses_of(c, job.name))
