# SPDX-License-Identifier: Apache-2.0
"""However a run is cut, placed, scheduled and delayed, its numbers are those of
the plainest one: stage 0, nothing offloaded, depth first.  A part of the matrix
that covers every pair of settings; IZ_TEST_FULL=1 runs the whole product of
stages, homes, schedules, schedulers, ranks and delays."""
import itertools
import random

import pytest

import cover
import run

BATCH = 24  # samples of a step, for any number of ranks

# What changes the order of sums, and so the bits.
SUMS = {
    "ranks": (1, 2, 3, 4),
    "dtype": ("fp32", "bf16", "narrow", "fp16"),  # narrow: products of bf16 too
    "shape": ("one", "sliced", "accumulated", "both"),
    "clip": (0.0, 0.5),
    "tuned": ("all", "rules", "frozen", "top", "lora"),  # keys of TUNED
}
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
}
# What must not.
FREE = {
    "stage": (0, 1, 2, 3),
    "optimizer": ("none", "cpu", "nvme"),
    "param": ("none", "cpu", "nvme"),
    "schedule": ("depth_first", "breadth_first"),
    "scheduler": ("eager", "lws", "prio", "dmda", "dmdas"),
    "delay_us": (0, 300),
    "overlap": (True, False),
    "overlap_comm": (True, False),
    "recompute": ("full", "none"),
    "ring": (0, 1, 3),
    "in_flight": (1, 3),
    "chunk": (10**9, 2048),
    "reuse": (10**9, 0),
    "buffers": (1, 4),
    "workers": (1, 2, 3),
    "wave": (0, 1, 2),
}
FACTORS = {**SUMS, **FREE}
PLAIN = {"stage": 0, "optimizer": "none", "param": "none",
         "schedule": "depth_first", "scheduler": "prio", "delay_us": 0,
         "overlap": True, "overlap_comm": True, "recompute": "full", "ring": 0,
         "in_flight": 2, "chunk": 10**9, "reuse": 10**9, "buffers": 4,
         "workers": 2, "wave": 0}


def valid(row):
    stage = row.get("stage", 3)
    return not (row.get("optimizer", "none") != "none" and stage == 0 or
                row.get("param", "none") != "none" and stage != 3)


def product(**factors):
    names = list(factors)
    for values in itertools.product(*factors.values()):
        row = dict(zip(names, values))
        if valid(row):
            yield row


PLACEMENTS = list(product(**{k: FREE[k]
                             for k in ("stage", "optimizer", "param")}))


def full_rows():
    """The whole product; what it does not name varies at random."""
    named = ("stage", "optimizer", "param", "schedule", "scheduler", "delay_us")
    for row in product(ranks=SUMS["ranks"], **{k: FREE[k] for k in named}):
        rng = random.Random(repr(row))
        yield {f: row[f] if f in row else rng.choice(v)
               for f, v in FACTORS.items()}


ROWS = cover.rows(FACTORS, valid, PLACEMENTS)
if run.FULL:
    ROWS += list(full_rows())


def batch_of(row):
    rank = BATCH // row["ranks"]
    accumulates = row["shape"] in ("accumulated", "both")
    return {"train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": 2 if accumulates else rank,
            "gradient_accumulation_steps": rank // 2 if accumulates else 1,
            "run.slices": 2 if row["shape"] in ("sliced", "both") else 1}


def config_of(row, nvme):
    zero = run.offload(row["stage"], row["optimizer"], row["param"], nvme)
    for section in zero["zero_optimization"].values():
        if isinstance(section, dict):
            section["buffer_count"] = row["buffers"]
    config = {
        **zero, **batch_of(row), **TUNED[row["tuned"]],
        "gradient_clipping": row["clip"],
        "zero_optimization.sub_group_size": row["chunk"],
        "zero_optimization.overlap_comm": row["overlap_comm"],
        "zero_optimization.stage3_max_reuse_distance": row["reuse"],
        "run.steps": 4,
        "run.inject_delay_us": row["delay_us"],
        "run.inject_seed": 3 + row["ring"],
        "run.nvme_checksum": True,
        "run.parallel_micro_batches": row["wave"],
    }
    for key in ("schedule", "scheduler", "overlap", "recompute", "ring",
                "in_flight", "workers"):
        config[f"run.{key}"] = row[key]
    if row["dtype"] in ("bf16", "narrow"):
        config["bf16.enabled"] = True
        config["run.cpu_products"] = "fp32" if row["dtype"] == "bf16" else "bf16"
    if row["dtype"] == "fp16":  # the scale grows within the four steps
        config["fp16.enabled"] = True
        config["fp16.initial_scale_power"] = 8
        config["fp16.loss_scale_window"] = 2
    return config


def start(place, row, nvme):
    ranks = None if row["ranks"] == 1 else row["ranks"]
    return place.good(ranks, config_of(row, nvme))


@pytest.fixture(scope="session")
def references():
    return {}


def reference(references, place, row, nvme):
    key = tuple(row[k] for k in SUMS)
    if key not in references:
        r = start(place, {**row, **PLAIN}, nvme)
        references[key] = r.bits, r.hash
    return references[key]


def name_of(row):
    def word(v):
        return {True: "yes", False: "no", 10**9: "max"}.get(
            v, str(v)) if isinstance(v, bool) or v == 10**9 else str(v)
    return "-".join(word(v) for v in row.values())


def cases():
    for row in ROWS:
        marks = [pytest.mark.single] if row["ranks"] == 1 else []
        yield pytest.param(row, id=name_of(row), marks=marks)


@pytest.mark.parametrize("row", cases())
def test_same_bits_as_the_plain_run(row, place, nvme, references, request):
    if row["dtype"] == "narrow":  # a mark of one case asks for no fixture
        request.getfixturevalue("narrow_products")
    bits, weights = reference(references, place, row, nvme)
    r = start(place, row, nvme)
    assert len(bits) == 4
    assert r.bits == bits, str(r)
    assert r.hash == weights, str(r)


def test_narrow_products_change_bits(place, nvme, narrow_products):
    """They are what the key asks for, and near the others."""
    row = {**PLAIN, "ranks": 1, "shape": "one", "clip": 0.5, "tuned": "all"}
    wide = start(place, {**row, "dtype": "bf16"}, nvme)
    narrow = start(place, {**row, "dtype": "narrow"}, nvme)
    assert wide.bits != narrow.bits and wide.hash != narrow.hash
    assert wide.losses == pytest.approx(narrow.losses, rel=1e-3)


def test_every_pair_of_settings_is_covered():
    seen = [set(row.items()) for row in ROWS]
    missing = [g for g in cover.goals_of(FACTORS, valid, PLACEMENTS)
               if not any(g <= row for row in seen)]
    assert not missing and all(map(valid, ROWS))


def test_other_seed_gives_other_bits(place, nvme):
    """The comparison above can fail."""
    row = {**PLAIN, "ranks": 1, "dtype": "fp32", "shape": "one", "clip": 0.5,
           "tuned": "all"}
    config = config_of(row, nvme)
    a = place.good(None, config)
    b = place.good(None, {**config, "run.seed": 2})
    c = place.good(None, {**config, "gradient_clipping": 0.5000001})
    assert a.bits != b.bits and a.hash != b.hash
    assert a.bits != c.bits and a.hash != c.hash
