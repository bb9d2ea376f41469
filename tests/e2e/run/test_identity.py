# SPDX-License-Identifier: Apache-2.0
"""One run is one run: on all its ranks, and after every resume.  What differs is
refused before anything is written, or told with both values."""
import shutil

import pytest

import rows
import run
from inputs import TOKENS, masked, shard

CONFIG = {"train_batch_size": 2, "run.save": True, "run.steps": 2,
          "run.cpu_kernels": "auto", "run.comm_timeout_s": 30}


# ---- ranks ----

def of_two(place, *second, program=run.PROGRAM, config=None, **changes):
    """A rank as it should be, and another one with settings, options or, in capitals,
    variables."""
    own = place.config({**CONFIG, **changes})
    before = ["env", *(x for x in second if x[0].isupper())]
    options = [y for x in second if x not in before
               for y in ([x] if x.startswith("--") else ["--set", x])]
    r = run.call(*run.apart([run.PROGRAM, own],
                            [*before, program, config or own, *options]),
                 output=place.folder / f"out{place.count}")
    assert "waited" not in r.err, str(r)
    return r


@pytest.mark.parametrize("second, words", [
    # what trains in silence, and what never ends: of another number of tasks, in
    # another order, to another end
    ("optimizer.params.lr=1", ("optimizer.params.lr: 0.003 on", ", 1.0 on")),
    ("zero_optimization.stage=3", ("zero_optimization.stage: 0 on", ", 3 on")),
    ("run.schedule=breadth_first", ("run.schedule: ", '"breadth_first" on')),
    ("run.save=false", ("run.save: true on", ", false on")),
    ("model.layers=3", ("model.layers: 5 on", ", 3 on")),
    ("scheduler.type=WarmupLR",
     ("scheduler.params.warmup_num_steps: nothing on", ", 1000 on")),
    ('parameters=[{"match": "*", "weight_decay": 0}]',
     ("parameters: [] on", '"weight_decay": 0.0')),
    ("--resume", ("--resume: false on", ", true on")),
    ("--plan", ("--plan: false on", ", true on")),
    ("IZ_SIMD=portable", ('env.IZ_SIMD: nothing on', ', "portable" on')),
    ("OPENBLAS_CORETYPE=Prescott", ("env.OPENBLAS_CORETYPE: nothing on",))])
def test_ranks_with_other_settings_or_kernels_are_refused(second, words, place):
    r = of_two(place, second)
    run.refused(r, *words, "rank 0", "rank 1: all ranks of a run need the same")
    assert not r.output.exists()


def test_ranks_of_other_programs_are_refused(place):
    r = of_two(place, "model.preset=tiny", program=run.built("models/llama"))
    run.refused(r, "program: gpt2 on rank 0, llama on rank 1")


def test_a_rank_that_cannot_read_its_config_says_why(place):
    """And the others say whose fault it is."""
    r = of_two(place, config=place.folder / "none.json")
    run.refused(r, "none.json: cannot be read: No such file")
    run.refused(r, "the other ranks end with rank 1, which says why")
    r = of_two(place, "run.stepz=1", "run.seed=-1")
    run.refused(r, "run.stepz: unknown key")
    run.refused(r, "run.seed: -1 is less than 0")


def test_ranks_with_other_data_are_refused(place):
    """Files of one name and length, as on hosts with copies of their own."""
    for name, step in ("a", 1), ("b", 3):
        (place.folder / name).mkdir()
        shard(place.folder / name / "x.bin", TOKENS[::step][:1000])
    c = place.config({**CONFIG, "data": {"path": "x.bin", "bytes": False}})
    r = run.call(*run.apart(*(["env", "-C", place.folder / x, run.PROGRAM, c]
                              for x in "ab")))
    run.refused(r, "data.train.00000: 3024 bytes, hash", "on rank 0", "on rank 1")
    assert not (place.folder / f"out{place.count}").exists()


def test_what_is_a_ranks_own_may_differ(place):
    """Of four micro-batches a step, in waves of the first rank's workers."""
    r = of_two(place, "run.workers=1", "run.memory_limit_bytes=10000000000",
               **{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1,
                  "zero_optimization.stage": 3, "run.workers": 2})
    assert r.rc == 0 and r.saved == [2], str(r)


