# SPDX-License-Identifier: Apache-2.0
"""Runs as rows of factors: {factor: value}.  What a row does not name is as the
config has it.  Tests multiply what changes the bits with what must not."""
import itertools
import pathlib
import random
import struct

import pytest

import inputs
import run

STANDIN, REAL = run.GPU == "standin", run.GPU == "real"
standin = pytest.mark.skipif(not STANDIN, reason="needs the stand-in for a GPU")
MEM_MB = 96  # of a GPU of the stand-in

# ---- models ----

# Odd on purpose: shards are padded, there are five equal blocks, groups of three
# heads, units of tables end within a table, and the last of them is short.
LLAMA = {"layers": 5, "heads": 6, "kv_heads": 2, "head_dim": 4, "width": 27,
         "ffn": 40, "seq": 16, "vocab": 256, "rope_theta": 1000}
DLRM = {"dense": 5, "tables": 7, "rows": 31, "dim": 6, "unit_rows": 40,
        "bottom_layers": 2, "bottom_width": 9, "top_layers": 2, "top_width": 11}
# Blocks of both kinds, experts that a slice may leave without tokens.
MOE = {**LLAMA, "layers": 4, "qk_norm": True, "num_experts": 7,
       "num_experts_per_tok": 2, "moe_intermediate_size": 10,
       "decoder_sparse_step": 2, "router_aux_loss_coef": 0.1,
       "router_z_loss_coef": 0.01}
MODELS = {
    "gpt2": run.MODEL,
    "llama": LLAMA,
    "all of llama": {**LLAMA, "qkv_bias": True, "qk_norm": True,
                     "tie_embeddings": True, "rope_scaling_factor": 8,
                     "rope_scaling_original_seq": 64},
    "norms behind": {**LLAMA, "family": "gemma2", "window": 5, "tie_embeddings": True,
                     "attn_logit_softcapping": 2, "final_logit_softcapping": 3},
    "parallel": {**LLAMA, "family": "cohere2", "window": 5, "logit_scale": 0.5},
    "moe": MOE,
    "units of experts": {**MOE, "experts_per_unit": 3},
    "a shared expert": {**MOE, "family": "qwen2_moe", "qk_norm": False, "qkv_bias": True,
                        "shared_expert_intermediate_size": 9, "experts_per_unit": 3,
                        "router_z_loss_coef": 0},
    "groups": {**MOE, "decoder_sparse_step": 1, "num_experts": 8, "family": "glm4_moe",
               "first_k_dense_replace": 1, "n_shared_experts": 2, "n_group": 4,
               "topk_group": 2, "routed_scaling_factor": 1.5, "router_aux_loss_coef": 0,
               "router_z_loss_coef": 0},
    "sinks": {**MOE, "decoder_sparse_step": 1, "family": "gpt_oss", "qk_norm": False,
              "qkv_bias": True, "window": 5},
    "vit": {"layers": 5, "heads": 3, "width": 27, "hidden": 40, "image": 10,
            "patch": 2, "channels": 3, "classes": 7},
    "dlrm": DLRM,
}
PROGRAM = {"all of llama": "llama", "norms behind": "llama", "parallel": "llama",
           "units of experts": "moe", "a shared expert": "moe", "groups": "moe",
           "sinks": "moe"}
SPARSE = [{"match": "tables.*", "sparse": True}]
# Adapters of experts: one for two stacked matrices, and one for the third.
ON_EXPERTS = {"lora": {"rank": 3, "alpha": 5, "targets": "*experts*, up_proj"}}


def frozen(match, yes=True):
    return {"parameters": [{"match": match, "frozen": yes}]}


PAIRS = {"loss": {"type": "dpo", "beta": 0.2, "sft": 0.1}, "data.val_fraction": 0.2,
         "run.slices": 1}
