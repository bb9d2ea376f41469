# SPDX-License-Identifier: Apache-2.0
"""Units computed on a GPU.  On the stand-in of tests/standin the numbers are
those of a run on the CPU, bit for bit, in every stage and placement, with
random delays in front of tasks and of everything on a stream; on a real GPU
(IZ_TEST_GPU=real) they are those of the plainest run there.  What crosses
between host and GPU is what the run says it planned."""
import itertools
import json
import os
import pathlib
import random
import tempfile

import pytest

import cover
import run
from test_matrix import TUNED
from test_norm import ALL, normed

KIND = os.environ.get("IZ_TEST_GPU", "")
pytestmark = pytest.mark.skipif(KIND not in ("standin", "real"),
                                reason="needs a GPU or its stand-in")
REAL = KIND == "real"
BATCH = 8
MEM_MB = 96

SUMS = {
    "ranks": (1, 2, 3),
    "dtype": ("fp32", "bf16", "fp16"),
    "micro": (1, 2, 0),  # samples of a micro-batch; 0: all of the rank's
    "clip": (0.0, 0.5),
    "tuned": tuple(TUNED),
}
FREE = {
    "stage": (0, 1, 2, 3),
    "optimizer": ("none", "cpu", "nvme"),
    "param": ("none", "cpu", "nvme"),
    "ratio": (1, 0.7, 0.3, 0),
    "comm": ("mpi", "nccl"),
    "schedule": ("depth_first", "breadth_first"),
    "scheduler": ("eager", "lws", "prio", "dmda"),
    "delay_us": (0, 300),
    "jitter_us": (0, 500),
    "overlap": (True, False),
    "recompute": ("full", "none"),
    "boundaries": ("gpu", "host"),
    "ring": (0, 1, 3),
    "workers": (1, 2),
}
if REAL:  # one GPU: ranks share it through MPI
    FREE["comm"], FREE["jitter_us"] = ("mpi",), (0,)
FACTORS = {**SUMS, **FREE}
PLAIN = {"stage": 0, "optimizer": "none", "param": "none", "ratio": 1,
         "comm": "mpi",
         "schedule": "depth_first", "scheduler": "prio", "delay_us": 0,
         "jitter_us": 0, "overlap": True, "recompute": "full",
         "boundaries": "gpu", "ring": 0, "workers": 2}


def valid(row):
    stage = row.get("stage", 3)
    optimizer, param = row.get("optimizer", "cpu"), row.get("param", "none")
    if optimizer != "none" and stage == 0 or param != "none" and stage != 3:
        return False
    if row.get("ratio", 1) < 1 and (optimizer, param == "nvme") != ("cpu", False):
        return False
    if row.get("recompute") == "none" and row.get("boundaries") == "host":
        return False
    return not (param != "none" and optimizer == "none")


ROWS = cover.rows(FACTORS, valid, [
    dict(zip(("stage", "optimizer", "param"), v))
    for v in itertools.product(FREE["stage"], FREE["optimizer"], FREE["param"])
    if valid(dict(zip(("stage", "optimizer", "param"), v)))] + [
    {"stage": stage, "optimizer": "cpu", "param": param, "ratio": ratio,
     "ranks": ranks}
    for stage, param in ((1, "none"), (2, "none"), (3, "none"), (3, "cpu"))
    for ratio in (0.7, 0.3, 0) for ranks in (1, 2)])
if run.FULL:
    rng = random.Random(11)
    every = [dict(zip(FACTORS, v)) for v in itertools.product(*FACTORS.values())]
    ROWS += rng.sample([r for r in every if valid(r)], 300)


