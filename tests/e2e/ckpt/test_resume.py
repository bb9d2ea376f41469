# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what another number of ranks saved has its weights, and what is stopped
goes on.  That a run that goes on at any place has the bits of one that never stopped
is in tests/e2e/step/test_matrix.py."""
import itertools
import math
import os
import pathlib
import re
import resource
import shutil
import signal
import struct
import subprocess
import time

import pytest

import rows
import run
from inputs import TOKENS, shard

NONE, NEAR, NVME = (0, "none", "none"), (3, "none", "none"), (3, "nvme", "nvme")


def config(ranks):
    return {"train_batch_size": 12, "run.save": True,
            "gradient_accumulation_steps": 2,
            "train_micro_batch_size_per_gpu": 6 // ranks, "run.steps": 6,
            "scheduler": {"type": "WarmupCosineLR",
                          "params": {"warmup_num_steps": 2,
                                     "total_num_steps": 8}}}


# ---- other ranks ----

PLACES = [NONE, NVME, (1, "cpu", "none"), (3, "none", "none"), (2, "nvme", "none"),
          (3, "cpu", "cpu")]
ALL = list(itertools.permutations((1, 2, 3, 4), 2))
# Of plain states every number of ranks saves and loads.
PLAIN = [("gpt2", (1, 4)), ("gpt2", (4, 2)), ("gpt2", (2, 3)), ("gpt2", (3, 1)),
         ("all of llama", (2, 4)), ("units of experts", (2, 3))]
if run.FULL:
    PLAIN = list(itertools.product(sorted({m for m, _ in PLAIN}), ALL))
ADAM, MUON = "adam: master, m, v  {", rows.UPDATES["muon"]
GROUPS = {"model.width": 66, "model.layers": 3}  # of codes: several in a matrix
# Settings beside, those of the run that goes on, and what is listed of the states.
OTHER = [
    ((3, 1), {**rows.UPDATES["lion"], "run.state_dtype": "fp8"}, {}, "lion: master, m  {"),
    ((2, 1), {"run.state_dtype": "fp8"}, {"run.state_dtype": "bf16"}, ADAM),
    ((4, 1), {**MUON, "zero_optimization.sub_group_size": 2048}, {}, "muon: master, m, v  {"),
    ((1, 3), {**MUON, "run.state_dtype": "fp8"}, {}, "muon: master, m, v  {"),
    ((2, 3), rows.TUNED["top"], {}, ADAM),
    ((2, 3), {**rows.TUNED["nf4"], **GROUPS}, {}, "adam: master, m, v, nf4  {"),
    ((3, 2), {**rows.TUNED["int8"], **GROUPS}, {}, "adam: master, m, v, int8  {"),
    ((2, 4), {}, {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, ADAM)]


@pytest.mark.parametrize("model, pair, beside, then, listed", [
    *((*x, {}, {}, ADAM) for x in PLAIN), *(("gpt2", *x) for x in OTHER)], ids=str)
def test_saved_by_some_ranks_and_loaded_by_others(model, pair, beside, then, listed,
                                                  place, nvme):
    """All weights arrive bit for bit, at another stage and home too.  What follows
    has the numbers of a run that never stopped up to the order of sums, which m and v
    decide."""
    rows.use(place, model)
    (saved_by, loaded_by), case = pair, ALL.index(pair)
    dtype = ("fp32", "bf16")[case % 2]

    def settings(ranks):
        home = PLACES[(case + ranks) % len(PLACES)]
        return {"train_batch_size": 12, "run.save": True, "run.workers": 1,
                # of which experts' balance is
                "train_micro_batch_size_per_gpu": 1 if "experts" in model else
                3 if ranks == 4 else 2,
                "run.steps": 6, "run.eval_batches": 2,
                **run.offload(*home, nvme), **run.typed(dtype), **beside}
    whole = place.good(saved_by, {**settings(saved_by), "run.save_interval": 3,
                                  "run.keep_last": 2})
    lines = run.ckpt("list", whole.output).out.splitlines()
    assert len(lines) == 2 and all(f" MiB  {listed}" in x for x in lines)
    others = {**settings(loaded_by), **then}
    still = place.good(loaded_by, others, ["--resume"], output=whole.output)
    assert still.hash == whole.hash and "nothing left to train" in still.out
    first, again = still.validation
    assert again == pytest.approx(first, rel=2e-7)
    shutil.rmtree(whole.output / "checkpoints/step-00000006")
    more = place.good(loaded_by, others, ["--resume"], output=whole.output)
    was, now = ([x for x in r.steps if x["step"] > 3][-3:] for r in (whole, more))
    assert [x["step"] for x in was] == [x["step"] for x in now] == [4, 5, 6]
    rows.near(was, now, *((1e-5, 1e-5) if dtype == "fp32" else (5e-3, 5e-2)))


@pytest.mark.parametrize("dtype, error", (("bf16", 5e-4), ("fp8", 1e-2)))
def test_states_of_fp32_are_rounded_without_bias(dtype, error, place):
    """The next checkpoint has nearly the sums of one that stayed in fp32."""
    still = {"optimizer.params.lr": 0, "run.save": True}
    out = place.good(1, {**still, "run.steps": 2}).output
    place.good(1, {**still, "run.steps": 3, "run.state_dtype": dtype}, ["--resume"], out)
    whole = place.good(1, {**still, "run.steps": 3}).output
    for array in "mv":
        was, now = (sum(abs(x) for name, data in run.arrays(o, 3).items()
                        if name.endswith(f"/{array}")
                        for x, in struct.iter_unpack("<f", data)) for o in (whole, out))
        assert math.isclose(now, was, rel_tol=error), array


def test_what_is_on_disk_is_written_once_for_each_array(place, nvme):
    """A chunk of a wide block ends within a block of the checkpoint."""
    settings = {**run.offload(*NVME, nvme), "model.width": 384, "model.layers": 1,
                "run.save": True}
    out = place.good(1, settings).output
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_oublock
    r = place.good(1, {**settings, "run.steps": 4}, ["--resume"], out)
    written = 512 * (resource.getrusage(resource.RUSAGE_CHILDREN).ru_oublock - before)
    # m and v lie together: each load writes both; then a step, then a checkpoint
    arrays = 1 + 2 * 2 + 3 + 3
    assert written < 1.05 * arrays * 4 * run.parameters(r.config["model"])


STAGE = "zero_optimization.stage"
ORDER = {"run.sum_order": "auto", "gradient_accumulation_steps": 2}
HOSTS = {"LD_PRELOAD": f"{run.BUILD}/tests/libhosts.so", "HOSTS": "aabb"}


@pytest.mark.parametrize("ranks, key, value, first, then, lost, words", (
    (1, "run.slices", 2, {"run.slices": 0, "run.workers": 2}, {"run.workers": 1}, {}, ()),
    (2, "run.sum_order", "local_first", {**ORDER, STAGE: 1},
     {STAGE: 3, "run.schedule": "breadth_first"},
     {"run.schedule": "depth_first"}, ("in stage 3", "breadth_first")),
    (2, "run.sum_order", "ranks_first", {**ORDER, STAGE: 3}, {STAGE: 1}, {}, ()),
    (4, "run.sum_group", 2, {**ORDER, STAGE: 1, **HOSTS},
     {"HOSTS": "aaaa"}, {}, ())))
def test_a_resumed_run_keeps_what_it_began_with(ranks, key, value, first, then, lost,
                                                words, kept, place):
    """Where it would choose something else now, or be refused."""
    first = {"train_batch_size": 16, **first}
    kept(ranks, key, value, first, then, lost, words)
    if not lost:
        assert place.good(ranks, {**first, **then}).config["run"][key[4:]] != value


def test_other_ranks_choose_their_order_of_sums(place):
    """At stage 3 they cannot have what a single rank began with."""
    c = {"train_batch_size": 16, **ORDER, STAGE: 1, "run.save": True}
    one = place.good(1, c)
    assert one.config["run"]["sum_order"] == "local_first"
    r = place.good(2, {**c, STAGE: 3, "run.steps": 4}, ["--resume"], one.output)
    assert r.config["run"]["sum_order"] == "ranks_first"


# ---- signals ----

# Tasks are delayed by up to 3 ms: some steps a second, on any machine.
SLOW = {"run.inject_delay_us": 3000, "run.steps": 10**6}


# Of ranks, or of mpirun, which hands it on: what batch systems can send, as Slurm by
# --signal=B:USR1@300 to the shell of a job, in whose place mpirun is.
@pytest.mark.parametrize("ranks, to, number", [
    (1, "all", signal.SIGINT), (2, "all", signal.SIGTERM), (2, "one", signal.SIGUSR1),
    (1, "all", signal.SIGHUP), (1, "all", signal.SIGUSR2), (1, "all", signal.SIGXCPU),
    (2, "mpirun", signal.SIGUSR1),
    (1, "twice", signal.SIGTERM)])  # as Slurm at a job's time limit: they count once
def test_signal_saves_and_resume_goes_on(ranks, to, number, place):
    """One rank tells the others by the step's scalars."""
    c = {**config(ranks), **run.offload(*NEAR, None), **run.typed("bf16")}
    if number == signal.SIGHUP:  # which those who start tests may have ignored
        place.wrap('#!/bin/sh\nexec env --default-signal=HUP {} "$@"\n')
    run_ = place.start(ranks, {**c, **SLOW}, output=place.folder / "stopped")
    run_.until_step(2)
    for _ in range(2 if to == "twice" else 1):
        if to == "mpirun":
            run_.process.send_signal(number)
        else:
            run_.signal(number, 1 if to == "one" else None)
    r = run_.finish()
    assert r.rc == 0, str(r)
    assert "izar: finishing the step;" in r.err
    assert "interrupted: continue with the same command and --resume" in r.out
    assert not run.DUMPS.search(r.out + r.err), str(r)
    assert r.summary["reason"] == "interrupted"
    stop = r.summary["steps"]
    assert r.saved == [stop] and 2 <= stop == len(r.steps)
    more = {**c, "run.steps": stop + 2}
    want = place.good(ranks, more)
    assert place.good(ranks, more, ["--resume"], output=r.output).numbers == want.numbers