# A model with settings of its own, which change the bits.
BESIDE = {
    "sparse": ("dlrm", {"parameters": SPARSE}),  # too small for a step to miss no row
    "in chunks": ("moe", {"run.sequence_chunk": 5}),
    "windows in chunks": ("norms behind", {"run.sequence_chunk": 5}),
    "documents": ("all of llama", {"data.document_end": 32}),
    "documents in units": ("units of experts", {"data.document_end": 32}),
    "frozen tables": ("dlrm", frozen("tables.*")),
    "a frozen table": ("dlrm", frozen("tables.2.*")),
    "a frozen token": ("vit", frozen("embed.token")),
    "adapters": ("vit", {"lora": {"rank": 2, "targets": "*.attn.*"}}),
    "adapters of experts": ("moe", ON_EXPERTS),
    "experts in 8 bits": ("units of experts", {**ON_EXPERTS, "model.base_dtype": "int8"}),
    "pairs": ("gpt2", PAIRS),
    "pairs of adapters": ("gpt2", {**PAIRS, "lora": {"rank": 3, "targets": "*"},
                                   **frozen("h.[13].*.bias", False)}),
}
MODELS |= {name: MODELS[of] for name, (of, _) in BESIDE.items()}
PROGRAM |= {name: PROGRAM.get(of, of) for name, (of, _) in BESIDE.items()}
# Whose frozen tensors may have a home of their own.
FROZEN = {name for name, (_, more) in BESIDE.items()
          if {"parameters", "lora", "loss"} & set(more)} - {"sparse"}
# Of which Muon would train none.
WITHOUT_MATRICES = {name for name, (_, more) in BESIDE.items() if "lora" in more} | {
    name for name in MODELS if PROGRAM.get(name, name) == "dlrm"}


def image(rng, model):
    pixels = model["channels"] * model["image"] ** 2
    return bytes([rng.randrange(model["classes"])]) + rng.randbytes(pixels)


def click(rng, model):
    dense = [rng.randrange(-1, 50) for _ in range(model["dense"])]
    tables = [rng.randrange(-2**31, 2**31) for _ in range(model["tables"])]
    return struct.pack(f"<{1 + len(dense) + len(tables)}i", rng.randrange(2),
                       *dense, *tables)


RECORD = {"vit": image, "dlrm": click}
RECORD |= {name: RECORD[of] for name, (of, _) in BESIDE.items() if of in RECORD}


def records(kind, model, n=100):
    rng = random.Random(7)
    return [RECORD[kind](rng, model) for _ in range(n)]


def use(place, name, models=None, kernels=False):
    """The place's runs are of this model from here on."""
    shape, data = dict((models or MODELS)[name]), None
    if name in BESIDE and "loss" in BESIDE[name][1]:
        data = inputs.pairs_shard(place.folder / "pairs.bin", *inputs.pair_texts(
            inputs.some_pairs(), shape["seq"]), shape["seq"])
    if name in RECORD:
        data = place.folder / f"{name}.bin"
        data.write_bytes(b"".join(records(name, shape, 40 if kernels else 100)))
    program = PROGRAM.get(name, name)
    place.use(pathlib.Path(run.PROGRAM).with_name(f"{program}-kernels") if kernels
              else run.built(f"models/{program}"), shape, data)


MIXTURES = ("qwen3_moe", "mixtral")


def program_of(kind):
    """The program that reads folders of a type of model."""
    name = "gpt2" if kind == "gpt2" else "moe" if kind in MIXTURES else "llama"
    return run.built(f"models/{name}")


# ---- settings ----

# Which parameters are updated how.
TUNED = {
    "all": {},
    "rules": {"parameters": [
        {"match": "*.bias", "weight_decay": 0},
        {"match": "*ln_?.weight", "weight_decay": 0, "lr_scale": 3},
        {"match": "wpe.weight", "lr_scale": 0.5}]},
    "frozen": {"parameters": [
        {"match": "wte.weight", "frozen": True},
        {"match": "h.[02].*.weight", "frozen": True},
        {"match": "h.3.*", "frozen": True}]},
    "top": {"parameters": [
        {"match": "*", "frozen": True},
        {"match": "h.[34].*", "frozen": False, "weight_decay": 0.3},
        {"match": "h.3.a*", "frozen": True}]},
    "lora": {"lora": {"rank": 3, "alpha": 5, "targets": "*attn*,h.2.*"},
             "parameters": [{"match": "h.[13].*.bias", "frozen": False},
                            {"match": "*lora_B*", "lr_scale": 8}]},
    "dropout": {"lora": {"rank": 3, "alpha": 5, "targets": "*", "dropout": 0.25}},
    "nf4": {"lora": {"rank": 3, "targets": "*", "use_dora": True}, "model.base_dtype": "nf4",
            "parameters": [{"match": "h.[13].*.bias", "frozen": False}]},
}
TUNED["int8"] = {**TUNED["nf4"], "model.base_dtype": "int8"}
# bf16_products: products of bf16 too.  The scale of fp16 grows within a few steps; one
# that begins too high is halved at one to five of six.
TYPES = {**{t: run.typed(t, initial_scale_power=8, loss_scale_window=2)
            for t in ("fp32", "bf16", "fp16")},
         "fp16 that overflows": run.typed("fp16", initial_scale_power=18, hysteresis=1,
                                          loss_scale_window=2),
         "bf16_products": {"bf16.enabled": True, "run.cpu_products": "bf16"}}
