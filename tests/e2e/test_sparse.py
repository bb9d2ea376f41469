# SPDX-License-Identifier: Apache-2.0
"""Sparse tables: rows that no sample of a step reads keep weights, m and v, and
cost nothing.  That the bits do not depend on stage, homes, schedule and type is
in test_models.py."""
import json
import pathlib
import random
import re
import shutil
import struct

import pytest

import run
from test_models import BATCH, MODELS, SPARSE, click
from test_models import records, start  # noqa: F401

ROOT = pathlib.Path(__file__).resolve().parents[2]
DIM = MODELS["dlrm"]["dim"]
STEP = {"train_batch_size": BATCH, "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2,
                                                  "weight_decay": 0.1}}}


def tensors(output, step):
    """{name: bytes} of a checkpoint that one rank wrote."""
    path = output / f"checkpoints/step-{step:08}/rank-00000-of-00001.safetensors"
    data = path.read_bytes()
    n, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + n])
    header.pop("__metadata__", None)
    return {k: data[8 + n + t["data_offsets"][0]:8 + n + t["data_offsets"][1]]
            for k, t in header.items()}


def rows(data):
    return [data[i:i + 4 * DIM] for i in range(0, len(data), 4 * DIM)]


@pytest.mark.single
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_a_step_is_that_of_dense_adam_on_the_rows_it_reads(dtype, start, place):
    """From one state a sparse and a dense step: a row has either the bits of
    the dense step in all its tensors, or those from before in all of them."""
    more = {**STEP, "run.save": True}
    if dtype != "fp32":
        more[dtype] = {"enabled": True}
    before = place.folder / "before"
    start("sparse", 1, {**more, "run.steps": 3}, output=before)
    outputs = {}
    for model in ("sparse", "dlrm"):
        outputs[model] = place.folder / model
        shutil.copytree(before, outputs[model])
        start(model, 1, {**more, "run.steps": 4}, output=outputs[model],
              options=["--resume"])
    old, new, dense = (tensors(before, 3), tensors(outputs["sparse"], 4),
                       tensors(outputs["dlrm"], 4))
    assert old.keys() == new.keys() == dense.keys()
    units = sorted({k[:k.index("/")] for k in old if k.startswith("tables.")})
    assert len(units) == 6
    touched = moved = 0
    for unit in units:
        names = [k for k in old if k.startswith(unit + "/")]
        assert len(names) == 3, names  # weights, m, v
        per_row = zip(*(list(zip(rows(old[k]), rows(new[k]), rows(dense[k])))
                        for k in names))
        for row in per_row:
            was, now, all_rows = zip(*row)
            assert now in (was, all_rows)
            touched += now != was
            moved += now == was and now != all_rows
    # Some of 217 rows; dense Adam also moved such that earlier steps had read.
    assert 0 < touched <= 7 * BATCH and moved > 20


@pytest.mark.single
def test_the_first_step_is_dense_adams_without_decay(start):
    """m and v are zero: Adam leaves rows without a gradient where they are."""
    more = {**STEP, "run.steps": 1, "optimizer.params.weight_decay": 0}
    a = start("sparse", 1, more)
    b = start("dlrm", 1, more)
    assert a.hash == b.hash and a.losses == b.losses
    decayed = start("sparse", 1, {**STEP, "run.steps": 1})
    assert decayed.hash != start("dlrm", 1, {**STEP, "run.steps": 1}).hash


@pytest.mark.parametrize("ranks", (1, 2))
def test_where_a_step_reads_every_row_it_is_dense_adam(ranks, start):
    model = {**MODELS["dlrm"], "rows": 2}
    more = {**STEP, "model": model, "train_batch_size": 24, "run.steps": 5,
            **run.offload(3, "cpu", "cpu", None)}
    a, b = (start(m, ranks, more) for m in ("sparse", "dlrm"))
    assert a.hash == b.hash and a.losses == b.losses


def epoch(place, n):
    """n records, which are the batch of every step; the rows they read."""
    model, rng = MODELS["dlrm"], random.Random(3)
    records = [click(rng, model) for _ in range(n)]
    path = place.folder / "epoch.bin"
    path.write_bytes(b"".join(records))
    read = {k * model["rows"] + v % model["rows"]
            for r in records
            for k, v in enumerate(struct.unpack(f"<{len(r) // 4}I", r)
                                  [1 + model["dense"]:])}
    return str(path), read