# ---- a resumed run ----

@pytest.fixture(scope="module")
def half(shared):
    """Two steps of four, and the settings of the run."""
    data = shard(shared.folder / "a.bin", TOKENS)
    shard(shared.folder / "same.bin", TOKENS)
    shard(shared.folder / "other.bin", TOKENS[::-1])
    shard(shared.folder / "longer.bin", [*TOKENS, *TOKENS[:40]])
    masked(shard(shared.folder / "masked.bin", TOKENS), [1] * len(TOKENS))
    c = {**CONFIG, "data": {"path": str(data), "bytes": False}}
    return c, shared.good(1, c, output=shared.folder / "half").output


def state(folder):
    return {p: (p.read_bytes(), p.stat().st_mtime_ns)
            for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("change, words", [
    ({"run.seed": 2}, ("run.seed: 1 in", ", 2 now")),
    ({"data.path": "other.bin"}, ("data.train.00000: 11024 bytes, hash", ", 11024 bytes")),
    ({"data.path": "longer.bin"}, ("data.train.00000: 11024 bytes", ", 11104 bytes")),
    ({"data.path": "masked.bin"}, ("data.train.00000.mask: nothing in", ", 6024 bytes")),
    ({"data.path": "a.bin,same.bin"}, ("data.train.00001: nothing in", ", 11024 bytes")),
    ({"data.val_fraction": 0.5}, ("data.train.windows: 296 in", ", 156 now")),
    ({"data.document_end": 7}, ("data.document_end: -1 in", ", 7 now")),
    ({"train_batch_size": 4}, ("train_batch_size: 2 in", ", 4 now")),
    ({"optimizer.type": "Lion"}, ("optimizer.type: \"AdamW\" in", ", \"Lion\" now")),
    ({"model.width": 48}, ("model.width: 24 in", ", 48 now")),
    ({"model.seq": 8, "run.slices": 2}, ("model.seq: 16 in", ", 8 now"))], ids=str)
def test_another_run_is_no_resumed_one(change, words, half, shared):
    """And leaves all as it is."""
    c, out = half
    change = {k: ",".join(str(shared.folder / x) for x in v.split(","))
              if k == "data.path" else v for k, v in change.items()}
    before = state(out)
    r = shared.launch(1, {**c, **change}, ["--resume"], output=out)
    run.refused(r, "--resume: ", *words, "would be another run")
    assert state(out) == before


ADAPTERS, FROZEN, NF4, INT8 = (rows.TUNED[x] for x in ("lora", "frozen", "nf4", "int8"))
WHOLE = {**NF4, "model.base_dtype": None}
LION = rows.UPDATES["lion"]


@pytest.mark.parametrize("model, base, changed, words", [
    ("gpt2", ADAPTERS, {**ADAPTERS, "lora.alpha": 4}, ("lora.alpha",)),
    ("gpt2", ADAPTERS, {}, ("lora.rank",)),
    ("gpt2", FROZEN, rows.TUNED["top"], ("checkpoint", "frozen")),
    ("gpt2", WHOLE, NF4, ("base_dtype",)),
    ("gpt2", NF4, INT8, ("base_dtype",)),
    ("gpt2", INT8, WHOLE, ("base_dtype",)),
    ("gpt2", LION, {}, ("optimizer.type: ", "another run")),
    ("moe", {"model.experts_per_unit": 3}, {"model.experts_per_unit": 2},
     ("model.experts_per_unit", "3"))])
def test_states_of_another_kind_are_refused(model, base, changed, words, place):
    rows.use(place, model)
    c = {"run.save": True, "run.steps": 1}
    out = place.good(1, {**c, **base}).output
    before = state(out)
    r = place.launch(1, {**c, **changed, "run.steps": 2}, ["--resume"], output=out)
    run.refused(r, *words)
    assert state(out) == before
    if base == LION:  # checkpoints that do not tell of their run tell whose states
        run.forget(out)
        r = place.launch(1, {**c, "run.steps": 2}, ["--resume"], output=out)
        run.refused(r, "states of optimizer lion", "has those of adam")


def test_what_may_change_is_told(half, place):
    c, out = half
    copy = shutil.copytree(out, place.folder / "copy")
    c = {**c, "data.path": str(shard(place.folder / "b.bin", TOKENS)), "run.steps": 4,
         "zero_optimization.stage": 2, "scheduler": {
             "type": "WarmupCosineLR",
             "params": {"warmup_num_steps": 2, "total_num_steps": "auto"}}}
    r = place.good(2, {**c, "optimizer.params.lr": 0.1}, ["--resume"], output=copy)
    changed = r.last("resumed")["changed"]
    assert r.last("resumed")["from"] == 2
    assert "resume: optimizer.params.lr: 0.003 until step 2, from now on 0.1\n" in r.out
    assert "resume: ranks: 1 until step 2, from now on 2\n" in r.out
    assert "resume: without effect on results: data.path " in r.out
    assert changed.items() >= {"optimizer.params.lr": ["0.003", "0.1"],
                               "ranks": ["1", "2"], "run.steps": ["2", "4"],
                               "zero_optimization.stage": ["0", "2"]}.items()
    assert changed["scheduler.params.total_num_steps"] == [None, "4"]
    # and the next one is compared with this
    r = place.good(2, {**c, "run.steps": 5}, ["--resume"], output=copy)
    assert r.last("resumed") == {
        "from": 4, "changed": {"optimizer.params.lr": ["0.1", "0.003"],
                               "run.steps": ["4", "5"],
                               "scheduler.params.total_num_steps": ["4", "5"]}}


@pytest.mark.parametrize("first, second, scale", [
    ({}, {"fp16.initial_scale_power": 12}, 4096),
    ({"fp16.enabled": True, "fp16.loss_scale": 256.0}, {"fp16.loss_scale": 64.0}, 64),
    ({"fp16.enabled": True, "fp16.loss_scale": 256.0}, {"fp16.initial_scale_power": 7}, 128),
    ({"fp16.enabled": True, "fp16.initial_scale_power": 9}, {}, 512)], ids=str)
def test_a_loss_scale_is_what_was_asked_for(first, second, scale, place):
    """One without a history begins; one that was dynamic goes on."""
    c = {"run.save": True, "run.steps": 1}
    r = place.halves(1, {**c, **first},
                     {**c, "run.steps": 2, "fp16.enabled": True, **second})
    assert r.steps[-1]["loss_scale"] == scale, str(r)


def test_a_checkpoint_of_another_run_is_not_taken(half, place):
    c, out = half
    shutil.copytree(out, place.folder / "own")
    other = place.good(1, {**c, "run.steps": 3}).output
    for step in "00000003", "00000001":
        to = place.folder / f"own/checkpoints/step-{step}"
        shutil.copytree(other / "checkpoints/step-00000003", to)
        before = state(place.folder / "own")
        r = place.launch(1, {**c, "run.steps": 4}, ["--resume"],
                         output=place.folder / "own")
        run.refused(r, "holds checkpoints of two runs: step ", "step 2", "move those")
        assert state(place.folder / "own") == before
        shutil.rmtree(to)
    # in a folder of its own it goes on
    shutil.copytree(other, place.folder / "branch")
    place.good(1, {**c, "run.steps": 4}, ["--resume"], output=place.folder / "branch")


def test_a_checkpoint_without_an_identity_goes_on(half, place):
    """Written by a program of before: what is left open is chosen anew, and told."""
    c, out = half
    shutil.copytree(out, place.folder / "old")
    run.forget(place.folder / "old")
    r = place.good(1, {**c, "run.steps": 3}, ["--resume"], output=place.folder / "old")
    assert "step 2 does not tell of what run it is" in r.out and r.saved == [2, 3]


@pytest.mark.parametrize("now, rc", (({}, 0), ({"model.context": 99}, 1)))
def test_a_checkpoint_may_be_older_than_a_key_of_its_model(now, rc, place):
    """It has the key's default."""
    place.use(run.built("models/llama"), {"preset": "tiny"})
    out = place.folder / "old"
    place.good(1, {"run.steps": 2, "run.save": True}, output=out)
    run.forget(out)
    run.edit_index(out, lambda j: j["model"].pop("context"))
    r = place.launch(1, {"run.steps": 3, **now}, ["--resume"], output=out)
    assert r.rc == rc, str(r)
    if rc:
        run.refused(r, "model.context differs", "has 0", "run 99")
