# SPDX-License-Identifier: Apache-2.0
"""The program with its own GPU ops on the stand-in for a GPU: kernels
compiled for the CPU and run thread by thread in the stand-in's streams, products
by a stand-in for cuBLASLt, activations as wide as the parameters.  The numbers
are those of a run on the CPU within what the types round, and the same bits in
every stage, placement and schedule.  Each run allocates what it planned
(Place.good)."""
import array
import math
import zlib

import pytest

import cover
import inputs
import rows
import run
from rows import PLAIN, RECORD, valid_on_gpu
from run import hf

pytestmark = [pytest.mark.skipif(run.GPU != "kernels",
                                 reason="needs the programs with GPU kernels"),
              pytest.mark.usefixtures("known_gpu")]
SEQ = 12

# Rows of products that are multiples of 8 elements and that are not, heads that
# share keys, two chunks of logits of all samples and one of a single one.
# Vocabularies of odd extents: behind that of gpt2 lie positions, where its
# products may read on, behind that of llama nothing.
MODELS = {
    "gpt2": {"layers": 2, "heads": 3, "width": 24, "seq": SEQ, "vocab": 310},
    "llama": {"layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8,
              "width": 20, "ffn": 28, "seq": SEQ, "vocab": 275,
              "rope_theta": 1000, "qkv_bias": True, "qk_norm": True},
    "vit": {"layers": 2, "heads": 3, "width": 24, "hidden": 36, "image": 6,
            "patch": 2, "channels": 3, "classes": 7},
    "dlrm": rows.DLRM,
    **{name: {**rows.MODELS[name], "heads": 4, "head_dim": 8, "width": 20, "seq": SEQ}
       for name in ("moe", "units of experts", "sinks")},
}
# Ranks, samples of a micro-batch.
SPLIT = {"whole": (1, 2), "micro": (1, 1), "ranks": (2, 1)}

SUMS = {"model": ("gpt2", "llama"), "dtype": ("fp32", "bf16", "fp16"),
        "split": tuple(SPLIT)}
FREE = {
    "stage": (0, 1, 2, 3),
    "optimizer": ("none", "cpu", "nvme"),
    "param": ("none", "cpu", "nvme"),
    "ratio": (1, 0.4),
    "comm": ("mpi", "nccl"),
    "schedule": ("depth_first", "breadth_first"),
    "recompute": ("full", "widened", "none"),
    "boundaries": ("none", "cpu", "nvme"),
}
KINDS = cover.rows(SUMS, valid_on_gpu)
# Each place in each type: test_gpu.py has the pairs of places.
ROWS = cover.rows({**SUMS, **FREE}, valid_on_gpu, beside="dtype", few=KINDS)
# Several chunks of a block's shard.
PLACE = {**PLAIN, "ratio": 1, "comm": "mpi", "boundaries": "none", "batch": 2,
         "clip": 0.5, "chunk": 2048, "device": "cuda", "steps": 2}
LOGITS = {"run.gpu_logits_bytes": 20 << 10}  # 16 rows of them
FAR = {"stage": 3, "optimizer": "cpu", "param": "cpu"}


@pytest.fixture
def go(place, nvme):
    """Starts the program of a row's model."""
    def go(row, changes=None, env=None):
        rows.use(place, row["model"], MODELS, kernels=True)
        ranks, micro = SPLIT[row["split"]]
        row = {**PLACE, **row, "ranks": ranks, "micro": micro}
        # of the order of a kernel's threads: other bits for other orders
        seed = zlib.crc32(repr(sorted(row.items())).encode())
        return place.good(ranks, {**rows.config_of(row, nvme), **LOGITS, **(changes or {})}, env={
            **rows.environment(place, row, IZ_SEED=seed), **(env or {})})
    return go


@pytest.fixture
def plain(go, references):
    """The run of a row as it is, which has been made once."""
    def plain(row, changes=None, **more):
        key = sorted(row.items()), changes, more
        if key not in references:
            references[key] = go(row, changes, **more)
        return references[key]
    return plain


