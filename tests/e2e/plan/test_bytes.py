# SPDX-License-Identifier: Apache-2.0
"""Bytes: what the plan says, what is allocated, what is resident and what is
fetched.  (That planned and allocated bytes are equal class by class is checked
at the end of every successful run of these tests: Place.good.)"""
import json
import os
import re

import pytest

import rows
import run
from inputs import described
from run import GPT2, planned

# ---- the table of the ZeRO paper ----

PAPER = {0: lambda n: 16, 1: lambda n: 4 + 12 / n, 2: lambda n: 2 + 14 / n,
         3: lambda n: 16 / n}
STATES = ("parameters", "gradients", "optimizer")


def big(**more):
    """In memory that is soon filled: a plan looks for the most blocks that fit."""
    return {"train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1, "train_batch_size": "auto",
            "bf16.enabled": True, "model": GPT2, "run.workers": 1,
            "run.memory_limit_bytes": 10**10, **more}


N, MATRICES = run.parameters(GPT2), 12 * GPT2["width"] ** 2 * GPT2["layers"]
MUON, FP8 = rows.UPDATES["muon"], 65 / 64  # bytes of a state
# Ranks, stage, home, settings, bytes of which classes on all ranks.  A remainder has two
# bytes of four, matrices of Muon have no v.
PLANNED = [
    (4, 1, "none", {"run.master": "remainder"}, ("optimizer",), 10 * N),
    (4, 1, "nvme", MUON, ("optimizer",), 12 * N - 4 * MATRICES),
    *((ranks, 1, home, {**MUON, "run.state_dtype": "fp8"}, ("optimizer",),
       (4 + 2 * FP8) * N - FP8 * MATRICES) for ranks, home in ((4, "none"), (1, "nvme"))),
    *((4, 3, home, {}, STATES, 16 * N) for home in ("none", "cpu", "nvme"))]


@pytest.mark.parametrize("ranks, stage, home, more, classes, want", PLANNED)
def test_states_have_the_bytes_of_the_arithmetic(ranks, stage, home, more, classes, want,
                                                 place, nvme):
    """A file holds whole chunks: less than one of each unit's 54 is waste."""
    zero = run.offload(stage, home, home if stage == 3 else "none", nvme)
    zero["zero_optimization"]["sub_group_size"] = 32768
    r = place.good(1, big(**{**zero, **more}), ["--plan", "--ranks", ranks])
    assert not r.output.exists() and planned(r.out, classes) == pytest.approx(
        want / ranks, rel=3e-2 if home == "nvme" else 1e-3)


@pytest.mark.parametrize("stage", PAPER)
def test_a_run_allocates_the_papers_bytes(stage, place):
    model = {**run.MODEL, "width": 96, "layers": 3}
    r = place.good(2, {"bf16.enabled": True, "model": model,
                       "train_batch_size": 2, "run.steps": 1,
                       "zero_optimization.stage": stage})
    per = r.bytes_of(*STATES) / run.parameters(model)
    assert per == pytest.approx(PAPER[stage](2), rel=5e-3)


# ---- a machine that is described ----

def test_ranks_that_only_describe_a_machine_measure_no_collectives(tmp_path):
    r = run.call(*run.MPIRUN, "-np", 2, run.built("tools/calibrate"), "--describe",
                 tmp_path / "m.json")
    assert r.rc == 0, str(r)
    assert json.loads((tmp_path / "m.json").read_text())["sources"] == {
        "all rates": "assumptions"}


@pytest.mark.parametrize("args, rc, words", [
    (("/dev/full",), 1, "/dev/full: cannot write: No space left"),
    (("m.json", "/nowhere"), 1, "/nowhere: cannot be measured: No such file"),
    (("m.json", ".", "more"), 2, "usage: "), (("m.json", "--describe"), 2, "usage: ")])
def test_what_cannot_be_described_is_refused(args, rc, words, tmp_path):
    r = run.call(run.built("tools/calibrate"), "--describe", *args, cwd=tmp_path)
    assert r.rc == rc and words in r.err and not list(tmp_path.iterdir()), str(r)


def test_a_description_of_this_machine_is_what_a_run_finds(place):
    path, machine = described(place)
    assert 1 <= machine["cores"] <= len(os.sched_getaffinity(0))
    assert machine["disk_bytes"] > 0 and machine["gpus"] == 0
    here = place.launch(1, big(**{"run.memory_limit_bytes": 0}), ["--plan"])
    there = place.launch(1, big(), ["--plan", "--machine", path])
    assert planned(here.out, STATES) == planned(there.out, STATES)
    # What is free changes while others run; what there is does not.
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < machine["host_bytes"] <= total