def catches(pid, number):
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"^SigCgt:\t(\w+)$", text, re.M)[1]
    return int(caught, 16) >> number - 1 & 1


@pytest.mark.parametrize("number, rc, saves", (
    (signal.SIGTERM, 128 + signal.SIGTERM, False),  # at once: a whole step would be saved
    (signal.SIGUSR1, 0, True)))  # the end is near, however often this is said
def test_a_second_signal(number, rc, saves, place):
    """In steps of seconds, longer than two signals are one."""
    run_ = place.start(1, {**config(1), "run.inject_delay_us": 150000, "run.workers": 1,
                           "model.layers": 3, "run.steps": 10**6})
    run_.until(lambda: catches(run_.process.pid, signal.SIGTERM), "the handlers")
    run_.signal(number)
    run_.until(lambda: "stops at once" in run_.text(1), "the message")
    while run_.process.poll() is None:  # those of two seconds count as one
        run_.signal(number)
        time.sleep(0.2)
    r = run_.finish()
    assert r.rc == rc and bool(r.saved) == saves, str(r)
    assert not saves or r.summary["reason"] == "interrupted"


def test_a_warning_before_step_0(tmp_path):
    """Its config never comes."""
    os.mkfifo(tmp_path / "config")
    p = subprocess.Popen([run.PROGRAM, str(tmp_path / "config")], text=True,
                         stderr=subprocess.PIPE, env=run.environment())
    while p.poll() is None and not catches(p.pid, signal.SIGUSR1):
        time.sleep(0.01)
    p.send_signal(signal.SIGUSR1)
    err = p.communicate(timeout=run.TIMEOUT_S)[1]
    assert p.returncode == 128 + signal.SIGUSR1 and "nothing to save" in err