@pytest.fixture
def same(go, plain):
    """A run of a row with more settings has the bits of the plain one."""
    def same(row, more, changes=None, env=None):
        r, want = go({**row, **more}, changes, env), plain(row, changes)
        assert r.numbers == want.numbers, str(r)
        return want
    return same


@pytest.fixture
def near_cpu(go, plain):
    """The plain run is near that of the CPU."""
    def near_cpu(row, changes=None, dtype=None, bounds=TOKENS, env=None):
        cpu = plain({**row, "products": "auto"} if "products" in row else row,
                    {**(changes or {}), "run.device": "cpu"})
        r = plain(row, changes, **({"env": env} if env else {}))
        close(r, cpu, dtype or row["dtype"], bounds)
        return r, cpu
    return near_cpu


# What a type rounds by, half of the distance between neighbours of 1.
ROUNDS = {"fp32": 2**-24, "bf16": 2**-9, "fp16": 2**-12}


# How many of them a loss and a gradient norm may be off, in the first step and
# after updates.  On the CPU activations are fp32; here each is rounded by u at
# most, and a logit by a few u.  The loss is a mean of many such errors of either
# sign, and the logits of tokens are small beside it: measured were 0.09 u of it
# and 1.9 u of the norm, a root of squares of what both passes have rounded.
# Other models have few outputs, so less of a mean: 0.4 u and 3.4 u.  Adam divides
# by a root of squares too, so a gradient that is little more than rounding moves
# its element as far as others, and units of dlrm switch off: 4.2 u and 5.2 u.
TOKENS, OTHERS = ((0.3, 4), (0.3, 4)), ((1, 8), (8, 16))


def close(gpu, cpu, dtype, bounds=TOKENS):
    assert len(gpu.steps) == len(cpu.steps) > 1
    for a, b in zip(gpu.steps, cpu.steps):
        loss = abs(a["loss"] / b["loss"] - 1) / ROUNDS[dtype]
        norm = abs(a["grad_norm"] / b["grad_norm"] - 1) / ROUNDS[dtype]
        print(f"{loss:.4f} u of the loss, {norm:.3f} u of the norm")
        bound = bounds[a["step"] > 1]
        assert loss < bound[0] and norm < bound[1], f"{gpu}\n{cpu}"


# Other models: what there is beside ops, each of which is checked in each type alone.
BESIDE = [{"model": model, "dtype": dtype, "split": "micro"} for model, dtype in (
    ("vit", "fp16"), ("dlrm", "bf16"), ("moe", "bf16"), ("units of experts", "bf16"),
    ("sinks", "fp16"))]


@pytest.mark.parametrize("row", rows.cases(KINDS + BESIDE + [
    {**row, "dtype": "fp32"} for row in BESIDE]))
def test_numbers_of_the_cpu(row, near_cpu):
    near_cpu(row, bounds=OTHERS if row["model"] in RECORD else TOKENS)


# A step of Adam is nearly linear in the gradient where eps is large, and leaves
# weights of fp32: what they have moved by is each tensor's gradient.  A rate so
# large that the rounding of a weight near 1 is nothing beside it: with 100 it was
# up to 67 u of what a norm's weights moved by.  Measured were 22 u, of sums in
# another order, and 6.5 u of the 16-bit types.
LINEAR = {"optimizer.params.eps": 1, "optimizer.params.lr": 1e4,
          "optimizer.params.weight_decay": 0, "gradient_clipping": 0,
          "run.export_dtype": "fp32"}
TENSOR = {"fp32": 60, "bf16": 10, "fp16": 12}
# What can be exported: of these two the published types have one.
PUBLISHED = {"gpt2": {}, "llama": {"model.qkv_bias": False}}


def numbers(folder):
    return {k: array.array("f", t[2]) for k, t in hf.read(folder).items()}


