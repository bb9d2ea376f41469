# SPDX-License-Identifier: Apache-2.0
"""The program with its own GPU ops on the stand-in for a GPU: kernels
compiled for the CPU and run thread by thread in the stand-in's streams, products
by a stand-in for cuBLASLt, activations as wide as the parameters.  The numbers
are those of a run on the CPU within what the types round, and the same bits in
every stage, placement and schedule.  Each run allocates what it planned
(Place.good)."""
import array
import math
import os
import pathlib
import random
import sys
import tempfile
import zlib

import pytest

import cover
import run
from test_gpu import valid
from test_models import click, image

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "runtime/hf"))
import folder as hf  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("IZ_TEST_GPU") != "kernels",
                                reason="needs the programs with GPU kernels")
SAMPLES, SEQ, MEM_MB = 2, 12, 72

# Rows of products that are multiples of 8 elements and that are not, heads that
# share keys, two chunks of logits of all samples and one of a single one.
MODELS = {
    "gpt2": {"layers": 3, "heads": 3, "width": 24, "seq": SEQ, "vocab": 256},
    "llama": {"layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 8,
              "width": 20, "ffn": 28, "seq": SEQ, "vocab": 256,
              "rope_theta": 1000, "qkv_bias": True, "qk_norm": True},
    "vit": {"layers": 2, "heads": 3, "width": 24, "hidden": 36, "image": 6,
            "patch": 2, "channels": 3, "classes": 7},
    "dlrm": {"dense": 5, "tables": 7, "rows": 31, "dim": 6, "unit_rows": 40,
             "bottom_layers": 2, "bottom_width": 9, "top_layers": 2,
             "top_width": 11},
}
RECORD = {"vit": image, "dlrm": click}
# Ranks, samples of a micro-batch.
SPLIT = {"whole": (1, SAMPLES), "micro": (1, 1), "ranks": (2, 1)}

SUMS = {"model": ("gpt2", "llama"), "dtype": ("fp32", "bf16", "fp16"),
        "split": tuple(SPLIT)}
FREE = {
    "stage": (0, 1, 2, 3),
    "optimizer": ("none", "cpu", "nvme"),
    "param": ("none", "cpu", "nvme"),
    "ratio": (1, 0.4),
    "comm": ("mpi", "nccl"),
    "schedule": ("depth_first", "breadth_first"),
    "recompute": ("full", "none"),
    "boundaries": ("gpu", "host"),
    "jitter_us": (0, 200),
}
FACTORS = {**SUMS, **FREE}
PLAIN = {"stage": 0, "optimizer": "none", "param": "none", "ratio": 1,
         "comm": "mpi", "schedule": "depth_first", "recompute": "full",
         "boundaries": "gpu", "jitter_us": 0}


ROWS = cover.rows(FACTORS, valid)


@pytest.fixture(scope="module")
def records(workplace):
    paths = {}
    for name, record in RECORD.items():
        rng = random.Random(7)
        paths[name] = workplace / f"{name}-kernels.bin"
        paths[name].write_bytes(b"".join(record(rng, MODELS[name])
                                         for _ in range(40)))
    return paths


@pytest.fixture
def start(monkeypatch, place, records, nvme):
    """Starts the program of a row's model."""
    base = run.base_config

    def start(row, changes=None, env=None):
        def config(data, output):
            c = base(records.get(row["model"], data), output)
            c["model"] = dict(MODELS[row["model"]])
            if row["model"] in records:
                del c["data"]["bytes"]
            return run.merge(c, config_of(row, nvme))
        ranks, _ = SPLIT[row["split"]]
        with monkeypatch.context() as m:
            m.setattr(run, "PROGRAM", program(row["model"]))
            m.setattr(run, "base_config", config)
            return place.good(None if ranks == 1 else ranks, changes or {},
                              env={**environment(place, ranks, row), **(env or {})})
    return start


def program(model):
    return str(pathlib.Path(run.PROGRAM).with_name(f"{model}-kernels"))


