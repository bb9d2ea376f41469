# SPDX-License-Identifier: Apache-2.0
"""However a run is cut, placed, scheduled and delayed, wherever its checkpoint comes
from, its numbers and files are those of the plainest one: stage 0, nothing offloaded,
depth first.  A part of the matrix that covers every pair of settings, and a smaller
one of other models than GPT-2; IZ_TEST_FULL=1 runs the whole product of stages, homes,
schedules, schedulers, ranks and delays, and random rows of all models."""
import pytest

import cover
import rows
import run
from rows import MODELS, PLAIN, TUNED, TYPES, UPDATES, product, valid

BATCH = 24  # samples of a step, for any number of ranks
# Samples of a micro-batch (0: all of a rank's), slices.
SHAPES = {"one": (0, 1), "sliced": (0, 2), "accumulated": (2, 1), "both": (2, 2)}

# What changes the order of sums, and so the bits.
SUMS = {
    "ranks": (1, 3, 4),  # of two there are nearly all other tests
    "dtype": tuple(TYPES),
    "shape": tuple(SHAPES),
    "clip": (0.0, 0.5),
    "tuned": tuple(t for t in TUNED if t != "int8"),
    "update": tuple(UPDATES),
    "moments": ("fp32", "bf16", "fp8"),
    "sums": ("ranks_first", "local_first"),
    "sum_group": (1, 2),
}
# What must not.
PLACES = {"stage": (0, 1, 2, 3), "optimizer": ("none", "cpu", "nvme"),
          "param": ("none", "cpu", "nvme"), "group": (1, 2)}
FREE = {
    **PLACES,
    "master": ("full", "remainder"),
    "schedule": ("depth_first", "breadth_first"),
    "scheduler": ("eager", "lws", "prio", "dmda", "dmdas"),
    "delay_us": (0, 300),
    "overlap": (True, False),
    "overlap_comm": (True, False),
    "recompute": ("full", "widened", "none"),
    "boundaries": ("none", "nvme"),
    "ring": (0, 1, 3),
    "in_flight": (1, 3),
    "chunk": (10**9, 2048),
    "reuse": (10**9, 0),
    "buffers": (1, 4),
    "workers": (1, 2, 3),
    "wave": (0, 1, 2),
    "hosts": ("one", "aabb", "abcd"),
    "host_comm": ("memory", "messages"),
    "begins": ("here", "elsewhere"),  # in the place of another row, and goes on
}
FACTORS = {**SUMS, **FREE}
PLACEMENTS = product(**PLACES) + [
    {"dtype": "fp16 that overflows", "update": "muon", "optimizer": "nvme"}]


def full_rows():
    """The whole product; what it does not name varies at random."""
    named = (*PLACES, "schedule", "scheduler", "delay_us")
    for row in product(ranks=(1, 2, 3, 4), **{k: FREE[k] for k in named}):
        fixed = {f: (v,) for f, v in row.items()}
        yield from rows.drawn({**FACTORS, **fixed}, valid, 1, repr(row))


# Each kind of bits needs a plain run: so few kinds.
KINDS = cover.rows(SUMS, valid)
ROWS = cover.rows(FACTORS, valid, PLACEMENTS, few=KINDS)
if run.FULL:
    ROWS += list(full_rows())

OTHER_SUMS = {"model": tuple(MODELS)[1:], "ranks": (1, 3),
              "dtype": ("fp32", "bf16", "fp16"), "sums": SUMS["sums"],
              "update": SUMS["update"]}
OTHER_FREE = {**{k: FREE[k] for k in (*PLAIN, "ring", "wave", "boundaries", "in_flight",
                                      "begins")},
              "param": (*FREE["param"], "nvme/cpu")}
OTHER_KINDS = cover.rows(OTHER_SUMS, valid, beside="model")
# What the rows of GPT-2 have without a model is not tried again.
OTHERS = cover.rows({**OTHER_SUMS, **OTHER_FREE}, valid, beside="model",
                    few=OTHER_KINDS)
# Touched rows that groups of ranks add.
OTHERS += [{**next(r for r in OTHERS if r["model"] == "sparse" and r["ranks"] == 3 and
                   r["stage"] == stage), "ranks": 4, "sum_group": 2, "hosts": "aabb"}
           for stage in (1, 3)]
if run.FULL:
    every = {**FREE, **OTHER_SUMS, **OTHER_FREE, "moments": SUMS["moments"],
             "clip": SUMS["clip"], "group": (1,)}
    OTHERS += rows.drawn(every, valid, 200)


