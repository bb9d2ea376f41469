# SPDX-License-Identifier: Apache-2.0
"""Small runs of every family and feature, against their losses on a CPU, which were
computed before; those that only lie elsewhere, against each other, bit for bit.  A text
that is generated in fp32 is that of the CPU."""
import array
import json
import random
import re
import struct
from typing import NamedTuple

from checking.work import Job, harness, say

STEPS = 6  # later a spike of the loss may part two runs that both are right
AT_ONCE = 4
# Of the loss of a step, relative.  In fp32 only the order of sums differs.  With 16 bits
# the GPU also rounds every activation, by 2^-9 (2^-12) of it and more or less at random; a
# loss is a mean over hundreds of tokens.  A router of either type sends some elsewhere.
NEAR = {"fp32": 1e-6, "tf32": 1e-4, "fp16": 1e-4, "bf16": 2e-3}

ZERO = "zero_optimization."
BF16 = {"bf16.enabled": True}
FP16 = {"fp16.enabled": True, "fp16.loss_scale": 1024}  # no step is left out
MUON = {"optimizer.type": "Muon"}
LION = {"optimizer.type": "Lion", "optimizer.params.lr": 3e-4}
YARN = {"model.rope_scaling_type": "yarn", "model.rope_scaling_factor": 4,
        "model.rope_scaling_original_seq": 32}
BOUNDARIES = "activation_checkpointing.nvme_path"
FULL = {"run.recompute": "full", "activation_checkpointing.cpu_checkpointing": True}
CUDNN = {"run.gpu_attention": "cudnn", "run.gpu_attention_backward": "cudnn"}


def homes(stage, optimizer, param):
    return {ZERO + "stage": stage, ZERO + "offload_optimizer.device": optimizer,
            ZERO + "offload_param.device": param}


def family(name):
    return {"model.family": name}


def lora(rank, targets="*attn*, *mlp*"):
    return {"lora.rank": rank, "lora.alpha": 2 * rank, "lora.targets": targets}


