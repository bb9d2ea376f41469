# SPDX-License-Identifier: Apache-2.0
"""Sparse tables: rows that no sample of a step reads keep weights, m and v, and
cost nothing.  That the bits do not depend on stage, homes, schedule and type is
in test_models.py."""
import random
import shutil
import struct

import pytest

import run
from rows import DLRM, click

DIM, BATCH = DLRM["dim"], 12
STEP = {"train_batch_size": BATCH, "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2,
                                                  "weight_decay": 0.1}}}
NVME, NONE = (3, "nvme", "nvme"), (0, "none", "none")


@pytest.fixture
def train(start):
    """Starts dlrm, with sparse tables or dense ones."""
    def train(name, ranks, settings, home=NONE, **more):
        row = dict(zip(("stage", "optimizer", "param"), home))
        return start({**row, "model": name, "ranks": ranks, "dtype": "fp32",
                      "device": "cpu"}, settings, **more)
    return train


def rows(data):
    return [data[i:i + 4 * DIM] for i in range(0, len(data), 4 * DIM)]


@pytest.mark.sanitized
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_a_step_is_that_of_dense_adam_on_the_rows_it_reads(dtype, train, place):
    """From one state a sparse and a dense step: a row has either the bits of
    the dense step in all its tensors, or those from before in all of them."""
    more = {**STEP, "run.save": True, **run.typed(dtype)}
    before = place.folder / "before"
    train("sparse", 1, {**more, "run.steps": 3}, output=before)
    outputs = {}
    for model in ("sparse", "dlrm"):
        outputs[model] = place.folder / model
        shutil.copytree(before, outputs[model])
        train(model, 1, {**more, "run.steps": 4}, output=outputs[model],
              options=["--resume"])
    old, new, dense = (run.arrays(before, 3), run.arrays(outputs["sparse"], 4),
                       run.arrays(outputs["dlrm"], 4))
    assert old.keys() == new.keys() == dense.keys()
    units = sorted({k[:k.index("/")] for k in old if k.startswith("tables.")})
    assert len(units) == 6
    assert all(new[k] == dense[k] for k in old if not k.startswith("tables."))
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


def touched(records, ranks):
    """Elements of rows that records read: in shards of the first rank, and in others."""
    size, table, elements = DLRM["unit_rows"], DLRM["rows"], [0, 0]
    for row in {k * table + v % table for r in records for k, v in enumerate(
            struct.unpack(f"<{len(r) // 4}I", r)[1 + DLRM["dense"]:])}:
        first = row // size * size
        n = min(size, DLRM["tables"] * table - first) * DIM
        shard = run.padded(n, ranks) // ranks
        for at in range((row - first) * DIM, (row - first + 1) * DIM):
            elements[at >= shard] += 1
    return elements


@pytest.mark.parametrize("order, stage, ranks", (
    ("ranks_first", 1, 2), ("ranks_first", 3, 3), ("local_first", 1, 3),
    ("local_first", 3, 2)))
def test_only_touched_rows_are_moved(order, stage, ranks, train, place):
    """Per step a gather of the parameters and a reduce-scatter of the gradients, or one per
    micro-batch: of rows that the step reads.  Six records twice have fewer than twelve, and
    all else is the same."""
    rng, path = random.Random(3), place.folder / "epoch.bin"
    records, steps, micros = [click(rng, DLRM) for _ in range(12)], 4, 2
    summaries = []
    for batch in (records, 2 * records[:6]):
        path.write_bytes(b"".join(batch))
        summaries.append(train("sparse", ranks, {
            **STEP, "data.path": str(path), "data.val_fraction": 0,
            "train_micro_batch_size_per_gpu": 6 // ranks,
            "gradient_accumulation_steps": micros, "run.steps": steps,
            "run.ring": 9, "run.schedule": "breadth_first", "run.sum_order": order,
            "zero_optimization.stage": stage}).summary)
    fetched, sent = (summaries[0][x] - summaries[1][x]
                     for x in ("fetched_bytes", "sent_bytes"))
    own, rest = (a - b for a, b in zip(
        touched(records, ranks), touched(records[:6], ranks)))
    assert fetched == 4 * steps * (own + rest) > 0
    times = micros if order == "ranks_first" else 1
    assert sent == 4 * steps * (own * (ranks - 1) + times * rest)


LARGE = {**DLRM, "rows": 40000, "dim": 16, "unit_rows": 5000}
TABLE = 7 * 40000 * 16 * 4


def test_a_table_larger_than_the_memory_trains(train):
    limit = TABLE * 3 // 4
    more = {**STEP, "model": LARGE, "run.memory_limit_bytes": limit,
            "run.eval_batches": 1}
    four = {"zero_optimization.offload_optimizer.buffer_count": 4}
    r = train("sparse", 2, {**more, **four}, NVME)
    assert r.bytes_in("device", "cpu") < limit
    free = train("sparse", 2, {**more, "run.memory_limit_bytes": 0})
    assert r.numbers == free.numbers
    run.refused(train("dlrm", 1, {**more, **four}, NVME, good=False),
                "this run needs", "MiB of memory")


@pytest.mark.parametrize("dtype, moments, checksum", [
    ("bf16", "bf16", False), ("fp32", "fp8", False), ("fp16", "fp32", True)])
def test_only_pages_with_touched_rows_come_from_disk(dtype, moments, checksum, train):
    """Tables without their initial weights: a page of weights, m and v for each
    row, and those between neighbours."""
    more = {**STEP, "model": {**LARGE, "rows": 4000, "dim": 64},
            "run.steps": 6, "run.state_dtype": moments,
            "run.nvme_checksum": checksum,
            "zero_optimization.sub_group_size": 20000, **run.typed(dtype)}
    none = train("sparse", 1, {**more, "run.steps": 0}, NVME)
    r, dense = (train(name, 1, more, NVME) for name in ("sparse", "dlrm"))
    assert r.numbers == train("sparse", 1, more).numbers
    start, some, every = (x.last("links")["disk"]["bytes"] for x in (none, r, dense))
    # A checksum is that of a whole chunk.
    assert some - start < (0.8 if checksum else 0.5) * (every - start)


def test_memory_follows_the_rows_of_a_step(train):
    """Of each unit of 5000 rows a step reads as many as it has samples, of one
    table or, where a unit has the end of one, of two."""
    r = train("sparse", 1, {**STEP, "model": LARGE})
    dense = train("dlrm", 1, {**STEP, "model": LARGE})
    assert r.bytes_of("gradients") < 56 * 2 * BATCH * 16 * 4 + 40000
    assert dense.bytes_of("gradients") > TABLE
    assert r.bytes_of("optimizer") == dense.bytes_of("optimizer")


@pytest.mark.parametrize("moments, ranks", [("bf16", 2), ("fp8", 1)])
def test_coded_moments_of_untouched_rows_stay(moments, ranks, train):
    """The bits of stage 0 at stage 3; rows of fp8 are whole blocks."""
    more = {**STEP, "run.state_dtype": moments, "run.steps": 6, "model.dim": 64}
    a, b = (train("sparse", ranks, more, home) for home in (NONE, (3, "cpu", "nvme")))
    assert a.numbers == b.numbers
