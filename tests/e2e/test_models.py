# SPDX-License-Identifier: Apache-2.0
"""Models that read records instead of tokens get from stages, homes and ranks
what the others get: the same bits as their plainest run.  A small part of the
matrix that covers every pair of settings; test_matrix.py has the rest."""
import os
import pathlib
import random
import struct
import subprocess

import pytest

import cover
import run

BATCH = 12  # samples of a step, for any number of ranks

# Odd on purpose: shards are padded, there are five equal blocks, units of
# tables end within a table, and the last of them is short.
MODELS = {
    "vit": {"layers": 5, "heads": 3, "width": 27, "hidden": 40, "image": 10,
            "patch": 2, "channels": 3, "classes": 7},
    "dlrm": {"dense": 5, "tables": 7, "rows": 31, "dim": 6, "unit_rows": 40,
             "bottom_layers": 2, "bottom_width": 9, "top_layers": 2,
             "top_width": 11},
}
# The same model, whose tables are sparse; too small for a step to miss no row.
MODELS["sparse"] = MODELS["dlrm"]
PROGRAM = {"vit": "vit", "dlrm": "dlrm", "sparse": "dlrm"}
SPARSE = [{"match": "tables.*", "sparse": True}]

# What changes the bits, and what must not.
SUMS = {"model": ("vit", "dlrm", "sparse"), "ranks": (1, 2, 3),
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


def image(rng, model):
    pixels = model["channels"] * model["image"] ** 2
    return bytes([rng.randrange(model["classes"])]) + rng.randbytes(pixels)


def click(rng, model):
    dense = [rng.randrange(-1, 50) for _ in range(model["dense"])]
    tables = [rng.randrange(-2**31, 2**31) for _ in range(model["tables"])]
    return struct.pack(f"<{1 + len(dense) + len(tables)}i", rng.randrange(2),
                       *dense, *tables)


RECORD = {"vit": image, "dlrm": click, "sparse": click}


@pytest.fixture(scope="session")
def records(workplace):
    """A file of records for each model."""
    paths = {}
    for name, model in MODELS.items():
        rng = random.Random(7)
        paths[name] = workplace / f"{name}.bin"
        paths[name].write_bytes(b"".join(RECORD[name](rng, model)
                                         for _ in range(100)))
    return paths


def program(name, folder="models"):
    """A program of the same build."""
    path = pathlib.Path(run.PROGRAM).parents[1] / folder / name
    assert path.is_file(), f"{path} is not built"
    return str(path)


@pytest.fixture
def start(monkeypatch, place, records):
    """Starts a model's program, on the CPU unless the settings say else."""
    base = run.base_config

    def plain(data, output):
        config = run.merge(base(data, output), {"run.device": "cpu"})
        del config["model"], config["data"]
        return config

    def start(name, ranks, settings, good=True, **more):
        with monkeypatch.context() as m:
            m.setattr(run, "PROGRAM", program(PROGRAM[name]))
            m.setattr(run, "base_config", plain)
            config = {"model": dict(MODELS[name]),
                      "data": {"path": str(records[name])}}
            if name == "sparse":
                config["parameters"] = SPARSE
            act = place.good if good else place.launch
            return act(None if ranks == 1 else ranks,
                       run.merge(config, settings), **more)
    return start


def config_of(row, nvme):
    config = {**run.offload(row["stage"], row["optimizer"], row["param"], nvme),
              "train_batch_size": BATCH,
              "train_micro_batch_size_per_gpu": 2,
              "gradient_accumulation_steps": BATCH // row["ranks"] // 2,
              "run": {"schedule": row["schedule"],
                      "recompute": row["recompute"]}}
    if row["dtype"] != "fp32":
        config[row["dtype"]] = {"enabled": True}
    if row["dtype"] == "fp16":
        config["fp16"]["initial_scale_power"] = 8
    return config


@pytest.fixture(scope="module")
def references():
    return {}


def cases():
    for row in ROWS:
        marks = [pytest.mark.single] if row["ranks"] == 1 else []
        yield pytest.param(row, id="-".join(map(str, row.values())),
                           marks=marks)


@pytest.mark.parametrize("row", cases())
def test_same_bits_as_the_plain_run(row, start, nvme, references):
    key = tuple(row[k] for k in SUMS)
    if key not in references:
        plain = start(row["model"], row["ranks"],
                      config_of({**row, **PLAIN}, nvme))
        references[key] = plain.bits, plain.hash
    r = start(row["model"], row["ranks"], config_of(row, nvme))
    assert len(r.bits) == 3
    assert (r.bits, r.hash) == references[key], str(r)


@pytest.mark.skipif(os.environ.get("IZ_TEST_GPU") != "standin",
                    reason="needs the stand-in for a GPU")
@pytest.mark.parametrize("model", ("vit", "dlrm"))
@pytest.mark.parametrize("dtype, stage, optimizer, param, ranks", [
    ("fp32", 0, "none", "none", 1), ("bf16", 3, "none", "none", 2),
    ("fp16", 2, "cpu", "none", 2), ("bf16", 3, "cpu", "cpu", 3),
    ("fp32", 3, "nvme", "nvme", 1)])
def test_gpu_gives_the_bits_of_the_cpu(model, dtype, stage, optimizer, param,
                                       ranks, start, place, nvme):
    row = {**PLAIN, "model": model, "ranks": ranks, "dtype": dtype}
    cpu = start(model, ranks, config_of(row, nvme))
    row.update(stage=stage, optimizer=optimizer, param=param)
    env = {"STARPU_HOME": str(place.folder.parent), "STARPU_SILENT": "1",
           "IZ_STANDIN_DEVICES": str(ranks), "IZ_STANDIN_MEM_MB": "96",
           "IZ_STANDIN_PAGEABLE": "abort"}
    gpu = start(model, ranks, run.merge(config_of(row, nvme),
                                        {"run.device": "cuda"}), env=env)
    assert (gpu.bits, gpu.hash) == (cpu.bits, cpu.hash), str(gpu)


@pytest.mark.single
@pytest.mark.parametrize("model", MODELS)
def test_other_records_give_other_bits(model, start, place):
    """The comparison above can fail: the last byte of each record counts."""
    other = place.folder / "other.bin"
    rng = random.Random(7)
    record = [RECORD[model](rng, MODELS[model]) for _ in range(100)]
    other.write_bytes(b"".join(x[:-1] + bytes([x[-1] ^ 1]) for x in record))
    a = start(model, 1, {"train_batch_size": BATCH})
    b = start(model, 1, {"train_batch_size": BATCH, "data.path": str(other)})
    assert a.bits != b.bits and a.hash != b.hash


def make(kind, path, count):
    subprocess.run([program("records", "tools"), kind, path, str(count)],
                   check=True, capture_output=True)
    return str(path)


@pytest.mark.single
def test_vit_learns_shapes(start, place):
    """Ten classes: a guess costs 2.3 nats."""
    data = make("shapes", place.folder / "shapes.bin", 3000)
    model = {"layers": 2, "heads": 2, "width": 32, "hidden": 64, "image": 32,
             "patch": 8, "channels": 3, "classes": 10}
    r = start("vit", 1, {"model": model, "data.path": data,
                         "train_batch_size": 32, "run.steps": 150,
                         "run.eval_batches": 2})
    assert 2.2 < r.losses[0] < 2.6
    assert r.summary["validation_loss"] < 1.9, str(r)


@pytest.mark.single
@pytest.mark.parametrize("name", ("dlrm", "sparse"))
def test_learns_clicks(name, start, place):
    """Always the mean rate costs 0.59 nats."""
    data = make("clicks", place.folder / "clicks.bin", 20000)
    model = {"dense": 13, "tables": 26, "rows": 500, "dim": 8,
             "unit_rows": 3000, "bottom_layers": 1, "bottom_width": 32,
             "top_layers": 1, "top_width": 64}
    r = start(name, 1, {"model": model, "data.path": data,
                        "train_batch_size": 128, "run.steps": 250,
                        "run.eval_batches": 8})
    assert r.losses[0] > 0.6
    assert r.summary["validation_loss"] < 0.56, str(r)


@pytest.mark.parametrize("model, settings", [
    ("dlrm", {"parameters": [{"match": "tables.*", "frozen": True}]}),
    ("dlrm", {"parameters": [{"match": "tables.2.*", "frozen": True}]}),
    ("vit", {"parameters": [{"match": "embed.*", "frozen": True}]}),
    ("vit", {"parameters": [{"match": "embed.token", "frozen": True}]}),
    ("vit", {"lora": {"rank": 2, "targets": "*.attn.*"}})])
def test_frozen_parts_have_the_same_bits_too(model, settings, start):
    settings = {"train_batch_size": BATCH, **settings}
    a = start(model, 2, {**settings, "zero_optimization": {"stage": 0}})
    b = start(model, 2, {**settings, **run.offload(3, "cpu", "cpu", None)})
    assert (a.bits, a.hash) == (b.bits, b.hash), str(b)
    whole = start(model, 2, {"train_batch_size": BATCH})
    assert whole.hash != a.hash
    # a few rows may be lost in the padding
    assert whole.bytes_of("optimizer") >= a.bytes_of("optimizer")


@pytest.mark.parametrize("model", MODELS)
def test_resume_gives_the_same_bits(model, start, place):
    output = place.folder / "again"
    settings = {"train_batch_size": BATCH, "run.save": True, "run.steps": 4,
                **run.offload(3, "cpu", "cpu", None)}
    whole = start(model, 2, settings)
    start(model, 2, {**settings, "run.steps": 2}, output=output)
    rest = start(model, 2, settings, output=output, options=["--resume"])
    assert rest.bits[-2:] == whole.bits[-2:] and rest.hash == whole.hash


@pytest.mark.single
@pytest.mark.parametrize("model, item", [("vit", "image"), ("dlrm", "sample")])
def test_output_speaks_of_what_the_model_counts(model, item, start):
    r = start(model, 1, {"run.eval_batches": 1})
    assert f"nats per {item}" in r.out and f"{item}s/s" in r.out
    assert f"{item}s_per_s" in r.summary and "train 95 records" in r.out
    assert "token" not in r.out, str(r)


@pytest.mark.single
def test_plan_says_what_tables_cost(start):
    r = start("dlrm", 1, {"train_batch_size": 4}, options=["--plan"],
              good=False)
    # 7 tables of 31 rows; a sample reads one of each
    assert "0.00M rows of tables: a step reads at most 28" in r.out, str(r)
    assert "all are moved and updated" in r.out


@pytest.mark.single
@pytest.mark.parametrize("model, settings, words", [
    ("vit", {"model.patch": 3}, "image 10 is not divisible by patch = 3"),
    ("vit", {"model.classes": 6}, "label is not below model.classes"),
    ("vit", {"model.image": 12}, "no multiple of the 433 of a record of vit"),
    ("vit", {"data.bytes": True}, "data.bytes"),
    ("vit", {"run.sample_tokens": 3, "run.sample_prompt": "a"},
     "generates nothing"),
    ("dlrm", {"model.tables": 8}, "no multiple of the 56 of a record of dlrm"),
    ("dlrm", {"model.rows": 10**9}, "must be below 2^31"),
    ("dlrm", {"model.vocab": 3}, "unknown key")])
def test_refuses_what_cannot_be(model, settings, words, start):
    run.refused(start(model, 1, settings, good=False), words)