def whole(row):
    """With what the name of its shape stands for, and what all rows have."""
    if "model" in row:
        return {**row, "batch": 16 if row["ranks"] == 4 else 12, "steps": 3, "micro": 2,
                "device": "cpu", "eval_batches": 1}
    micro, slices = SHAPES[row["shape"]]
    return {**row, "model": "gpt2", "batch": BATCH, "micro": micro, "slices": slices,
            "steps": 6 if "overflows" in row["dtype"] else 4}


def plain(row):
    """What is left of a row at its plainest."""
    return {**{k: v for k, v in whole(row).items() if k not in FREE}, **PLAIN}


def check(row, have, compare):
    full, before = whole(row), None
    if row["begins"] == "elsewhere":
        before = rows.elsewhere(full, FREE, have, valid)
    r = compare(full, plain(row), before=before)
    assert ("are updated as such" in r.out) == (row["update"] == "muon")


@pytest.mark.parametrize("row", rows.cases(ROWS))
def test_same_bits_as_the_plain_run(row, compare, request):
    if row["dtype"] == "bf16_products":  # a mark of one case asks for no fixture
        request.getfixturevalue("bf16_products")
    check(row, ROWS, compare)


@pytest.mark.parametrize("row", rows.cases(OTHERS))
def test_other_models_have_the_same_bits(row, compare):
    check(row, OTHERS, compare)


@pytest.mark.parametrize("name", rows.BESIDE)
def test_what_is_beside_a_model_changes_the_bits(name, start):
    a, b = (start(plain({"ranks": 1, "dtype": "fp32", "model": x}))
            for x in (rows.BESIDE[name][0], name))
    assert a.hash != b.hash


@pytest.mark.parametrize("part, row", (
    (0.35, {"model": "gpt2", "ranks": 2, "dtype": "bf16", "stage": 3, "param": "cpu",
            "optimizer": "cpu"}),
    (0.6, {"model": "gpt2", "ranks": 1, "dtype": "fp32", "schedule": "breadth_first"}),
    (0.95, {"model": "gpt2", "ranks": 1, "dtype": "fp16", "tuned": "lora"}),
    (0.6, {"model": "gpt2", "ranks": 1, "dtype": "bf16", "tuned": "top"}),
    (0.95, {"model": "all of llama", "ranks": 2, "dtype": "fp16", "stage": 1}),
    (0.35, {"model": "vit", "ranks": 1, "dtype": "fp32"})))
def test_units_that_repeat_differently_have_the_same_bits(part, row, start):
    rows.check_mixes(start, {**PLAIN, "batch": 12, "steps": 3, "micro": 2, "slices": 1,
                             **row, "device": "cpu"}, part, "device", "cpu")


ONE = {**PLAIN, "ranks": 1, "dtype": "fp32", "batch": BATCH, "steps": 4, "micro": 0,
       "clip": 0.5}


def test_bf16_products_change_bits(start, bf16_products):
    """They are what the key asks for, and near the others."""
    fp32, bf16 = (start({**ONE, "dtype": x}) for x in ("bf16", "bf16_products"))
    assert fp32.bits != bf16.bits and fp32.hash != bf16.hash
    assert fp32.losses == pytest.approx(bf16.losses, rel=1e-3)


def test_what_changes_the_bits_does(start):
    """The comparison above can fail."""
    runs = [start(ONE, more) for more in (
        {}, {"run.seed": 2}, {"gradient_clipping": 0.5000001},
        {"run.state_dtype": "bf16"}, {"run.state_dtype": "fp8"}, UPDATES["lion"])]
    assert len({r.hash for r in runs}) == len({str(r.bits) for r in runs}) == 6


@pytest.mark.parametrize("model", ("vit", "dlrm"))
def test_records_count_to_their_last_byte_in_however_many_files(model, start, place):
    data, paths = rows.records(model, MODELS[model]), [place.folder / x for x in "ab"]

    def train(*parts, **more):
        for path, part in zip(paths, parts):
            path.write_bytes(b"".join(part))
        return start({**ONE, "model": model, "batch": 12, "eval_batches": 1},
                     {"data.path": list(map(str, paths[:len(parts)]))}, **more)
    one, two = train(data), train(data[:37], data[37:])
    assert one.numbers == two.numbers and one.validation == two.validation
    other = train([x[:-1] + bytes([x[-1] ^ 1]) for x in data])
    assert one.bits != other.bits and one.hash != other.hash
    bad = train(data[:37], [*data[37:-1], b"\xff" * len(data[-1])], good=False)
    run.refused(bad, "b: record 62: its label is n")