UPDATES = {"adam": {}, "lion": {"optimizer": {
    "type": "Lion", "params": {"lr": 1e-3, "betas": [0.9, 0.99],
                               "weight_decay": 0.3}}},
    "muon": {"optimizer": {
        "type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 1e-3,
                                   "weight_decay": 0.3}}}}
KEYS = {"batch": "train_batch_size", "clip": "gradient_clipping",
        "micro": "train_micro_batch_size_per_gpu",
        "chunk": "zero_optimization.sub_group_size",
        "overlap_comm": "zero_optimization.overlap_comm",
        "reuse": "zero_optimization.stage3_max_reuse_distance",
        "delay_us": "run.inject_delay_us", "wave": "run.parallel_micro_batches",
        "moments": "run.state_dtype", "master": "run.master",
        "products": "run.muon_products",
        **{k: f"run.{k}" for k in (
            "steps", "slices", "schedule", "scheduler", "overlap", "recompute",
            "ring", "in_flight", "workers", "comm", "device", "eval_batches")},
        "group": "zero_optimization.zero_hpz_partition_size",
        "sums": "run.sum_order", "sum_group": "run.sum_group", "host_comm": "run.host_comm"}
PLAIN = {"stage": 0, "optimizer": "none", "param": "none",
         "schedule": "depth_first", "recompute": "full"}


def valid(row):
    """Whether the program takes it; a row may be a part of one."""
    stage, ratio = row.get("stage", 3), row.get("ratio", 1)
    optimizer, param = row.get("optimizer"), row.get("param", "none")
    if stage == 0 and (optimizer not in (None, "none") or ratio < 1) or \
            stage != 3 and param != "none":
        return False
    if "/" in param and row.get("model", "pairs") not in FROZEN:
        return False
    if row.get("group", 1) > 1 and (  # so many that a fetch leaves some out
            stage != 3 or param == "nvme" or row.get("ranks", 4) != 4 or
            row.get("model") == "sparse" or row.get("tuned") in ("nf4", "int8")):
        return False
    if (row.get("hosts", "one") != "one" or row.get("sum_group", 1) > 1) and \
            row.get("ranks", 4) != 4:
        return False
    if row.get("sums") == "local_first" and stage == 3 and \
            row.get("schedule", "breadth_first") == "depth_first":
        return False
    if row.get("update") == "muon" and (row.get("model") in WITHOUT_MATRICES or row.get(
            "tuned") in ("lora", "dropout", "nf4", "int8")):
        return False
    if row.get("model") == "sparse" and row.get("moments") == "fp8":
        return False
    if row.get("master") == "remainder" and \
            not row.get("dtype", "bf16").startswith("bf16"):
        return False
    if row.get("tuned") == "dropout" and row.get("dtype") == "fp16 that overflows":
        return False  # its gradients are too small
    return not (ratio < 1 and (optimizer not in (None, "cpu") or param == "nvme"))


def valid_on_gpu(row):
    """There parameters do not leave the device before the optimizer does."""
    return valid(row) and (row.get("optimizer") != "none" or
                           row.get("param", "none").split("/")[0] == "none")


def config_of(row, nvme):
    """A micro-batch of 0 samples is all that a rank has of a step."""
    zero = run.offload(row["stage"], row["optimizer"], row["param"], nvme)
    for section in zero["zero_optimization"].values():
        if isinstance(section, dict) and "buffers" in row:
            section["buffer_count"] = row["buffers"]
    config = {**zero, **TYPES[row["dtype"]], **TUNED[row.get("tuned", "all")],
              **UPDATES[row.get("update", "adam")]}
    for factor, key in KEYS.items():
        if factor in row:
            config[key] = row[factor]
    if row.get("micro") == 0:
        config[KEYS["micro"]] = row["batch"] // row["ranks"]
    if "boundaries" in row:
        config["activation_checkpointing.cpu_checkpointing"] = \
            row["boundaries"] != "none"
    if row.get("boundaries") == "nvme":
        config["activation_checkpointing.nvme_path"] = str(nvme)
    if row["optimizer"] != "none" and "ratio" in row:
        config["zero_optimization.offload_optimizer.ratio"] = row["ratio"]
    return {**config, **BESIDE.get(row.get("model"), (None, {}))[1]}