def config_of(row, nvme):
    rank = BATCH * 3 // row["ranks"]
    config = {
        **run.offload(row["stage"], row["optimizer"], row["param"], nvme),
        "train_batch_size": BATCH * 3,
        "train_micro_batch_size_per_gpu": row["micro"] or rank,
        "gradient_clipping": row["clip"],
        # Two chunks of a shard of a block on three ranks.
        "zero_optimization.sub_group_size": 2048,
        "activation_checkpointing.cpu_checkpointing":
            row["boundaries"] == "host",
        "run.device": "cuda", "run.steps": 3,
        "run.inject_delay_us": row["delay_us"],
        **TUNED[row["tuned"]],
    }
    if row["optimizer"] != "none":
        config["zero_optimization.offload_optimizer.ratio"] = row["ratio"]
    for key in ("comm", "schedule", "scheduler", "overlap", "recompute", "ring",
                "workers"):
        config[f"run.{key}"] = row[key]
    if row["dtype"] != "fp32":
        config[f"{row['dtype']}.enabled"] = True
    if row["dtype"] == "fp16":
        config["fp16.initial_scale_power"] = 8
        config["fp16.loss_scale_window"] = 2
    return config


def environment(place, row, stats=None):
    # StarPU measures the bus anew when the number of GPUs changes.
    home = place.folder.parent / f"starpu-{row['ranks']}"
    home.mkdir(exist_ok=True)
    env = {"STARPU_HOME": str(home), "STARPU_SILENT": "1",
           "IZ_STANDIN_DEVICES": str(row["ranks"]),
           "IZ_STANDIN_MEM_MB": str(MEM_MB), "IZ_STANDIN_PAGEABLE": "abort",
           "IZ_STANDIN_JITTER_US": str(row["jitter_us"])}
    if stats:
        env["IZ_STANDIN_STATS"] = str(stats)
    return env


def start(place, row, nvme, changes=None, stats=None):
    ranks = None if row["ranks"] == 1 else row["ranks"]
    return place.good(ranks, {**config_of(row, nvme), **(changes or {})},
                      env=environment(place, row, stats))


@pytest.fixture(scope="session")
def references():
    return {}


@pytest.fixture(scope="session", autouse=True)
def calibrated(workplace, text):
    """StarPU measures the bus when it first starts, with copies of its own."""
    p = run.Place(pathlib.Path(tempfile.mkdtemp(dir=workplace)), text)
    start(p, {**PLAIN, "ranks": 1, "dtype": "fp32", "micro": 0, "clip": 0.5,
       "tuned": "all"},
          workplace)
    p.clear()


def reference(references, place, row, nvme):
    key = tuple(row[k] for k in SUMS)
    if key not in references:
        plain = {**row, **PLAIN}
        changes = {} if REAL else {"run.device": "cpu"}
        r = start(place, plain, nvme, changes)
        references[key] = r.bits, r.hash
    return references[key]


def name_of(row):
    return "-".join({True: "yes", False: "no"}.get(v, str(v))
                    if isinstance(v, bool) else str(v) for v in row.values())


@pytest.mark.parametrize("row", [pytest.param(r, id=name_of(r)) for r in ROWS])
def test_same_bits_as_the_plain_run(row, place, nvme, references):
    bits, weights = reference(references, place, row, nvme)
    r = start(place, row, nvme)
    assert len(bits) == 3 and r.bits == bits and r.hash == weights, str(r)


# Lion's one state on either side, in every type.
@pytest.mark.parametrize("kind, dtype, stage, optimizer, param, ratio", [
    ("fp32", "fp32", 0, "none", "none", 1), ("fp32", "bf16", 3, "cpu", "cpu", 0.4),
    ("bf16", "bf16", 1, "cpu", "none", 0), ("fp8", "fp16", 2, "cpu", "none", 0.4),
    ("fp8", "bf16", 3, "nvme", "nvme", 1)])
def test_lion_has_the_same_bits(kind, dtype, stage, optimizer, param, ratio, place,
                                nvme):
    changes = {"optimizer": {"type": "Lion", "params": {"weight_decay": 0.3}},
               "run.state_dtype": kind}
    row = {**PLAIN, "ranks": 2, "dtype": dtype, "micro": 2, "clip": 0.5,
           "tuned": "rules"}
    want = start(place, row, nvme,
                 changes if REAL else {**changes, "run.device": "cpu"})
    r = start(place, {**row, "stage": stage, "optimizer": optimizer,
                      "param": param, "ratio": ratio}, nvme, changes)
    assert r.bits == want.bits and r.hash == want.hash, str(r)


