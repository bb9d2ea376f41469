# SPDX-License-Identifier: Apache-2.0
"""Units computed on a GPU.  On the stand-in of tests/fake the numbers and checkpoints
are those of a run on the CPU, bit for bit, in every stage and placement, also of one
that goes on with another place's checkpoint, with random delays in front of tasks and
of everything on a stream; on a real GPU (IZ_TEST_GPU=real) they are those of the
plainest run there."""
import re

import pytest

import cover
import rows
import run
from rows import PLAIN, REAL, TUNED, standin, valid_on_gpu

pytestmark = [pytest.mark.skipif(run.GPU not in ("standin", "real"),
                                 reason="needs a GPU or its stand-in"),
              pytest.mark.usefixtures("known_gpu")]
BATCH = 24

SUMS = {
    "ranks": (1, 2, 3),
    "dtype": ("fp32", "bf16", "fp16", "fp16 that overflows"),
    "micro": (1, 2, 0),  # samples of a micro-batch; 0: all of the rank's
    "clip": (0.0, 0.5),
    "tuned": tuple(t for t in TUNED if t not in ("dropout", "int8")),
    "sums": ("ranks_first", "local_first"),
}
FREE = {
    "stage": (0, 1, 2, 3),
    "optimizer": ("none", "cpu", "nvme"),
    "param": ("none", "cpu", "nvme"),
    "ratio": (1, 0.4, 0),
    "master": ("full", "remainder"),
    "comm": ("mpi", "nccl"),
    "schedule": ("depth_first", "breadth_first"),
    "scheduler": ("eager", "lws", "prio", "dmda"),
    "delay_us": (0, 300),
    "jitter_us": (0, 200),
    "overlap": (True, False),
    "recompute": ("full", "widened", "none"),
    "boundaries": ("none", "cpu", "nvme"),
    "ring": (0, 1, 3),
    "workers": (1, 2),
    "begins": ("here", "elsewhere", "on the CPU"),
}
if REAL:  # one GPU: ranks share it through MPI
    FREE["comm"], FREE["jitter_us"] = ("mpi",), (0,)
FACTORS = {**SUMS, **FREE}
# Each kind of bits needs a plain run: so few kinds.
ROWS = cover.rows(FACTORS, valid_on_gpu, [
    row for row in rows.product(**{k: FREE[k] for k in (
        "stage", "optimizer", "param")}) if valid_on_gpu(row)] + [
    {"stage": stage, "optimizer": "cpu", "param": param, "ratio": ratio}
    for stage, param in ((1, "none"), (2, "none"), (3, "none"), (3, "cpu"))
    for ratio in (0.4, 0)], few=cover.rows(SUMS, valid_on_gpu))
if run.FULL:
    ROWS += rows.drawn(FACTORS, valid_on_gpu, 300)

# Two chunks of a shard of a block on three ranks.
PLACE = {**PLAIN, "ratio": 1, "comm": "mpi", "boundaries": "none", "device": "cuda",
         "batch": BATCH, "chunk": 2048, "steps": 3, "sums": "ranks_first"}
ROW = {**PLACE, "ranks": 1, "dtype": "bf16", "micro": 0, "clip": 0.5}
FAR = {"stage": 3, "optimizer": "cpu", "param": "cpu"}
ON_CPU = {} if REAL else {"device": "cpu"}


def host_sums(start, row, changes=None, gpu=None):
    """A run whose GPU has a byte too little to add what the host updates, also with
    the fewest buffers for chunks, 8.  `gpu`: one that has it."""
    changes = changes or {}
    r = gpu or start(row, changes)
    n = [int(x) for x in re.findall(r"through (\d+) buffers", r.out)]
    more = r.memory["staging", "device"][1] * max(n[0] - 8, 0) // n[0] if n else 0
    return start(row, {**changes, "run.device_memory_limit_bytes":
                       r.bytes_in("device") - more - 1})


HERE = (*FREE, "products", "group")
BEGIN = {**PLAIN, "ratio": 1, "boundaries": "none", "comm": "mpi", "device": "cpu",
         "products": "host"}


@pytest.fixture
def same(compare):
    """Starts a row's run, which has the bits of what is left of it in the plainest
    places.  Where it begins elsewhere, it is in the place of one of `have`."""
    def same(row, changes=None, have=()):
        if REAL and row.get("comm") == "nccl":
            pytest.skip("one GPU")
        row, before = {**PLACE, **row}, None
        if row.get("begins") == "elsewhere":
            before = rows.elsewhere(row, HERE, have, valid_on_gpu)
        elif row.get("begins") == "on the CPU":
            before = {**row, **BEGIN, "steps": 1}
        left = {k: v for k, v in row.items() if k not in HERE}
        return compare(row, {**PLACE, **left, **ON_CPU}, changes, before)
    return same