def environment(place, ranks, row):
    # StarPU measures the bus anew when the number of GPUs changes.
    home = place.folder.parent / f"starpu-{ranks}"
    home.mkdir(exist_ok=True)
    return {"STARPU_HOME": str(home), "STARPU_SILENT": "1",
            "IZ_STANDIN_DEVICES": str(ranks), "IZ_STANDIN_MEM_MB": str(MEM_MB),
            "IZ_STANDIN_PAGEABLE": "abort",
            # of the order of a kernel's threads: other bits for other orders
            "IZ_SEED": str(zlib.crc32(repr(sorted(row.items())).encode())),
            "IZ_STANDIN_JITTER_US": str(row["jitter_us"])}


def config_of(row, nvme):
    _, micro = SPLIT[row["split"]]
    config = {
        **run.offload(row["stage"], row["optimizer"], row["param"], nvme),
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_clipping": 0.5,
        # Several chunks of a block's shard.
        "zero_optimization.sub_group_size": 2048,
        "activation_checkpointing.cpu_checkpointing": row["boundaries"] == "host",
        "run.device": "cuda", "run.steps": 3, "run.comm": row["comm"],
        "run.schedule": row["schedule"], "run.recompute": row["recompute"],
    }
    if row["optimizer"] != "none":
        config["zero_optimization.offload_optimizer.ratio"] = row["ratio"]
    if row["dtype"] != "fp32":
        config[f"{row['dtype']}.enabled"] = True
    if row["dtype"] == "fp16":
        config["fp16.initial_scale_power"] = 8
    return config


@pytest.fixture(scope="session", autouse=True)
def calibrated(workplace, text):
    """StarPU measures the bus when it first starts, with copies of its own."""
    p = run.Place(pathlib.Path(tempfile.mkdtemp(dir=workplace)), text)
    row = {**PLAIN, "dtype": "fp32", "split": "whole"}
    p.good(None, {**config_of(row, None), "run.steps": 1,
                  "model": MODELS["gpt2"]}, env=environment(p, 1, row))
    p.clear()


@pytest.fixture(scope="session")
def references():
    return {}


def reference(references, start, row):
    key = tuple(row[k] for k in SUMS)
    if key not in references:
        references[key] = start({**row, **PLAIN})
    return references[key]


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
    assert len(gpu.steps) == len(cpu.steps) == 3
    for a, b in zip(gpu.steps, cpu.steps):
        loss = abs(a["loss"] / b["loss"] - 1) / ROUNDS[dtype]
        norm = abs(a["grad_norm"] / b["grad_norm"] - 1) / ROUNDS[dtype]
        print(f"{loss:.4f} u of the loss, {norm:.3f} u of the norm")
        bound = bounds[a["step"] > 1]
        assert loss < bound[0] and norm < bound[1], f"{gpu}\n{cpu}"


# Records need no more than one way to split them: their ops are the same.
SPLITS = [(model, split) for model in MODELS for split in SPLIT
          if model in SUMS["model"] or split == "micro"]


@pytest.mark.parametrize("dtype", SUMS["dtype"])
@pytest.mark.parametrize("model,split", SPLITS)
def test_numbers_of_the_cpu(model, split, dtype, start, references):
    row = {**PLAIN, "model": model, "dtype": dtype, "split": split}
    close(reference(references, start, row), start(row, {"run.device": "cpu"}),
          dtype, OTHERS if model in RECORD else TOKENS)


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


@pytest.mark.parametrize("dtype", SUMS["dtype"])
@pytest.mark.parametrize("model", SUMS["model"])
def test_gradients_of_each_tensor(model, dtype, start, tmp_path):
    weights = []
    for steps, device in ((0, "cpu"), (1, "cpu"), (1, "cuda")):
        out = tmp_path / f"{steps}{device}"
        start({**PLAIN, "model": model, "dtype": dtype, "split": "whole"},
              {**LINEAR, "run.device": device, "run.steps": steps,
               "run.export": str(out), **PUBLISHED[model]})
        weights.append(numbers(out))
    before, cpu, gpu = weights
    for name, w in before.items():
        off = math.dist(gpu[name], cpu[name]) / math.dist(cpu[name], w)
        assert off < TENSOR[dtype] * ROUNDS[dtype], f"{name}: {off}"


def name_of(row):
    return "-".join(map(str, row.values()))