# Of several contributions to an offloaded gradient the host adds the last one.
# A single one of bf16 comes down as it is, but for the embedding's two, or is
# added by the host's collectives.
@pytest.mark.parametrize("ranks,comm,optimizer,micro,left", [
    (1, "mpi", "none", 0, ALL), (1, "mpi", "none", 8, ALL),
    (1, "mpi", "cpu", 0, ALL - {0}), (1, "mpi", "cpu", 8, {0}),
    (2, "mpi", "none", 0, ALL), (2, "mpi", "cpu", 0, set()),
    (2, "mpi", "cpu", 6, {0})] + ([] if REAL else [
    (2, "nccl", "none", 0, ALL), (2, "nccl", "cpu", 0, ALL - {0}),
    (2, "nccl", "cpu", 6, {0})]))
def test_a_unit_has_a_norm_task_only_without_a_sum(ranks, comm, optimizer, micro,
                                                   left, place, nvme):
    row = {**PLAIN, "ranks": ranks, "dtype": "bf16", "micro": micro, "stage": 3,
           "optimizer": optimizer, "comm": comm, "clip": 0.5, "tuned": "all"}
    assert normed(start(place, row, nvme, {"run.task_log": True})) == left


# ---- bytes ----

ROW = {**PLAIN, "ranks": 1, "dtype": "bf16", "micro": 0, "clip": 0.5,
       "tuned": "all"}
standin = pytest.mark.skipif(KIND != "standin", reason="counted by the stand-in")


def counted(place, row, nvme, **changes):
    stats = place.folder / f"stats{place.count}.json"
    r = start(place, row, nvme, changes, stats)
    ranks = [json.loads(line) for line in stats.read_text().splitlines()]
    return r, {k: sum(rank[k] for rank in ranks) for k in ranks[0]}


def traffic(place, row, nvme, **changes):
    """Bytes of two more steps, without those of start and end."""
    few, at_first = counted(place, row, nvme, **{**changes, "run.steps": 2})
    many, later = counted(place, row, nvme, **{**changes, "run.steps": 4})
    return ({k: later[k] - at_first[k] for k in ("h2d_bytes", "d2h_bytes")},
            {k: many.summary[k] - few.summary[k]
             for k in ("up_bytes", "down_bytes", "fetched_bytes")})


@standin
@pytest.mark.parametrize("stage,optimizer,param,ratio", [
    (0, "none", "none", 1), (2, "cpu", "none", 1), (3, "cpu", "cpu", 1),
    (3, "nvme", "nvme", 1), (3, "cpu", "none", 1), (2, "cpu", "none", 0.4),
    (3, "cpu", "cpu", 0.4), (1, "cpu", "none", 0)])
def test_bytes_over_the_bus_are_the_planned_ones(stage, optimizer, param, ratio,
                                                 place, nvme):
    row = {**ROW, "stage": stage, "optimizer": optimizer, "param": param,
           "ratio": ratio}
    real, planned = traffic(place, row, nvme)
    assert real["h2d_bytes"] == planned["up_bytes"]
    assert real["d2h_bytes"] == planned["down_bytes"]


@standin
@pytest.mark.parametrize("comm,stage,optimizer,micro,param,ratio", [
    ("nccl", 3, "cpu", 0, "cpu", 1), ("nccl", 3, "cpu", 0, "cpu", 0.4),
    ("nccl", 3, "cpu", 4, "none", 0.4), ("nccl", 3, "cpu", 4, "cpu", 0),
    ("nccl", 1, "none", 0, "none", 1),
    ("mpi", 3, "cpu", 0, "cpu", 1), ("mpi", 3, "cpu", 4, "cpu", 0.4),
    ("mpi", 3, "cpu", 4, "none", 0.4), ("mpi", 3, "none", 4, "none", 1),
    ("mpi", 2, "cpu", 0, "none", 1), ("mpi", 1, "none", 0, "none", 1),
    ("mpi", 0, "none", 4, "none", 1)])
def test_bytes_of_two_ranks_are_the_planned_ones(comm, stage, optimizer, micro,
                                                 param, ratio, place, nvme):
    """The stand-in counts both, whose shards have the same length."""
    row = {**ROW, "ranks": 2, "comm": comm, "micro": micro, "stage": stage,
           "optimizer": optimizer, "param": param, "ratio": ratio}
    start(place, row, nvme)  # StarPU measures the bus of two GPUs
    real, planned = traffic(place, row, nvme)
    assert real["h2d_bytes"] == 2 * planned["up_bytes"]
    assert real["d2h_bytes"] == 2 * planned["down_bytes"]