@pytest.mark.parametrize("taken", (False, True))
def test_a_hangup_that_nohup_ignores(taken, place):
    """Also where a library takes the signal before the program begins."""
    preload = f"LD_PRELOAD={run.built('tests/libtaker.so')}" if taken else ""
    place.wrap(f'#!/bin/sh\nexec nohup env {preload} {{}} "$@"\n')
    run_ = place.start(1, {**config(1), **SLOW})
    run_.until_step(1)
    run_.signal(signal.SIGHUP)
    run_.until_step(run_.step() + 10)
    run_.kill()


def test_a_signal_cuts_a_validation(place):
    """Which may take longer than a batch system leaves: it tells of fewer samples."""
    c = {**config(2), "run.steps": 10**6, "run.eval_interval": 1, "run.in_flight": 1,
         "run.eval_batches": 10**6, "data": {
             "path": str(shard(place.folder / "train.bin", TOKENS)),
             "val_path": str(shard(place.folder / "val.bin", TOKENS * 40)),
             "bytes": False}}
    run_ = place.start(2, c)
    run_.until_step(1)
    run_.signal(signal.SIGUSR1)
    r = run_.finish()
    assert r.rc == 0 and r.saved == [len(r.steps)], str(r)
    last = [x for x in r.lines if "validation_loss" in x][-1]
    seq = run.MODEL["seq"]
    assert last["samples"] < len(TOKENS) * 40 // seq - 12
    assert last["targets"] == last["samples"] * seq
    assert last["validation_loss"] == pytest.approx(math.log(256), rel=0.1)


# ---- refusals ----

def test_output_with_a_checkpoint_is_not_written_over(place):
    out = place.folder / "taken"
    c = {**config(1), "run.steps": 2}
    place.good(1, c, output=out)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    r = place.launch(1, c, output=out)
    run.refused(r, "run.output", str(out), "--resume", "step 2")
    assert before == {p: p.stat().st_mtime_ns for p in before}


def test_damaged_checkpoint_is_named(place):
    """Other damage is in tests/runtime/ckpt/test_damage.c."""
    c = {**config(2), "run.steps": 2}
    out = place.good(2, c).output
    file = sorted((out / "checkpoints").rglob("*.safetensors"))[-1]
    data = file.read_bytes()
    file.write_bytes(data[:-40] + bytes([data[-40] ^ 16]) + data[-39:])
    before = (out / "config.json").read_text(), (out / "metrics.jsonl").read_text()
    r = place.launch(2, {**c, "run.steps": 4}, ["--resume"], output=out)
    run.refused(r, "checkpoint", file.name, everyone=True)
    # nothing was trained on it, and nothing written
    assert before == tuple((out / x).read_text() for x in ("config.json", "metrics.jsonl"))
