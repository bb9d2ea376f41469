# SPDX-License-Identifier: Apache-2.0
"""Sparse tables: rows that no sample of a step reads keep weights, m and v, and
cost nothing.  That the bits do not depend on stage, homes, schedule and type is
in test_models.py."""
import random
import re
import shutil
import struct

import pytest

import run
from rows import DLRM, click, use

DIM, BATCH = DLRM["dim"], 12
STEP = {"train_batch_size": BATCH, "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2,
                                                  "weight_decay": 0.1}}}
NVME, CPU, NONE = ((3, "nvme", "nvme"), (3, "cpu", "cpu"), (0, "none", "none"))


@pytest.fixture
def start(place, nvme):
    """Starts dlrm, with sparse tables or dense ones."""
    def start(name, ranks, settings, home=None, good=True, **more):
        use(place, name)
        sparse = {"parameters": [{"match": "tables.*", "sparse": True}]}
        act = place.good if good else place.launch
        return act(ranks, {"run.device": "cpu", **(sparse if name == "sparse" else {}),
                           **(run.offload(*home, nvme) if home else {}), **settings},
                   **more)
    return start


def rows(data):
    return [data[i:i + 4 * DIM] for i in range(0, len(data), 4 * DIM)]


@pytest.mark.sanitized
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_a_step_is_that_of_dense_adam_on_the_rows_it_reads(dtype, start, place):
    """From one state a sparse and a dense step: a row has either the bits of
    the dense step in all its tensors, or those from before in all of them."""
    more = {**STEP, "run.save": True, **run.typed(dtype)}
    before = place.folder / "before"
    start("sparse", 1, {**more, "run.steps": 3}, output=before)
    outputs = {}
    for model in ("sparse", "dlrm"):
        outputs[model] = place.folder / model
        shutil.copytree(before, outputs[model])
        start(model, 1, {**more, "run.steps": 4}, output=outputs[model],
              options=["--resume"])
    old, new, dense = (run.arrays(before, 3), run.arrays(outputs["sparse"], 4),
                       run.arrays(outputs["dlrm"], 4))
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


def test_the_first_step_is_dense_adams_without_decay(start):
    """m and v are zero: Adam leaves rows without a gradient where they are."""
    more = {**STEP, "run.steps": 1, "optimizer.params.weight_decay": 0}
    a = start("sparse", 1, more)
    b = start("dlrm", 1, more)
    assert a.hash == b.hash and a.losses == b.losses
    decayed = start("sparse", 1, {**STEP, "run.steps": 1})
    assert decayed.hash != start("dlrm", 1, {**STEP, "run.steps": 1}).hash