def on(hosts):
    """Ranks of one letter are on one host."""
    return {} if hosts == "one" else {
        "LD_PRELOAD": run.built("tests/libhosts.so"), "HOSTS": hosts}


def environment(place, row, **more):
    """What a run on the stand-in needs."""
    # StarPU measures the bus anew when the number of GPUs changes.
    home = place.folder.parent / f"starpu-{row['ranks']}"
    home.mkdir(exist_ok=True)
    return {"STARPU_HOME": str(home), "STARPU_SILENT": "1",
            "IZ_STANDIN_DEVICES": str(row["ranks"]),
            "IZ_STANDIN_MEM_MB": str(MEM_MB), "IZ_STANDIN_PAGEABLE": "abort",
            "IZ_STANDIN_JITTER_US": str(row.get("jitter_us", 0)),
            **{k: str(v) for k, v in more.items()}}


# ---- cases ----

def product(**factors):
    """Every valid row."""
    rows = (dict(zip(factors, v)) for v in itertools.product(*factors.values()))
    return list(filter(valid, rows))


def drawn(factors, valid, n, seed=11):
    """So many valid rows, at random but always the same."""
    rng = random.Random(seed)
    every = ({f: rng.choice(v) for f, v in factors.items()} for _ in itertools.count())
    return list(itertools.islice(filter(valid, every), n))


def name_of(row):
    return "-".join({True: "yes", False: "no"}[v] if isinstance(v, bool) else
                    {10**9: "max"}.get(v, str(v)) for v in row.values())


def cases(rows):
    """Rows as parameters of a test, with a name and its marks."""
    for row in rows:
        marks = [pytest.mark.sanitized] if row.get("ranks") == 1 else []
        yield pytest.param(row, id=name_of(row), marks=marks)


# ---- what a run has computed ----

# Each step is saved, beside training where that can be, and hashed, for which training
# waits; the rate of a run that goes on is that of its step.
SAVED = {"run.save": True, "run.save_interval": 1, "run.keep_last": 9,
         "run.save_buffers": 2, "run.hash_interval": 1,
         "scheduler": {"type": "WarmupCosineLR", "params": {
             "warmup_min_ratio": 0.2, "warmup_num_steps": 2, "total_num_steps": 8}}}


def figures(r):
    """Those of experts and of pairs of texts."""
    words = "/", "expert", "router"
    return [{k: v for k, v in x.items() if any(w in k for w in words)} for x in r.steps]


def told(r):
    """All of it, to the bit, but for the figures: numbers, the hash of all states by
    step, checkpoints by file."""
    return ((r.numbers, r.validation[-1:]),
            {x["hash"]["step"]: x["hash"]["state"] for x in r.lines if "hash" in x}, r.files)


def near(was, now, loss, norm):
    """Steps have losses and norms that differ by no more, relatively."""
    for key, rel in (("loss", loss), ("grad_norm", norm)):
        assert [x[key] for x in now] == pytest.approx([x[key] for x in was], rel=rel), key


def elsewhere(row, free, have, valid):
    """This row up to its middle, in the place of another one that may be there."""
    places = [{k: v for k, v in x.items() if k in free} for x in have]
    random.Random(repr(row)).shuffle(places)
    return next(x for x in ({**row, **p, "steps": row["steps"] // 2} for p in places)
                if valid(x))


# ---- activations ----

def check_mixes(start, row, part, *tiers):
    """A run whose memory, of these tiers, lets units keep some activations has
    the bits of those that keep all and none."""
    key = "run." + "device_" * (row["device"] == "cuda") + "memory_limit_bytes"
    none, full = (start({**row, "recompute": r}) for r in ("none", "full"))
    assert none.numbers == full.numbers
    least, most = (r.bytes_in(*tiers) for r in (full, none))
    r = start({**row, "recompute": "auto"}, {key: int(least + part * (most - least))})
    kept = r.bytes_of("activations")
    assert 0 < kept <= part * (most - least) < none.bytes_of("activations")
    assert r.numbers == full.numbers, str(r)