@pytest.mark.parametrize("row", rows.cases(ROWS))
def test_same_bits_as_the_plain_run(row, same):
    steps = 6 if "overflows" in row["dtype"] else 3
    same({"batch": 12, **row, "steps": steps}, have=ROWS)


# ---- other optimizers and models ----

# The type of the states, on either side of the link.  Muon's matrices, too, with
# their products on either side.
STATES = {"update": ("adam", "lion", "muon"), "moments": ("fp32", "bf16", "fp8"),
          "dtype": ("fp32", "bf16", "fp16"), "ranks": (1, 2, 3), "clip": (0.0, 0.5)}
WHERE = {
    "home": ("0 none none", "2 none none", "1 cpu none", "2 cpu none", "3 none none",
             "3 cpu none", "3 cpu cpu", "3 nvme cpu", "3 nvme nvme"),
    "products": ("host", "gpu"), "ratio": (1, 0.4, 0), "master": ("full", "remainder"),
    "comm": ("mpi", "nccl"), "chunk": (10**9, 2048),
    "schedule": ("depth_first", "breadth_first"), "begins": FREE["begins"]}


def at_home(row):
    """With the stage and the homes that its home stands for."""
    row = dict(row)
    stage, *homes = row.pop("home", "3 cpu none").split()
    return {**row, "stage": int(stage), **dict(zip(("optimizer", "param"), homes))}


def valid_at_home(row):
    return valid_on_gpu(at_home(row))


# Beside each update; of other pairs those that nothing else here has.
UPDATES = cover.rows({**STATES, **WHERE}, valid_at_home, [
    {"moments": moments, "home": home}
    for moments in STATES["moments"] for home in WHERE["home"]] + [
    {"update": "muon", "products": products, **more}
    for products in WHERE["products"] for more in (
        *({"ratio": x} for x in WHERE["ratio"]),
        *({"ranks": x} for x in STATES["ranks"]))],
    beside="update", few=cover.rows(STATES, valid_at_home))


@standin
@pytest.mark.parametrize("row", rows.cases(UPDATES))
def test_every_update_has_the_same_bits(row, same):
    r = same({"batch": 12, "micro": 2, "tuned": "rules", **at_home(row)},
             have=list(map(at_home, UPDATES)))
    if row["update"] == "muon":
        where = "GPU" if row["products"] == "gpu" else "host"
        assert f"are updated as such on the {where}" in r.out


# Models of which one row is enough here: they differ from another in their ops.
LIKE = {"llama": "all of llama", "norms behind": "windows in chunks", "moe": "in chunks",
        "a shared expert": "units of experts", "sinks": "groups"}
OTHER_SUMS = {"model": tuple(m for m in rows.MODELS if m not in (
                  *LIKE, "gpt2", "sparse", "parallel", "documents", "documents in units",
                  "frozen tables", "a frozen table", "a frozen token", "adapters")),
              "ranks": (1, 2, 3), "dtype": STATES["dtype"], "update": STATES["update"]}
# What stages and homes do alike to all units has the rows above.
OTHER_FREE = {**{k: FREE[k] for k in (
                  "optimizer", "ratio", "comm", "schedule", "jitter_us", "recompute",
                  "boundaries")},
              "stage": (1, 3), "param": (*FREE["param"], "none/cpu", "cpu/none"),
              "products": WHERE["products"]}
OTHERS = cover.rows({**OTHER_SUMS, **OTHER_FREE}, valid_on_gpu, beside="model",
                    few=cover.rows(OTHER_SUMS, valid_on_gpu, beside="model"))
OTHERS += [{**next(r for r in OTHERS if r["model"] == of), "model": name}
           for name, of in LIKE.items()]


@pytest.mark.parametrize("row", rows.cases(OTHERS))
def test_other_models_have_the_same_bits(row, same):
    changes = {} if row["model"] in rows.RECORD else {
        "run.eval_batches": 1, "run.slices": 1}
    r = same({"batch": 12, "micro": 2, **row}, changes)
    assert rows.figures(r)[0] or "expert" not in row["model"]


# ---- what is left out or read otherwise ----

# On one rank with one micro-batch nothing else depends on the memory.
@pytest.mark.parametrize("part, row", (
    (0.35, {"model": "gpt2", "ranks": 1, "dtype": "bf16", **FAR, "boundaries": "cpu"}),
    (0.6, {"model": "gpt2", "ranks": 2, "dtype": "fp32", "stage": 2, "micro": 4}),
    (0.95, {"model": "llama", "ranks": 1, "dtype": "fp16", **FAR, "ratio": 0.4})))
