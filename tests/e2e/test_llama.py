# SPDX-License-Identifier: Apache-2.0
"""A model of the Llama family gets from stages, homes and ranks what GPT-2 gets:
the same bits as its plainest run.  A small part of the matrix that covers every
pair of settings; test_matrix.py has the rest."""
import os

import pytest

import cover
import run

BATCH = 12  # samples of a step, for any number of ranks

# Odd on purpose: padded shards, five equal blocks, groups of three heads.
SHAPE = {"layers": 5, "heads": 6, "kv_heads": 2, "head_dim": 4, "width": 27,
         "ffn": 40, "seq": 16, "vocab": 256, "rope_theta": 1000}
ALL = {"qkv_bias": True, "qk_norm": True, "tie_embeddings": True,
       "rope_scaling_factor": 8, "rope_scaling_original_seq": 64}
MODELS = {"plain": SHAPE, "all": {**SHAPE, **ALL}}

# What changes the bits, and what must not.
SUMS = {"model": ("plain", "all"), "ranks": (1, 2, 3),
        "dtype": ("fp32", "bf16", "fp16")}
FREE = {"stage": (0, 1, 2, 3), "optimizer": ("none", "cpu", "nvme"),
        "param": ("none", "cpu", "nvme"),
        "schedule": ("depth_first", "breadth_first"),
        "recompute": ("full", "none")}
PLAIN = {"stage": 0, "optimizer": "none", "param": "none",
         "schedule": "depth_first", "recompute": "full"}
FACTORS = {**SUMS, **FREE}


def valid(row):
    stage = row.get("stage", 3)
    return not (row.get("optimizer", "none") != "none" and stage == 0 or
                row.get("param", "none") != "none" and stage != 3)


ROWS = cover.rows(FACTORS, valid)


def parameters(model):
    """Number of parameters of the model."""
    c, d, f = model["width"], model["head_dim"], model["ffn"]
    q, kv = model["heads"] * d, 2 * model["kv_heads"] * d
    block = 2 * c + c * (q + kv) + q * c + 3 * c * f
    block += (q + kv if model.get("qkv_bias") else 0)
    block += (2 * d if model.get("qk_norm") else 0)
    matrices = 1 if model.get("tie_embeddings") else 2
    return matrices * model["vocab"] * c + model["layers"] * block + c


@pytest.fixture(autouse=True)
def llama(monkeypatch):
    """The program beside that of the other tests."""
    run.use_program(monkeypatch, "llama")
    base = run.base_config

    def on_cpu(data, output):
        return run.merge(base(data, output), {"run.device": "cpu"})
    monkeypatch.setattr(run, "base_config", on_cpu)


def config_of(row, nvme):
    config = {**run.offload(row["stage"], row["optimizer"], row["param"], nvme),
              "model": MODELS[row["model"]],
              "train_batch_size": BATCH,
              "train_micro_batch_size_per_gpu": 2,
              "gradient_accumulation_steps": BATCH // row["ranks"] // 2,
              "run.schedule": row["schedule"],
              "run.recompute": row["recompute"]}
    if row["dtype"] != "fp32":
        config[f"{row['dtype']}.enabled"] = True
    if row["dtype"] == "fp16":
        config["fp16.initial_scale_power"] = 8
    return config


def start(place, row, nvme):
    ranks = None if row["ranks"] == 1 else row["ranks"]
    return place.good(ranks, config_of(row, nvme))


@pytest.fixture(scope="module")
def references():
    return {}


def cases():
    for row in ROWS:
        marks = [pytest.mark.single] if row["ranks"] == 1 else []
        yield pytest.param(row, id="-".join(map(str, row.values())),
                           marks=marks)


@pytest.mark.parametrize("row", cases())
def test_same_bits_as_the_plain_run(row, place, nvme, references):
    key = tuple(row[k] for k in SUMS)
    if key not in references:
        plain = start(place, {**row, **PLAIN}, nvme)
        references[key] = plain.bits, plain.hash
    r = start(place, row, nvme)
    assert len(r.bits) == 3
    assert (r.bits, r.hash) == references[key], str(r)


@pytest.mark.skipif(os.environ.get("IZ_TEST_GPU") != "standin",
                    reason="needs the stand-in for a GPU")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype, stage, optimizer, param, ranks", [
    ("fp32", 0, "none", "none", 1), ("bf16", 3, "none", "none", 2),
    ("fp16", 2, "cpu", "none", 2), ("bf16", 3, "cpu", "cpu", 3),
    ("fp32", 3, "nvme", "nvme", 1)])
def test_gpu_gives_the_bits_of_the_cpu(model, dtype, stage, optimizer, param,
                                       ranks, place, nvme):
    row = {**PLAIN, "model": model, "ranks": ranks, "dtype": dtype}
    cpu = place.good(None if ranks == 1 else ranks, config_of(row, nvme))
    row.update(stage=stage, optimizer=optimizer, param=param)
    env = {"STARPU_HOME": str(place.folder.parent), "STARPU_SILENT": "1",
           "IZ_STANDIN_DEVICES": str(ranks), "IZ_STANDIN_MEM_MB": "96",
           "IZ_STANDIN_PAGEABLE": "abort"}
    gpu = place.good(None if ranks == 1 else ranks,
                     {**config_of(row, nvme), "run.device": "cuda"}, env=env)
    assert (gpu.bits, gpu.hash) == (cpu.bits, cpu.hash), str(gpu)


@pytest.mark.single
@pytest.mark.parametrize("model", MODELS)
def test_learns(model, place):
    """The text is words in random order: far below the 5.5 of a guess."""
    r = place.good(None, {"model": MODELS[model], "train_batch_size": 16,
                          "run.steps": 60})
    assert 5.3 < r.losses[0] < 5.8
    assert r.losses[-1] < 3, str(r)


@pytest.mark.single
@pytest.mark.parametrize("model", MODELS)
def test_counts_its_parameters(model, place):
    """Two gradients and states of fp32 per parameter, give or take padding."""
    r = place.good(None, {"model": MODELS[model], "run.steps": 1})
    have = r.bytes_of("optimizer") / 8
    assert 0 <= have - parameters(MODELS[model]) < 64 * 7


@pytest.mark.single
def test_generates_text(place):
    r = place.good(None, {"model": MODELS["all"], "run.steps": 2,
                          "run.sample_prompt": "the of ",
                          "run.sample_tokens": 20})
    assert "the of " in r.out, str(r)


@pytest.mark.single
@pytest.mark.parametrize("key, value, word", [
    ("kv_heads", 4, "kv_heads"), ("head_dim", 5, "head_dim"),
    ("head_dim", 0, "head_dim"), ("ffn", 0, "ffn")])
def test_refuses_impossible_shapes(key, value, word, place):
    r = place.launch(None, {"model": {**SHAPE, key: value}})
    assert r.rc != 0 and word in r.err, str(r)
    assert not run.DUMPS.search(r.out + r.err), str(r)


@pytest.mark.single
@pytest.mark.parametrize("preset, millions", [("llama-3-8b", "8030.26"),
                                              ("qwen3-0.6b", "596.05")])
def test_preset_is_planned_for_another_machine(preset, millions, place):
    machine = run.ROOT / "configs" / "machines" / "h200-141.json"
    r = place.launch(None, {"model": {"preset": preset}, "bf16.enabled": True,
                            "run.device": "auto",
                            **run.offload(3, "cpu", "none", None),
                            "train_batch_size": 8},
                     ["--plan", "--ranks", 8, "--machine", machine])
    assert r.rc == 0 and f"{millions}M parameters" in r.out, str(r)