@pytest.mark.parametrize("model, dtype", (
    ("gpt2", "fp32"), ("gpt2", "fp16"), ("llama", "fp32"), ("llama", "bf16")))
def test_gradients_of_each_tensor(model, dtype, go, tmp_path):
    weights = []
    for steps, device in ((0, "cpu"), (1, "cpu"), (1, "cuda")):
        out = tmp_path / f"{steps}{device}"
        go({"model": model, "dtype": dtype, "split": "whole"},
           {**LINEAR, "run.device": device, "run.steps": steps,
            "run.export": str(out), **PUBLISHED[model]})
        weights.append(numbers(out))
    before, cpu, gpu = weights
    for name, w in before.items():
        off = math.dist(gpu[name], cpu[name]) / math.dist(cpu[name], w)
        assert off < TENSOR[dtype] * ROUNDS[dtype], f"{name}: {off}"


@pytest.mark.parametrize("row", rows.cases(ROWS + [
    {**row, **FAR} for row in BESIDE[:3]] + [
    # Where what they hand over comes back to, the rows of other experts may have been.
    {**BESIDE[3], **FAR, "schedule": schedule, "boundaries": "cpu", "recompute": "none"}
    for schedule in FREE["schedule"]]))
def test_same_bits_as_the_plain_run(row, same):
    same({k: row[k] for k in SUMS}, {"jitter_us": 200, **row})


LORA = {"lora": {"rank": 3, "alpha": 5, "targets": "*attn*,h.1.*"},
        "parameters": [{"match": "h.0.*.bias", "frozen": False}]}
TOP = {"parameters": [{"match": "*", "frozen": True},
                      {"match": "h.1.*", "frozen": False},
                      {"match": "h.1.attn*", "frozen": True}]}
# Two matrices of a block have two groups.
QUANT = {"model.width": 72, "lora": {"rank": 3, "targets": "*"}}
HELD, NVME = {**FAR, "recompute": "none"}, {"stage": 3, "optimizer": "nvme", "param": "nvme"}
ONE = {"model": "gpt2", "dtype": "bf16", "split": "micro"}
OLD = {"IZ_STANDIN_CAPABILITY": "75"}
WIDE = {"env": {"IZ_STANDIN_CAPABILITY": "120"}}  # less shared memory to a block


def quant(form, dtype, place):
    return ({**ONE, "dtype": dtype, "split": "ranks"}, {**QUANT, "model.base_dtype": form}, [place])


def muon(kind, *places, env=None, **more):
    """Products of bf16, or fp16 with gram, whatever the parameters are; with `host` of
    fp32.  Twelve samples, two units of matrices that take turns in two buffers."""
    row = {**ONE, "update": "muon", "products": "host" if kind == "host" else "gpu", **more}
    return (row, {"optimizer.params.ns_method": "gram" if kind == "gram" else "standard"}, places,
            {"dtype": row["dtype"] if kind == "host" else "bf16", "env": env})