class Small(NamedTuple):
    name: str
    program: str
    config: str
    more: dict
    same: str = ""  # those with the same word here have the same bits
    ranks: int = 1
    resumed: bool = False  # saves at each step, ends after half, goes on and exports


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
                 ("stage 1, delays", {**homes(1, "cpu", "none"), "run.inject_delay_us": 300}),
                 ("full, boundaries on host", FULL),
                 ("full, boundaries on nvme", {**FULL, BOUNDARIES: ""}),
                 ("nvme", homes(3, "nvme", "nvme")),
                 ("ring 1, no overlap", {"run.ring": 1, "run.overlap": False}))]
    rows += [Small("gpt2 resumed", "gpt2", "quickstart",
                   {**BF16, "run.hash_interval": 1}, "gpt2", resumed=True)]
    rows += [Small(f"gpt2 4 ranks {t}", "gpt2", "quickstart", {
        **more, "run.comm": "mpi", "train_micro_batch_size_per_gpu": 1,
        "run.slices": 1, "run.workers": 1, "run.sum_group": 2,
        ZERO + "zero_hpz_partition_size": 2}, ranks=4)
             for t, more in (("fp32", {}), ("bf16", BF16))]
    four = {**BF16, "gradient_accumulation_steps": 4}
    rows += [Small(f"gpt2 4 {name}", "gpt2", "quickstart", {**four, **more}, "gpt2 4")
             for name, more in (("stage 2", homes(2, "cpu", "none")),
                                ("depth first", {"run.schedule": "depth_first"}),
                                ("breadth first", {"run.schedule": "breadth_first"}))]
    rows += [Small(f"gpt2 {name}", "gpt2", "quickstart", more) for name, more in (
        ("muon fp32", MUON), ("muon bf16", {**BF16, **MUON}),
        ("muon on the host", {**BF16, **MUON, "run.muon_products": "host"}),
        ("lion bf16", {**BF16, **LION}),
        ("lion on the GPU", {**BF16, **LION, **homes(3, "none", "none")}),
        ("states bf16", {**BF16, "run.state_dtype": "bf16"}),
        ("states fp8", {**BF16, "run.state_dtype": "fp8"}),
        ("states fp8 on the GPU", {**BF16, "run.state_dtype": "fp8",
                                   **homes(3, "none", "none")}),
        ("odd sizes", {**BF16, "model.vocab": 257, "model.heads": 3, "model.width": 120,
                       "model.seq": 127}),
        ("pairs", {**BF16, "loss.type": "dpo", "loss.beta": 0.02, "loss.sft": 0.1,
                   "optimizer.params.lr": 3e-4, "data.bytes": False,
                   "data.val_fraction": 0.2, "run.slices": 1}),
        ("own attention", {**BF16, "run.gpu_attention": "own",
                           "run.gpu_attention_backward": "own"}),
        ("cudnn", {**BF16, **CUDNN, "model.width": 256}),
        *((name, {**more, "run.sample_tokens": 8, "run.sample_temperature": 0})
          for name, more in (("text of 256", {}), ("text in bf16", BF16),
                             ("text of 50257", {**BF16, "model.vocab": 50257}))))]
    nf4 = {**BF16, **lora(8), "model.base_dtype": "nf4"}
    rows += [Small(f"llama nf4 {name}", "llama", "llama-tiny", {**nf4, **more}, "nf4")
             for name, more in (("lora", {}), ("base on the host", {
                 **homes(3, "none", "none"), ZERO + "offload_param.frozen_device": "cpu"}))]
    rows += [Small(f"llama {name}", "llama", "llama-tiny", more) for name, more in (
        ("int8 lora", {**BF16, **lora(8), "model.base_dtype": "int8"}),
        ("dora", {**nf4, "lora.use_dora": True}),
        ("lora dropout", {**lora(8), "lora.dropout": 0.1}),
        ("lora rank 3", {**BF16, **lora(3)}),
        ("documents", {**BF16, "data.document_end": 32}),
        ("in chunks", {**BF16, **FULL, "run.sequence_chunk": 48, "run.slices": 1}),
        ("gemma2", {**BF16, **family("gemma2"), "model.window": 48,
                    "model.attn_logit_softcapping": 2, "model.final_logit_softcapping": 3,
                    "model.tie_embeddings": True}),
        ("cohere2", {**BF16, **family("cohere2"), "model.window": 48,
                     "model.logit_scale": 0.5}),
        ("phi", {**BF16, **family("phi"), "model.qkv_bias": True,
                 "model.partial_rotary_factor": 0.5}),
        ("ministral3", {**BF16, **family("ministral3"), **YARN,
                        "model.rope_scaling_query_beta": 0.1}),
        ("tf32", {"run.tf32": True}),
        ("heads of 64", {**BF16, "model.width": 256}),
        ("heads of 128, 1024 tokens", {**BF16, "model.width": 512, "model.seq": 1024,
                                       "train_micro_batch_size_per_gpu": 1,
                                       "optimizer.params.lr": 1e-3}))]
    rows += [Small(f"moe {name}", "moe", "moe-tiny", {**BF16, **more}) for name, more in (
        ("lora", lora(4, "*")), ("experts in units", {"model.experts_per_unit": 3}),
        ("nf4 lora", {**lora(4, "*"), "model.base_dtype": "nf4"}),
        ("qwen2", {**family("qwen2_moe"), "model.qkv_bias": True, "model.qk_norm": False,
                   "model.shared_expert_intermediate_size": 64}),
        ("glm4", {**family("glm4_moe"), "model.first_k_dense_replace": 1,
                  "model.n_shared_experts": 2, "model.n_group": 4, "model.topk_group": 2,
                  "model.routed_scaling_factor": 1.5, "model.router_aux_loss_coef": 0}),
        ("gpt-oss", {**family("gpt_oss"), "model.window": 48, "model.qk_norm": False,
                     "model.qkv_bias": True, "optimizer.params.lr": 2e-3}))]
    return {r.name: r for r in rows}