@standin
def test_a_links_rate_is_that_of_its_own_copies(place, nvme):
    """The updated parameters of a shard go up; what the host's collectives take
    up and down beside that is not in the seconds of this copy."""
    row = {**ROW, "ranks": 2, "stage": 2, "optimizer": "cpu"}
    r = start(place, row, nvme)
    up, down = (next(x.split() for x in r.out.splitlines()
                     if x.split()[:1] == [link]) for link in ("up", "down"))
    moved = float(up[4]) * r.last("links")["up"]["seconds"]
    shard = 2 * run.parameters(run.MODEL) / 2 / run.MIB
    assert 0.98 < moved / (len(r.steps) * shard) < 1.05, str(r)
    assert float(up[1]) > 3 * moved and down[4] == "-"


def padded(n):
    return -(-n // 64) * 64


@standin
def test_offload_moves_what_the_arithmetic_says(place, nvme):
    """Per step: a ring of 2 keeps what backward begins with, so that every
    block but the last goes up twice; every gradient comes down once."""
    row = {**ROW, "stage": 3, "optimizer": "cpu", "param": "cpu", "ring": 2}
    c, layers = 16, 8
    model = {"layers": layers, "heads": 2, "width": c, "seq": 16, "vocab": 256}
    real, _ = traffic(place, row, nvme, **{"model": model})
    block = padded(12 * c * c + 13 * c) * 2
    embed = padded((256 + 16) * c) * 2
    head = padded(2 * c) * 2
    # embedding and head have slots of their own; of two block slots the last
    # two blocks are still there when backward begins
    up = embed + head + block * (2 * layers - 2)
    down = 2 * embed + head + block * layers  # the tied weight: two uses
    assert real["h2d_bytes"] == 2 * up
    assert real["d2h_bytes"] == 2 * down


def state_elems(r, tier, per_element):
    return r.memory.get(("optimizer", tier), (0, 0))[1] // per_element


def on_gpu(model, ratio, chunk):
    """Elements of each unit that the GPU updates, on one rank."""
    c = model["width"]
    units = [(model["vocab"] + model["seq"]) * c]
    units += [12 * c * c + 13 * c] * model["layers"] + [2 * c]
    want = have = 0
    for n in map(padded, units):
        want += ratio * n
        host = min((min(k * chunk, n) for k in range(-(-n // chunk) + 1)),
                   key=lambda e: (abs(e - (want - have)), e))
        have += host
        yield n - host


@standin
@pytest.mark.parametrize("ratio", (0.4, 0))
@pytest.mark.parametrize("dtype,micro,param", [
    ("bf16", 0, "cpu"), ("bf16", 8, "cpu"), ("bf16", 0, "none"),
    ("fp32", 0, "cpu"), ("fp32", 8, "none")])
def test_the_gradients_of_what_the_gpu_updates_stay_there(dtype, micro, param,
                                                          ratio, place, nvme):
    """Of each element that the GPU updates no gradient comes down and none goes
    up; the new parameter comes down if it lives on the host; if it does not,
    none goes up that would have."""
    chunk, size = 2048, 2 if dtype == "bf16" else 4
    row = {**ROW, "dtype": dtype, "micro": micro, "stage": 3, "ring": 2,
           "optimizer": "cpu", "param": param}
    small = {"zero_optimization.sub_group_size": chunk}
    whole, _ = traffic(place, row, nvme, **small)
    some, planned = traffic(place, {**row, "ratio": ratio}, nvme, **small)
    r = start(place, {**row, "ratio": ratio}, nvme, small)
    apart = list(on_gpu(run.MODEL, ratio, chunk))
    of_host, of_gpu = ((8, 12) if param == "cpu" else (12, 8)) \
        if dtype == "fp32" else (12, 12)
    host = state_elems(r, "cpu", of_host)
    gpu = state_elems(r, "device", of_gpu)
    assert gpu == sum(apart)
    assert abs(host - ratio * (host + gpu)) <= chunk / 2
    assert f"effective ratio {host / (host + gpu):.3f}" in r.out
    uses = gpu + apart[0]  # the embedding's weight has two
    micros = BATCH * 3 // micro if micro else 1
    saved_up, added_down = (0, gpu) if param == "cpu" else (gpu, 0)
    assert whole["h2d_bytes"] - some["h2d_bytes"] == 2 * size * saved_up
    assert whole["d2h_bytes"] - some["d2h_bytes"] == \
        2 * size * (micros * uses - added_down)
    assert some["h2d_bytes"] == planned["up_bytes"]
    assert some["d2h_bytes"] == planned["down_bytes"]
    kept = 4 * uses if micro else size * gpu
    assert r.memory[("gradients", "device")] == (kept, kept)


@standin
def test_breadth_first_divides_the_way_up(place, nvme):
    row = {**ROW, "stage": 3, "optimizer": "cpu", "param": "cpu", "ring": 2,
           "micro": 3}
    model = {"layers": 8, "heads": 2, "width": 32, "seq": 16, "vocab": 256}
    deep, _ = traffic(place, row, nvme, **{"model": model})
    wide, _ = traffic(place, {**row, "schedule": "breadth_first"}, nvme,
                      **{"model": model})
    assert 7 * wide["h2d_bytes"] < deep["h2d_bytes"]


@standin
@pytest.mark.parametrize("schedule, micro, waves, lanes", [
    ("depth_first", 0, 1, 1), ("depth_first", 8, 3, 1),
    ("breadth_first", 8, 1, 3), ("breadth_first", 3, 1, 8)])
def test_boundaries_on_the_host_cross_once_each_way(schedule, micro, waves,
                                                    lanes, place, nvme):
    """All but those that the slots still hold when backward begins, which are
    one for each micro-batch under way and two more."""
    c, layers, seq = 16, 8, 16
    model = {"layers": layers, "heads": 2, "width": c, "seq": seq, "vocab": 256}
    row = {**ROW, "stage": 3, "optimizer": "cpu", "param": "cpu", "ring": 2,
           "micro": micro, "schedule": schedule}
    near, _ = traffic(place, row, nvme, **{"model": model})
    far, planned = traffic(place, {**row, "boundaries": "host"}, nvme,
                           **{"model": model})
    boundary = (micro or BATCH * 3) * seq * c * 4  # fp32 on the stand-in
    moved = waves * ((layers + 1) * lanes - (lanes + 2)) * boundary
    assert far["h2d_bytes"] - near["h2d_bytes"] == 2 * moved
    assert far["d2h_bytes"] - near["d2h_bytes"] == 2 * moved
    assert far["h2d_bytes"] == planned["up_bytes"]
    assert far["d2h_bytes"] == planned["down_bytes"]


@standin
def test_nothing_is_left_and_nothing_was_pageable(place, nvme):
    row = {**ROW, "stage": 3, "optimizer": "cpu", "param": "cpu"}
    _, stats = counted(place, row, nvme)
    assert stats["kernels"] > 0
    assert stats["pageable"] == 0 and stats["leaked_bytes"] == 0


# ---- memory ----

@standin
def test_states_beyond_the_gpu_train_there(place, nvme):
    """Four times as much as the GPU may hold, and the same losses."""
    model = {"layers": 40, "heads": 2, "width": 64, "seq": 16, "vocab": 256}
    small = {"model": model, "run.steps": 2, "train_micro_batch_size_per_gpu": 4}
    row = {**ROW, "dtype": "fp32", "stage": 3, "optimizer": "cpu",
           "param": "cpu", "ring": 2}
    states = 16 * run.parameters(model)
    plain = start(place, {**ROW, "dtype": "fp32"}, nvme,
                  {**small, "run.device": "cpu"})
    r = start(place, row, nvme, small)
    used = sum(have for (name, tier), (_, have) in r.memory.items()
               if tier == "device" and name != "scratch")
    assert 4 * used < states
    assert r.bits == plain.bits and r.hash == plain.hash


@standin
@pytest.mark.parametrize("ranks, comm, c", ((1, "mpi", 16), (1, "mpi", 48),
                                            (2, "nccl", 48)))
def test_gradients_are_staged_only_where_the_host_adds(ranks, comm, c, place,
                                                       nvme):
    """One contribution comes straight down, but of the tied embedding there are
    two, whether it is larger than a block or smaller; of two micro-batches
    every unit has two.  Two buffers, in the type of the wire, or in fp32 where
    ranks were added."""
    model = {"layers": 2, "heads": 2, "width": c, "seq": 16, "vocab": 256}
    row = {**ROW, "ranks": ranks, "comm": comm, "stage": 3, "optimizer": "cpu",
           "param": "cpu"}
    embed = padded((256 + 16) * c)
    block = padded(12 * c * c + 13 * c)
    each = 2 * (2 if ranks == 1 else 4)
    staged = {}
    for micro in (0, 12 // ranks):
        r = start(place, {**row, "micro": micro}, nvme, {"model": model})
        staged[micro] = r.memory[("staging", "cpu")][1]
    bounce = staged[0] - each * padded(embed // ranks)
    assert staged[12 // ranks] == \
        bounce + each * padded(max(embed, block) // ranks)
    assert bounce == 4 * run.MIB


@standin
@pytest.mark.parametrize("schedule, lanes", [("depth_first", 1),
                                             ("breadth_first", 3)])
def test_boundaries_on_the_host_are_not_on_the_gpu(schedule, lanes, place,
                                                   nvme):
    """Deep and narrow, so that boundaries are most of it: a GPU that holds them
    only as they pass.  Evaluation and text pass through the same slots."""
    c, layers, seq, micro = 32, 60, 16, 8
    row = {**ROW, "stage": 3, "optimizer": "cpu", "param": "cpu", "ring": 2,
           "micro": micro, "schedule": schedule}
    small = {"model": {"layers": layers, "heads": 2, "width": c, "seq": seq,
                       "vocab": 256},
             "run.eval_batches": 2, "run.eval_interval": 1,
             "run.sample_tokens": 4, "run.sample_prompt": "In"}
    near = start(place, row, nvme, small)
    far = start(place, {**row, "boundaries": "host"}, nvme, small)
    one = micro * seq * c * 4  # fp32 on the stand-in
    for r, device, cpu in ((near, lanes * (layers + 2), 0),
                           (far, 2 * lanes + 2, lanes * layers)):
        held = {tier: have for (name, tier), (_, have) in r.memory.items()
                if name == "boundaries" and have}
        assert held == {t: n * one for t, n in (("device", device),
                                                ("cpu", cpu)) if n}, str(r)
    assert far.bits == near.bits and far.hash == near.hash
    assert run.sampled(far) == run.sampled(near)
    limit = sum(have for (_, tier), (_, have) in far.memory.items()
                if tier == "device")
    tight = {**small, "run.device_memory_limit_bytes": limit}
    start(place, {**row, "boundaries": "host"}, nvme, tight)
    r = place.launch(None, {**config_of(row, nvme), **tight},
                     env=environment(place, row))
    run.refused(r, "MiB of the GPU's memory")
    assert "cpu_checkpointing=true" in r.err


@standin
@pytest.mark.parametrize("param", ("none", "cpu"))
def test_a_skipped_step_changes_nothing_on_either_side(param, place, nvme):
    row = {**ROW, "dtype": "fp16", "stage": 3, "optimizer": "cpu",
           "param": param, "ratio": 0.5}
    high = {"fp16.initial_scale_power": 22, "fp16.hysteresis": 1,
            "zero_optimization.sub_group_size": 2048, "run.steps": 8}
    r = start(place, row, nvme, high)
    plain = start(place, {**row, **PLAIN}, nvme, {**high, "run.device": "cpu"})
    skipped = [x["skipped"] for x in r.steps]
    assert True in skipped and False in skipped
    assert r.bits == plain.bits and r.hash == plain.hash


@standin
def test_a_ratio_needs_a_gpu(place, nvme):
    row = {**ROW, "stage": 3, "optimizer": "cpu", "ratio": 0.5}
    r = place.launch(None, {**config_of(row, nvme), "run.device": "auto"},
                     env={**environment(place, row), "STARPU_NCUDA": "0"})
    run.refused(r, "zero_optimization.offload_optimizer.ratio: 0.5", "a GPU")