def shards(read, ranks):
    """Of each unit of tables: its shard, and elements read per rank."""
    size, total = MODELS["dlrm"]["unit_rows"], 7 * MODELS["dlrm"]["rows"]
    for first in range(0, total, size):
        n = min(size, total - first) * DIM
        shard = (-(-n // ranks) + 63) // 64 * 64
        count = [0] * ranks
        for r in read:
            if first <= r < first + size:
                for i in range((r - first) * DIM, (r - first + 1) * DIM):
                    count[i // shard] += 1
        yield shard, count


def head_shard(ranks):
    m = MODELS["dlrm"]
    pairs = m["dim"] + m["tables"] * (m["tables"] + 1) // 2
    n = 0
    for width, hidden, end in ((m["dense"], 9, m["dim"]), (pairs, 11, 2)):
        for _ in range(2):
            n, width = n + (width + 1) * hidden, hidden
        n += (width + (end != 2)) * end
    return (-(-n // ranks) + 63) // 64 * 64


@pytest.mark.parametrize("ranks", (2, 3))
@pytest.mark.parametrize("stage", (1, 3))
def test_only_touched_rows_are_moved(stage, ranks, start, place):
    """Per step a gather of the parameters and, per micro-batch, a
    reduce-scatter of the gradients: of rows that the step reads."""
    data, read = epoch(place, 12)
    steps, micros = 4, 2
    r = start("sparse", ranks, {
        **STEP, "data.path": data, "data.val_fraction": 0,
        "train_micro_batch_size_per_gpu": 6 // ranks,
        "gradient_accumulation_steps": micros, "run.steps": steps,
        "run.ring": 9, "run.schedule": "breadth_first",
        "zero_optimization": {"stage": stage}})
    shard, units = zip(*shards(read, ranks))
    head = head_shard(ranks)
    everything = sum(map(sum, units)) + ranks * head
    assert r.summary["fetched_bytes"] == 4 * steps * everything
    own = [u[0] for u in units] + [head]
    rest = [sum(u[1:]) for u in units] + [(ranks - 1) * head]
    sent = 4 * (sum(own) * (ranks - 1) + micros * sum(rest))
    scalars = 8 * (4 + len(own)) * (ranks - 1)
    # the initial weights that are kept whole; a little is said at both ends
    once = 4 * (sum(shard) + head) * (ranks - 1) if stage < 3 else 0
    assert 0 <= r.summary["sent_bytes"] - steps * (sent + scalars) - once < 1500
    # and not a quarter of what whole tables would be
    assert len(read) < 0.4 * 7 * 31


LARGE = {**MODELS["dlrm"], "rows": 40000, "dim": 16, "unit_rows": 5000}
TABLE = 7 * 40000 * 16 * 4


@pytest.mark.parametrize("ranks", (1, 2))
def test_a_table_larger_than_the_memory_trains(ranks, start, place, nvme):
    more = {**STEP, "model": LARGE, "run.memory_limit_bytes": TABLE * 3 // 4,
            **run.offload(3, "nvme", "nvme", nvme), "run.eval_batches": 1,
            "zero_optimization.offload_optimizer.buffer_count": 4}
    r = start("sparse", ranks, more)
    here = sum(have for (_, tier), (_, have) in r.memory.items()
               if tier != "nvme")
    assert here < TABLE * 3 // 4
    free = start("sparse", ranks, {**more, "run.memory_limit_bytes": 0,
                                   "zero_optimization": {"stage": 0}})
    assert (r.bits, r.hash) == (free.bits, free.hash)
    if ranks == 1:
        run.refused(start("dlrm", ranks, more, good=False),
                    "this run needs", "MiB of memory")


def disk(r):
    """MiB between disk and memory, as the summary has them."""
    return float(re.search(r"^  disk +([0-9.]+)", r.out, re.M)[1])


@pytest.mark.single
@pytest.mark.parametrize("dtype, moments, checksum", [
    ("fp32", "fp32", False), ("bf16", "bf16", False), ("fp16", "fp32", False),
    ("fp32", "fp8", False), ("bf16", "fp32", True)])
def test_only_pages_with_touched_rows_come_from_disk(dtype, moments, checksum,
                                                     start, nvme):
    """Tables without their initial weights: a page of weights, m and v for each
    row, and those between neighbours."""
    more = {**STEP, "model": {**LARGE, "rows": 4000, "dim": 64},
            "run.steps": 6, "run.state_dtype": moments,
            "run.nvme_checksum": checksum,
            "zero_optimization.sub_group_size": 20000,
            **({dtype: {"enabled": True}} if dtype != "fp32" else {})}
    far = run.offload(3, "nvme", "nvme", nvme)
    far["zero_optimization"]["sub_group_size"] = 20000
    near = start("sparse", 1, {**more, "zero_optimization": {"stage": 0}})
    none = start("sparse", 1, {**more, **far, "run.steps": 0})
    r = start("sparse", 1, {**more, **far})
    assert (r.bits, r.hash) == (near.bits, near.hash)
    dense = start("dlrm", 1, {**more, **far})
    # A checksum is that of a whole chunk.
    most = 0.8 if checksum else 0.5
    assert disk(r) - disk(none) < most * (disk(dense) - disk(none))


@pytest.mark.single
def test_memory_follows_the_rows_of_a_step(start):
    """Of each unit of 5000 rows a step reads as many as it has samples, of one
    table or, where a unit has the end of one, of two."""
    r = start("sparse", 1, {**STEP, "model": LARGE})
    dense = start("dlrm", 1, {**STEP, "model": LARGE})
    assert r.bytes_of("gradients") < 56 * 2 * BATCH * 16 * 4 + 40000
    assert dense.bytes_of("gradients") > TABLE
    assert r.bytes_of("optimizer") == dense.bytes_of("optimizer")


@pytest.mark.parametrize("mode", ("sync", "async"))
def test_checkpoints_on_the_way_have_whole_tables(mode, start, place, nvme):
    """From disk, beside training, and those of tables in memory."""
    more = {**STEP, "run.steps": 4, "run.save_interval": 1, "run.keep_last": 9,
            "run.save_mode": mode, "run.save_buffers": 2}
    homes = {"far": run.offload(3, "nvme", "nvme", nvme),
             "near": run.offload(3, "cpu", "cpu", nvme)}
    found = {}
    for name, home in homes.items():
        output = place.folder / name
        start("sparse", 1, {**more, **home}, output=output)
        found[name] = [tensors(output, step) for step in (1, 2, 3)]
    assert found["far"] == found["near"]


@pytest.mark.parametrize("moments, ranks", [("bf16", 1), ("bf16", 2),
                                            ("fp8", 1), ("fp8", 2)])
def test_narrow_moments_of_untouched_rows_stay(moments, ranks, start, nvme):
    """The bits of stage 0 at stage 3; rows of fp8 are whole blocks."""
    more = {**STEP, "run.state_dtype": moments, "run.steps": 6,
            "model": {**MODELS["dlrm"], "dim": 64}}
    a = start("sparse", ranks, {**more, "zero_optimization": {"stage": 0}})
    b = start("sparse", ranks, {**more, **run.offload(3, "cpu", "nvme", nvme)})
    assert (a.bits, a.hash) == (b.bits, b.hash)


@pytest.mark.single
def test_plan_says_that_only_read_rows_are_moved(start):
    r = start("sparse", 1, {"train_batch_size": 4}, options=["--plan"],
              good=False)
    assert "at most 28 of them (12.9 %), only these are moved" in r.out, str(r)
    r = start("dlrm", 1, {"train_batch_size": 4, "parameters": [
        {"match": "tables.2.*", "sparse": True}]}, options=["--plan"],
        good=False)
    assert "these and whole dense tables are moved" in r.out, str(r)


@pytest.mark.single
@pytest.mark.parametrize("rules, words", [
    ([{"match": "*", "sparse": True}],
     ["sparse: true for bottom.0.weight", "no table of rows"]),
    ([{"match": "tables.*", "sparse": True, "frozen": True}],
     ["parameters[0]", "what is frozen is never updated"]),
    (SPARSE + [{"match": "tables.2.*", "frozen": True}],
     ["sparse: true for tables.2.rows", "it is frozen"]),
    ([{"match": "tables.*", "sparse": 1}], ["parameters[0].sparse"])])
def test_refuses_what_cannot_be_sparse(rules, words, start):
    run.refused(start("dlrm", 1, {"parameters": rules}, good=False), *words)


@pytest.mark.single
def test_refuses_fp8_of_rows_that_share_blocks(start):
    run.refused(start("sparse", 1, {"run.state_dtype": "fp8"}, good=False),
                "sparse: true for tables.0.rows", "no multiple of 64")


@pytest.mark.single
def test_refuses_a_gpu(start):
    machine = ROOT / "configs/machines/v100-32-dgx2.json"
    r = start("sparse", 1, {"train_batch_size": 4}, good=False,
              options=["--plan", "--ranks", "4", "--machine", str(machine)])
    run.refused(r, "sparse: true for tables.0.rows", "run.device: cpu")


@pytest.mark.single
def test_other_models_have_no_such_tables(start):
    run.refused(start("vit", 1, {"parameters": [
        {"match": "embed.*", "sparse": True}]}, good=False),
        "sparse: true for embed.", "no table of rows")


@pytest.mark.parametrize("settings", [
    {}, {"run.slices": 3}, {"run.inject_delay_us": 400},
    {"run.overlap": False}, {"run.in_flight": 1},
    {"run.eval_batches": 2, "run.eval_interval": 1}])
def test_schedules_and_evaluation_do_not_change_the_bits(settings, start):
    more = {**STEP, "run.steps": 5, "train_micro_batch_size_per_gpu": 3,
            "run.slices": 3, "run.ring": 2}
    plain = start("sparse", 2, {**more, "run.ring": 5,
                                "zero_optimization": {"stage": 0}})
    r = start("sparse", 2, {**more, **settings,
                            **run.offload(3, "cpu", "cpu", None)})
    assert (r.bits[:5], r.hash) == (plain.bits, plain.hash)