def test_ranks_share_a_machine_without_a_network(there):
    for ranks, own, said in ((1, 0, None), (8, 0, "there are 1000.0 MiB"),
                             (8, 10**11, None), (1, 600 * run.MIB, "there are 600.0 MiB")):
        r = there({"host_bytes": 8 * 1000 * run.MIB}, {
            "zero_optimization.stage": 0, "run.memory_limit_bytes": own}, "--ranks", ranks)
        assert (r.rc == 0) == (said is None) and (not said or said in r.err), str(r)


GPU = {"gpus": 2, "gpu_bytes": 10**10}
SIZES = dict.fromkeys(("peer_bytes_per_s", "gpu_bytes_per_s", "up_bytes_per_s",
                       "down_bytes_per_s"), 10**10)


@pytest.fixture(scope="module")
def here(shared):
    return described(shared)[1]


@pytest.fixture
def there(here, place):
    """The plan of a config for a machine like this one, with other figures."""
    def there(changes, config, *options):
        path = place.folder / "machine.json"
        path.write_text(json.dumps({**here, **changes}))
        return place.launch(1, big(**config), ["--plan", "--machine", path, *options])
    return there


@pytest.mark.parametrize("changes, config, words", [
    (GPU, {"run.slices": 2, "train_micro_batch_size_per_gpu": 2}, ["run.slices"]),
    (GPU, {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
     ["offload the optimizer too"]),
    (GPU, {"run.state_dtype": "bf16", "run.save_mode": "async"}, ["run.save_mode: async"]),
    ({}, {"run.device": "cuda"}, ["run.device: cuda: ", "has no GPU"]),
    ({"gpus": 1 << 21}, {}, ["gpus: ", "0 to 1048576, found 2097152"]),
    ({"disk_bytes": -1}, {}, ["disk_bytes: ", "found -1 (an integer)"]),
    ({**GPU, "fp32_flops_per_s": 1}, {}, ["bf16.enabled: the GPUs of"])])
def test_what_no_run_there_would_take_is_refused(changes, config, words, there):
    run.refused(there(changes, {"run.slices": 0, **config}), *words)


def test_a_gpu_without_rates_has_a_plan_and_no_prediction(there):
    """As tools/plan --this-machine describes it; and where one rate is missing."""
    rates = {**GPU, **SIZES, "bf16_flops_per_s": 10**12}
    for more, ranks, known in ((GPU, 1, False), (rates, 1, True), (rates, 2, True),
                               *(({**rates, name: 0}, 2, False) for name in SIZES)):
        r = there(more, {"run.slices": 0}, "--ranks", ranks)
        assert r.rc == 0 and ("predicted: a step" in r.out) == known, f"{more} {r}"


def test_a_plan_for_another_machine_is_that_of_the_config(there):
    """Where units are computed, by how many workers, and how GPUs talk."""
    table = {}
    for name, more in (("gpu", {}), ("cpu", {"run.device": "cpu"}), ("mpi", {"run.comm": "mpi"})):
        r = there(GPU, {"run.workers": 3, "run.slices": 0, **more}, "--ranks", 2)
        assert r.rc == 0 and "; 3 workers; " in r.out, str(r)
        table[name] = dict(re.findall(r"^  ([a-z ]+?)  +(.*)$", r.out, re.M))
    assert "staging" in table["gpu"] and "staging" not in table["cpu"]
    collectives = {k: table[k]["collectives"].split() for k in ("gpu", "mpi")}
    assert collectives["gpu"][1] == collectives["mpi"][0] == "0.00"


def share(text):
    """(ranks, MiB of each) as --plan says it, or None."""
    found = re.search(r"^(\d+) ranks share .* this host: ([\d.]+) MiB each",
                      text, re.M)
    return found and (int(found[1]), float(found[2]))


def test_files_that_a_described_disk_has_no_room_for_are_told(there, nvme):
    for home in ("none", "nvme"):
        r = there({"disk_bytes": run.MIB // 10},
                  {"model": run.MODEL, **run.offload(3, home, "none", nvme)})
        assert r.rc == 0 and ("has 0.1 MiB" in r.err) == (home == "nvme"), str(r)


def test_ranks_of_a_plan_share_this_machine(place):
    """As those of a run would: the same table, and memory for each."""
    c = big(**{"run.memory_limit_bytes": 0, "run.workers": 0,
               "model": {**run.MODEL, "width": 384}})
    alone = place.launch(1, c, ["--plan"])
    assert alone.rc == 0 and share(alone.out) is None, str(alone)
    said = place.launch(1, c, ["--plan", "--ranks", 2])
    started = place.launch(2, c, ["--plan"])
    assert planned(said.out, STATES) == planned(started.out, STATES)
    assert said.out.splitlines()[:12] == started.out.splitlines()[:12]
    both = place.launch(2, c, ["--plan", "--ranks", 6])
    # What is free changes while others run.
    free = share(said.out)[1] * 2
    for ranks, r in ((2, said), (2, started), (6, both)):
        assert share(r.out)[0] == ranks, str(r)
        assert share(r.out)[1] * ranks == pytest.approx(free, rel=0.5)


def test_ranks_of_a_plan_cut_a_step_as_their_run_does(place):
    """Slices are of the whole batch."""
    c = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto", "model.seq": 64,
         "run.workers": 4, "run.slices": 0, "run.memory_limit_bytes": 2 * run.MIB}
    for ranks, more in ((1, ["--ranks", 2]), (2, [])):
        r = place.launch(ranks, c, ["--plan", *more])
        assert "8 micro-batches a step, 1 at a time, 4 slices of 1 sample" in r.out, str(r)


def test_ranks_of_a_plan_that_fill_this_machine_are_refused(place):
    """What one rank has room for; at stage 0, as much for each of many."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    many = int(free / (16 * run.parameters(GPT2))) + 1
    c = big(**{"run.memory_limit_bytes": 0})
    assert place.launch(1, c, ["--plan"]).rc == 0
    r = place.launch(1, c, ["--plan", "--ranks", many])
    run.refused(r, "this run needs", "MiB of memory per rank")
    assert share(r.out)[0] == many
    r = place.launch(1, {**c, "run.memory_limit_bytes": 10**15},
                     ["--plan", "--ranks", many])
    assert r.rc == 0 and share(r.out) is None, str(r)


# ---- resident memory ----

# What a rank occupies before its first tensor: libraries (OpenBLAS has a buffer
# per thread), StarPU, MPI, the log of tasks.  Measured 207-221 MiB with an
# almost empty model, of 1 to 4 workers, alone and on 4 ranks.
CONSTANT_MIB = 280
EMPTY = {"layers": 1, "heads": 1, "width": 8, "seq": 8, "vocab": 256}
LARGE = {"layers": 8, "heads": 8, "width": 512, "seq": 16, "vocab": 256}


@pytest.mark.parametrize("ranks, home, dtype", [
    (1, (0, "none", "none"), "fp32"), (1, (3, "nvme", "nvme"), "fp32"),
    (2, (1, "none", "none"), "bf16"), (2, (3, "cpu", "cpu"), "fp16")])
def test_resident_memory_is_the_plan(ranks, home, dtype, place, known, nvme):
    r = place.good(ranks, {"model": LARGE, "run.steps": 2, **run.typed(dtype),
                           **run.offload(*home, nvme)})
    empty = known(ranks, {"model": EMPTY, "run.steps": 1})
    plan, constant = r.bytes_in("device", "cpu"), empty.summary["peak_resident_bytes"]
    grown = r.summary["peak_resident_bytes"] - constant
    assert empty.bytes_in("device", "cpu") < run.MIB and constant < CONSTANT_MIB * run.MIB
    assert plan > 200 * run.MIB  # so that a tenth of it means something
    assert 0.9 * plan <= grown <= 1.1 * plan, f"{plan} {grown}\n{r}"
    assert r.summary["peak_resident_bytes"] <= \
        1.1 * plan + CONSTANT_MIB * run.MIB


def beside(r):
    """MiB that --plan says a rank has beside its plan."""
    return float(re.search(r"a rank needs ([\d.]+) MiB of them beside its plan", r.out)[1])


def test_starpus_state_of_many_chunks_is_counted(place):
    """Within the 2.5 MiB by which equal runs differ, and with huge pages."""
    model = {**LARGE, "layers": 40, "width": 256}
    said, peak = [], []
    for chunk in (10**6, 65536):
        c = {"model": model, "run.steps": 1, "zero_optimization.stage": 1,
             "zero_optimization.sub_group_size": chunk}
        said.append(beside(place.launch(1, c, ["--plan"])))
        peak.append(place.good(1, c).summary["peak_resident_bytes"] / run.MIB)
    assert said[1] - said[0] > 20
    assert peak[1] - peak[0] < said[1] - said[0] + 10, (said, peak)


# ---- parameter traffic ----

# An embedding that is too large for the blocks' ring has a buffer of its own.
MODEL = {**run.MODEL, "vocab": 512}
LAYERS, STEPS, G = MODEL["layers"], 3, 4


def trained(place, ranks, nvme=None, home="none", param="none", stage=3, **more):
    """Of G micro-batches a step, one after the other."""
    return place.good(ranks, run.merge({
        "model": MODEL, "train_batch_size": G * ranks, "run.steps": STEPS,
        "train_micro_batch_size_per_gpu": 1, "run.parallel_micro_batches": 1,
        "run.sum_order": "ranks_first", **run.offload(stage, home, param, nvme)}, more))


# What a pass fetches: without reuse what it uses, the embedding three times (it is the
# head's weight too), blocks twice, the head once.  At the turn of a pass, and between two,
# a full ring is used again: one that holds all fetches once a step.  A kept copy is
# gathered once a step.  Nothing is fetched that is there, on a CPU in the cpu tier too.
@pytest.mark.parametrize("ranks, stage, schedule, ring, reuse, dtype", [
    *((ranks, 3, schedule, ring, 0, dtype) for schedule in ("breadth_first", "depth_first")
      for ranks, dtype, ring in ((2, "bf16", 1), (2, "fp32", LAYERS), (3, "fp32", 3))),
    *((2, 3, schedule, ring, 10**9, "fp32") for schedule in ("breadth_first", "depth_first")
      for ring in (1, 3, LAYERS)),
    (2, 1, "depth_first", 1, 0, "fp32"), (2, 2, "depth_first", 1, 0, "fp32"),
    (1, 1, "depth_first", 1, 0, "fp32"), (1, 3, "depth_first", 1, 0, "fp32")])
def test_a_ring_fetches_what_it_does_not_hold(ranks, stage, schedule, ring, reuse, dtype, place):
    embed, block, *_, head = run.units(MODEL, ranks)
    passes = G if schedule == "depth_first" else 1
    if stage < 3:
        elems = embed + LAYERS * block + head
    elif reuse:
        elems = embed + (LAYERS + (2 * passes - 1) * (LAYERS - ring)) * block + head
    else:
        elems = passes * (3 * embed + 2 * LAYERS * block + head)
    r = trained(place, ranks, stage=stage, param="cpu" if stage == 3 else "none", **{
        "zero_optimization.stage3_max_reuse_distance": reuse, "run.schedule": schedule,
        "run.ring": ring, **run.typed(dtype)})
    size = 2 if dtype == "bf16" else 4
    assert r.summary["fetched_bytes"] == (ranks > 1) * STEPS * size * elems, str(r)
    assert ranks > 1 or r.summary["sent_bytes"] == 0


# ---- gradient traffic ----

@pytest.mark.parametrize("ranks, stage, schedule, home, dtype", [
    (2, 0, "depth_first", "none", "fp32"), (3, 1, "depth_first", "none", "bf16"),
    (2, 1, "breadth_first", "cpu", "fp32"), (2, 2, "depth_first", "nvme", "fp32"),
    (2, 2, "breadth_first", "none", "bf16"), (3, 3, "breadth_first", "none", "fp32"),
    (2, 3, "breadth_first", "nvme", "bf16")])
def test_local_sums_are_sent_once_a_step(ranks, stage, schedule, home, dtype, place,
                                         nvme):
    """The embedding twice, as it is the head's weight too."""
    embed, block, *_, head = run.units(MODEL, ranks)
    once = STEPS * (2 * embed + LAYERS * block + head) * \
        (4 if dtype == "fp32" else 2) * (ranks - 1) // ranks
    sent = {}
    for order in ("local_first", "ranks_first"):
        r = trained(place, ranks, nvme, home, home if stage == 3 else "none", stage, **{
            "run.sum_order": order, "run.schedule": schedule, **run.typed(dtype)})
        sent[order] = r.summary["sent_bytes"]
    assert sent["ranks_first"] - sent["local_first"] == (G - 1) * once
    assert sent["local_first"] > once


def test_a_local_sum_takes_what_is_planned(place):
    """A whole accumulator for all micro-batches of a step; or two of the ring's
    and one of each other unit's for those that come together."""
    embed, block, *_, head = run.units(MODEL, 2)
    whole = 2 * embed + LAYERS * block + head
    ring = embed + 2 * block + head
    for stage, schedule, want in ((2, "depth_first", whole // 2),
                                  (3, "breadth_first", ring)):
        r = {order: trained(place, 2, stage=stage, **{
            "run.sum_order": order, "run.schedule": schedule, "run.steps": 1}).bytes_of(
                "gradients", "unit gradients") for order in ("local_first", "ranks_first")}
        assert r["local_first"] - r["ranks_first"] == 4 * want, schedule