def test_units_that_repeat_differently_have_the_same_bits(part, row, start):
    rows.check_mixes(start, {**ROW, **row}, part, "device")


@pytest.mark.parametrize("more", (
    {"ranks": 1, **FAR}, {"ranks": 2, "comm": "nccl", "stage": 3}, {"ranks": 3, "stage": 2}))
def test_dropout_leaves_out_the_same(more, same, start):
    row = {**ROW, "batch": 12, "tuned": "dropout", "micro": 2, **more}
    r = same(row)
    if row["ranks"] == 1:
        assert r.numbers != start(row, {"lora.dropout": 0.0}).numbers


# A base in 4 or 8 bits: where it lives, on one rank and on several, which meet on
# the host or on their GPUs.
QUANT = [("nf4", 1, "mpi", 0, "none", "none"), ("int8", 1, "mpi", 3, "nvme", "nvme"),
         ("int8", 2, "mpi", 1, "none", "none"), ("nf4", 2, "nccl", 2, "cpu", "none"),
         ("int8", 3, "nccl", 3, "cpu", "cpu"), ("nf4", 1, "mpi", 3, "none", "none/cpu"),
         ("nf4", 2, "nccl", 3, "none", "none/nvme"), ("int8", 2, "mpi", 3, "cpu", "cpu/none")]


def quant_row(form, ranks, comm, stage, optimizer, param):
    return {**ROW, "tuned": form, "ranks": ranks, "comm": comm, "stage": stage,
            "optimizer": optimizer, "param": param}


@pytest.mark.parametrize("case", [c for c in QUANT if c[0] == "int8" or "/" in c[-1]],
                         ids=lambda case: "-".join(map(str, case)))
def test_a_quantised_base_has_the_same_bits(case, same, start, place):
    """Beside nf4 in the rows above.  An export's values go up in place of the codes."""
    row = {**PLACE, **quant_row(*case), "batch": 12, "micro": 2}
    same(row, {"run.eval_batches": 1})
    r = start(row, {"run.export": str(place.folder / "out")})
    assert "\nexport: loss" in r.out, str(r)


@standin
@pytest.mark.parametrize("ratio", (1, 0.4))
def test_checkpoints_of_coded_states_on_the_gpu_wait(ratio, start):
    """What auto chooses; those on the host alone are saved beside training."""
    row = {**ROW, "stage": 2, "optimizer": "cpu", "ratio": ratio, "moments": "fp8"}
    wait, free = (start(row, {**rows.SAVED, "run.save_mode": x}) for x in ("sync", "auto"))
    more = free.bytes_of("staging") - wait.bytes_of("staging")
    assert (more > 0) == (ratio == 1)
    if ratio < 1:
        run.refused(start(row, {**rows.SAVED, "run.save_mode": "async"}, good=False),
                    "run.save_mode", "state_dtype")


# ---- groups of ranks ----

FOUR = {**ROW, "ranks": 4, "micro": 3}


@standin
@pytest.mark.parametrize("row", rows.cases([
    {"stage": 0, "dtype": "fp32", "sums": "local_first", "comm": "nccl"}, {"stage": 1},
    {"stage": 2, "dtype": "fp16", "optimizer": "cpu", "sums": "local_first"},
    {"stage": 3, "optimizer": "cpu", "ratio": 0.4, "comm": "nccl"}]))
def test_groups_of_ranks_have_the_bits_of_the_cpu(row, same):
    same({**FOUR, "schedule": "breadth_first", **row}, {"run.sum_group": 2})


# Copies of the parameters in two groups of two ranks, where parameters live.
COPIES = {**FOUR, "group": 2, "stage": 3}


@standin
@pytest.mark.parametrize("row", rows.cases([
    {"comm": "mpi", "dtype": "fp32"},
    {"comm": "nccl", "optimizer": "cpu", "ratio": 0.4, "tuned": "lora", "ring": 3},
    {"comm": "nccl", "dtype": "fp16", "optimizer": "cpu", "param": "cpu", "tuned": "frozen"},
    {"comm": "mpi", "optimizer": "nvme", "param": "cpu", "tuned": "lora", "ring": 3}]))
def test_copies_have_the_bits_of_the_cpu(row, same):
    r = same({**COPIES, "ring": 1, "delay_us": 300, "jitter_us": 200, **row})
    assert r.bytes_of("parameter copies") > 0