def epoch(place, n):
    """n records, which are the batch of every step; the rows they read."""
    model, rng = DLRM, random.Random(3)
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
    size, total = DLRM["unit_rows"], 7 * DLRM["rows"]
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
    m = DLRM
    pairs = m["dim"] + m["tables"] * (m["tables"] + 1) // 2
    n = 0
    for width, hidden, end in ((m["dense"], 9, m["dim"]), (pairs, 11, 2)):
        for _ in range(2):
            n, width = n + (width + 1) * hidden, hidden
        n += (width + (end != 2)) * end
    return (-(-n // ranks) + 63) // 64 * 64


@pytest.mark.parametrize("order, stage, ranks", (
    ("ranks_first", 1, 2), ("ranks_first", 3, 3), ("local_first", 1, 3),
    ("local_first", 3, 2)))
def test_only_touched_rows_are_moved(order, stage, ranks, start, place):
    """Per step a gather of the parameters and a reduce-scatter of the gradients,
    or one per micro-batch: of rows that the step reads."""
    data, read = epoch(place, 12)
    steps, micros = 4, 2
    r = start("sparse", ranks, {
        **STEP, "data.path": data, "data.val_fraction": 0,
        "train_micro_batch_size_per_gpu": 6 // ranks,
        "gradient_accumulation_steps": micros, "run.steps": steps,
        "run.ring": 9, "run.schedule": "breadth_first", "run.sum_order": order,
        "zero_optimization": {"stage": stage}})
    shard, units = zip(*shards(read, ranks))
    head = head_shard(ranks)
    everything = sum(map(sum, units)) + ranks * head
    assert r.summary["fetched_bytes"] == 4 * steps * everything
    own = [u[0] for u in units] + [head]
    rest = [sum(u[1:]) for u in units] + [(ranks - 1) * head]
    times = micros if order == "ranks_first" else 1
    sent = 4 * (sum(own) * (ranks - 1) + times * sum(rest))
    scalars = 8 * (5 + len(own)) * (ranks - 1)
    # the initial weights that are kept whole; a little is said at both ends
    once = 4 * (sum(shard) + head) * (ranks - 1) if stage < 3 else 0
    assert 0 <= r.summary["sent_bytes"] - steps * (sent + scalars) - once < 1500
    # and not a quarter of what whole tables would be
    assert len(read) < 0.4 * 7 * 31


LARGE = {**DLRM, "rows": 40000, "dim": 16, "unit_rows": 5000}
TABLE = 7 * 40000 * 16 * 4


def test_a_table_larger_than_the_memory_trains(start):
    limit = TABLE * 3 // 4
    more = {**STEP, "model": LARGE, "run.memory_limit_bytes": limit,
            "run.eval_batches": 1}
    four = {"zero_optimization.offload_optimizer.buffer_count": 4}
    r = start("sparse", 2, {**more, **four}, NVME)
    assert r.bytes_in("device", "cpu") < limit
    free = start("sparse", 2, {**more, "run.memory_limit_bytes": 0}, NONE)
    assert r.numbers == free.numbers
    run.refused(start("dlrm", 1, {**more, **four}, NVME, good=False),
                "this run needs", "MiB of memory")


def disk(r):
    """MiB between disk and memory, as the summary has them."""
    return float(re.search(r"^  disk +([0-9.]+)", r.out, re.M)[1])


@pytest.mark.parametrize("dtype, moments, checksum", [
    ("bf16", "bf16", False), ("fp32", "fp8", False), ("fp16", "fp32", True)])
def test_only_pages_with_touched_rows_come_from_disk(dtype, moments, checksum, start):
    """Tables without their initial weights: a page of weights, m and v for each
    row, and those between neighbours."""
    more = {**STEP, "model": {**LARGE, "rows": 4000, "dim": 64},
            "run.steps": 6, "run.state_dtype": moments,
            "run.nvme_checksum": checksum,
            "zero_optimization.sub_group_size": 20000, **run.typed(dtype)}
    near = start("sparse", 1, more, NONE)
    none = start("sparse", 1, {**more, "run.steps": 0}, NVME)
    r, dense = (start(name, 1, more, NVME) for name in ("sparse", "dlrm"))
    assert r.numbers == near.numbers
    # A checksum is that of a whole chunk.
    most = 0.8 if checksum else 0.5
    assert disk(r) - disk(none) < most * (disk(dense) - disk(none))


def test_memory_follows_the_rows_of_a_step(start):
    """Of each unit of 5000 rows a step reads as many as it has samples, of one
    table or, where a unit has the end of one, of two."""
    r = start("sparse", 1, {**STEP, "model": LARGE})
    dense = start("dlrm", 1, {**STEP, "model": LARGE})
    assert r.bytes_of("gradients") < 56 * 2 * BATCH * 16 * 4 + 40000
    assert dense.bytes_of("gradients") > TABLE
    assert r.bytes_of("optimizer") == dense.bytes_of("optimizer")


@pytest.mark.parametrize("moments, ranks", [("bf16", 2), ("fp8", 1)])
def test_coded_moments_of_untouched_rows_stay(moments, ranks, start):
    """The bits of stage 0 at stage 3; rows of fp8 are whole blocks."""
    more = {**STEP, "run.state_dtype": moments, "run.steps": 6, "model.dim": 64}
    a = start("sparse", ranks, more, NONE)
    b = start("sparse", ranks, more, (3, "cpu", "nvme"))
    assert a.numbers == b.numbers


def test_copies_of_sparse_tables_are_refused(start):
    r = start("sparse", 1, {"zero_optimization.zero_hpz_partition_size": 2,
                            "train_batch_size": 4}, CPU, good=False,
              options=["--plan", "--ranks", 4])
    run.refused(r, "sparse: true for tables", "zero_hpz_partition_size copies whole")