TABLE = table()
# What a run on a CPU has no use for, and refuses or names in vain.
OF_THE_GPU = ("run.gpu_", "run.tf32", ZERO + "offload_optimizer.ratio")


def pairs_file(path, n=100, length=128):
    """Texts of random tokens with two answers each, and which tokens are answers'."""
    rng, tokens, mask = random.Random(1), [], b""
    for _ in range(n):
        asked = rng.choices(range(256), k=length // 2)
        for _ in range(2):
            answer = rng.choices(range(256), k=rng.randrange(1, length // 2))
            tokens += [*asked, *answer, *[0] * (length // 2 - len(answer))]
            mask += bytes(len(asked)) + b"\1" * len(answer)
            mask += bytes(len(tokens) - len(mask))
    for to, magic, data, of in (
            (path, 20240520, array.array("H", tokens).tobytes(), length),
            (path.with_suffix(".mask"), int.from_bytes(b"mask", "little"), mask, 0)):
        to.write_bytes(struct.pack("<256i", magic, 1, len(mask), of, *[0] * 252) + data)
    return path


def data_of(c, row):
    """What it trains on, the same on every machine; records lie beside the losses."""
    if "loss.type" in row.more:
        return pairs_file(c.folder / "pairs.bin")
    kind = {"vit": "shapes", "dlrm": "clicks"}.get(row.program)
    if not kind:
        return harness.text_file(c.folder)
    path = c.o.losses.parent / f"{kind}.bin"
    if not path.is_file():
        line = [harness.ROOT / "tools/records", kind, path, 600]
        list(c.run([Job(f"records {kind}", line, 60)]))
    return path


def command(c, row, device):
    more = row.more if device == "cuda" else {
        k: v for k, v in row.more.items() if not k.startswith(OF_THE_GPU)}
    s = {"run.output": c.folder / row.name.replace(" ", "-"), "run.steps": STEPS,
         "run.log_interval": 1, "run.eval_interval": 0, "run.save": False,
         "run.device": device, "data.path": data_of(c, row),
         "run.memory_limit_bytes": 8e9, "run.workers": 4 if device == "cuda" else 2, **more}
    if device == "cuda" and not c.o.tiny:
        s["run.device_memory_limit_bytes"] = 4e9
    if row.program in ("gpt2", "llama", "moe") and row.config != "lora":
        s.setdefault("run.sample_tokens", 0)
    if row.program == "moe":
        s["run.slices"] = 1  # the balance loss depends on it
    if BOUNDARIES in more:
        s[BOUNDARIES] = c.o.nvme or c.folder
    for key in ("offload_optimizer", "offload_param"):
        if more.get(f"{ZERO}{key}.device") == "nvme":
            s[f"{ZERO}{key}.nvme_path"] = c.o.nvme or c.folder
    line = [*harness.ranks_line(row.ranks), c.programs[row.program],
            harness.ROOT / f"configs/{row.config}.json", *harness.settings(s)]
    if row.resumed:
        more = {"run.save": True, "run.save_interval": 1}
        line = ["sh", "-c", f'"$@" --set run.steps={STEPS // 2} && '
                'exec "$@" --resume --set run.export="$0"', s["run.output"] / "export",
                *line, *harness.settings(more)]
    # the rate of products is of no interest
    return Job(row.name, line, 120, {"IZ_REFERENCE_GEMM": "256"})


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
    kind = next((t for t, on in (("tf32", "run.tf32"), ("fp16", "fp16.enabled"),
                                 ("bf16", "bf16.enabled")) if row.more.get(on)), "fp32")
    kind = "bf16" if kind == "fp16" and row.program == "moe" else kind
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