# Row; what changes the bits; places, which must not; how near the numbers of a CPU are.
CASES = [
    (ONE, LORA, [HELD]), (ONE, TOP, [HELD]),
    # A token may have another expert: 14 u of a norm of few gradients.
    *(({**ONE, "model": model}, {**rows.ON_EXPERTS, "model.base_dtype": base}, [HELD],
       {"bounds": ((0.3, 4), (1, 60))})
      for model, base in (("units of experts", None), ("moe", "nf4"))),
    quant("nf4", "fp32", FAR), quant("nf4", "bf16", {**NVME, "comm": "nccl"}),
    quant("int8", "fp16", {**FAR, "comm": "nccl"}),
    # Rows of a sample whose first ones are elsewhere.
    ({**ONE, "model": "sinks"}, {"run.sequence_chunk": 5}, [HELD]),
    ({"model": "llama", "dtype": "fp16", "split": "whole"}, {}, [], {"env": OLD}),
    # Two uses of one gradient.
    ({**ONE, "model": "llama"}, {"model.tie_embeddings": True}, [{**FAR, "ratio": 0.4}], WIDE),
    muon("standard", dtype="fp32"), muon("gram", dtype="fp32", env=OLD),
    *(muon(kind, dtype="fp16") for kind in ("gram", "host")),
    muon("standard", {"stage": 2, "optimizer": "cpu", "jitter_us": 200}, {**FAR, "ratio": 0.4}),
    muon("gram", FAR, {**NVME, "recompute": "none"}), muon("host", {**FAR, "ratio": 0.4}, FAR),
    *(muon(kind, {"stage": stage, "optimizer": home, "comm": comm}, split="ranks", moments="fp8")
      for kind, stage, home, comm in (("standard", 3, "cpu", "nccl"), ("gram", 1, "none", "mpi"),
                                      ("host", 1, "none", "nccl"))),
    muon("standard", FAR, model="moe")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: rows.name_of(case[0]))
def test_near_the_cpu_and_the_same_in_every_place(case, near_cpu, same):
    row, changes, places, near = (*case, {})[:4]
    near_cpu(row, changes, **near)
    for more in places:
        same(row, more, changes, near.get("env"))


@pytest.mark.parametrize("dtype, where", (("fp32", FAR), ("bf16", NVME)))
def test_pairs_of_texts(dtype, where, go, place):
    """With copies of what is trained; a sample's rows are in two chunks of logits."""
    data = inputs.pairs_shard(place.folder / "pairs.bin", *inputs.pair_texts(
        inputs.some_pairs(12, SEQ), SEQ), SEQ)
    row = {"model": "llama", "dtype": dtype, "split": "whole"}
    # A large rate for the margin, a term of many targets beside it.
    more = {"loss": {"type": "dpo", "beta": 0.5, "sft": 0.2}, "data.path": str(data),
            "data.bytes": False, "data.val_fraction": 0, "run.slices": 1,
            "run.eval_batches": 0}
    plain = go(row, more)
    cpu = go(row, {**more, "run.device": "cpu"})
    for a, b in zip(plain.steps, cpu.steps):
        for k in ("loss", "rewards/margins", "logps/chosen"):
            error = abs(a[k] - b[k]) / ROUNDS[dtype]
            assert error < (8 if "logps" not in k else 100), (k, a[k], b[k])
    r = go({**row, **where}, more)
    assert r.numbers == plain.numbers, str(r)


def test_evaluation_and_generation(near_cpu):
    """In fp32 the CPU's choice of tokens is the GPU's."""
    row = {"model": "gpt2", "dtype": "fp32", "split": "whole"}
    more = {"run.eval_batches": 1, "run.sample_tokens": 4,
            "run.sample_prompt": "In"}
    gpu, cpu = near_cpu(row, more)
    a, b = (r.summary["validation_loss"] for r in (gpu, cpu))
    assert abs(a / b - 1) < ROUNDS["fp32"], f"{gpu}\n{cpu}"
    assert run.sampled(gpu) == run.sampled(cpu)


def test_overflow_is_skipped_as_on_the_cpu(go):
    """Gradients of activations in fp16 overflow where the CPU's are too large
    for the gradient's type alone."""
    row = {"model": "gpt2", "dtype": "fp16", "split": "whole"}
    more = {"fp16.initial_scale_power": 20, "fp16.hysteresis": 1,
            "fp16.loss_scale_window": 1000, "run.steps": 6}
    gpu, cpu = go(row, more), go(row, {**more, "run.device": "cpu"})
    skipped = [x["skipped"] for x in gpu.steps]
    assert skipped == [x["skipped"] for x in cpu.steps], f"{gpu}\n{cpu}"
    assert skipped[0] and not all(skipped), str(gpu)
    assert [x["loss_scale"] for x in gpu.steps] == \
        [x["loss_scale"] for x in cpu.steps]