@pytest.mark.parametrize("row", [pytest.param(r, id=name_of(r)) for r in ROWS])
def test_same_bits_as_the_plain_run(row, start, references):
    plain = reference(references, start, row)
    r = start(row)
    assert (r.bits, r.hash) == (plain.bits, plain.hash), str(r)


@pytest.mark.parametrize("model", RECORD)
@pytest.mark.parametrize("dtype,stage,optimizer,param", [
    ("bf16", 3, "cpu", "cpu"), ("fp16", 2, "cpu", "none")])
def test_models_of_records_too(model, dtype, stage, optimizer, param, start,
                               references):
    row = {**PLAIN, "model": model, "dtype": dtype, "split": "micro"}
    plain = reference(references, start, row)
    r = start({**row, "stage": stage, "optimizer": optimizer, "param": param})
    assert (r.bits, r.hash) == (plain.bits, plain.hash), str(r)


LORA = {"lora": {"rank": 3, "alpha": 5, "targets": "*attn*,h.2.*"},
        "parameters": [{"match": "h.1.*.bias", "frozen": False}]}
TOP = {"parameters": [{"match": "*", "frozen": True},
                      {"match": "h.2.*", "frozen": False},
                      {"match": "h.2.attn*", "frozen": True}]}


@pytest.mark.parametrize("tuned", (LORA, TOP), ids=("lora", "top"))
def test_what_is_not_trained(tuned, start):
    row = {**PLAIN, "model": "gpt2", "dtype": "bf16", "split": "micro"}
    plain = start(row, tuned)
    close(plain, start(row, {**tuned, "run.device": "cpu"}), "bf16")
    r = start({**row, "stage": 3, "optimizer": "cpu", "param": "cpu",
               "recompute": "none"}, tuned)
    assert (r.bits, r.hash) == (plain.bits, plain.hash), str(r)


@pytest.mark.parametrize("dtype", ("fp32", "fp16"))
def test_before_tensor_cores(dtype, start):
    row = {**PLAIN, "model": "llama", "dtype": dtype, "split": "whole"}
    close(start(row, env={"IZ_STANDIN_CAPABILITY": "75"}),
          start(row, {"run.device": "cpu"}), dtype)


def test_evaluation_and_generation(start):
    """In fp32 the CPU's choice of tokens is the GPU's."""
    row = {**PLAIN, "model": "gpt2", "dtype": "fp32", "split": "whole"}
    more = {"run.eval_batches": 1, "run.sample_tokens": 4,
            "run.sample_prompt": "In"}
    gpu, cpu = start(row, more), start(row, {**more, "run.device": "cpu"})
    close(gpu, cpu, "fp32")
    a, b = (r.summary["validation_loss"] for r in (gpu, cpu))
    assert abs(a / b - 1) < ROUNDS["fp32"], f"{gpu}\n{cpu}"
    assert run.sampled(gpu) == run.sampled(cpu)


def test_a_tied_weight_on_another_gpu(start):
    """Two uses of one gradient; less shared memory to a block."""
    row = {**PLAIN, "model": "llama", "dtype": "bf16", "split": "micro"}
    tied = {"model.tie_embeddings": True}
    plain = start(row, tied)
    r = start({**row, "stage": 3, "optimizer": "cpu", "param": "cpu",
               "ratio": 0.4}, tied, {"IZ_STANDIN_CAPABILITY": "120"})
    assert (r.bits, r.hash) == (plain.bits, plain.hash), str(r)


def test_overflow_is_skipped_as_on_the_cpu(start):
    """Gradients of activations in fp16 overflow where the CPU's are too large
    for the gradient's type alone."""
    row = {**PLAIN, "model": "gpt2", "dtype": "fp16", "split": "whole"}
    more = {"fp16.initial_scale_power": 20, "fp16.hysteresis": 1, "run.steps": 6}
    gpu, cpu = start(row, more), start(row, {**more, "run.device": "cpu"})
    skipped = [x["skipped"] for x in gpu.steps]
    assert skipped == [x["skipped"] for x in cpu.steps], f"{gpu}\n{cpu}"
    assert skipped[0] and not all(skipped), str(gpu)
    assert [x["loss_scale"] for x in gpu.steps] == \
        [x["loss_scale"] for x in cpu.steps]
