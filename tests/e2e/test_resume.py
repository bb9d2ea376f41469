# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what is stopped and continued has the bits of what was not."""
import json
import math
import pathlib
import re
import signal

import pytest

import run

HOMES = [(0, "none", "none"), (1, "nvme", "none"), (2, "cpu", "none"),
         (3, "none", "none"), (3, "nvme", "nvme")]


def config(ranks, dtype="fp32", home=(0, "none", "none"), nvme=None):
    n = ranks or 1
    c = {"train_batch_size": 12, "run.save": True,
         "gradient_accumulation_steps": 2,
         "train_micro_batch_size_per_gpu": 6 // n, "run.steps": 6,
         "scheduler": {"type": "WarmupCosineLR",
                       "params": {"warmup_num_steps": 2,
                                  "total_num_steps": 8}},
         **run.offload(*home, nvme)}
    if dtype != "fp32":
        c[f"{dtype}.enabled"] = True
    if dtype == "fp16":  # overflows at first, so the scale has a history
        c["fp16.initial_scale_power"] = 18
        c["fp16.loss_scale_window"] = 2
    return c


def word(x):
    return "-".join(map(str, x)) if isinstance(x, tuple) else str(x)


@pytest.fixture(scope="module")
def whole():
    """Six steps in one go, by what decides their bits."""
    return {}


def uninterrupted(whole, place, ranks, dtype):
    if (ranks, dtype) not in whole:
        whole[ranks, dtype] = place.good(ranks, config(ranks, dtype))
    return whole[ranks, dtype]


def halves(place, ranks, first, second, options=()):
    out = place.folder / "halves"
    a = place.good(ranks, {**first, "run.steps": 3}, output=out)
    b = place.good(options[0] if options else ranks, second, ["--resume"],
                   output=out)
    assert len(a.steps) == 3
    return a, b


@pytest.mark.parametrize("dtype, home", [
    *[("fp32", h) for h in HOMES], ("bf16", HOMES[1]), ("bf16", HOMES[4]),
    ("fp16", HOMES[0]), ("fp16", HOMES[4])], ids=word)
@pytest.mark.parametrize("ranks", (None, 2))
def test_three_and_three_are_six(ranks, dtype, home, whole, place, nvme):
    c = config(ranks, dtype, home, nvme)
    want = uninterrupted(whole, place, ranks, dtype)
    _, r = halves(place, ranks, c, c)
    assert r.bits == want.bits, str(r)
    assert r.hash == want.hash
    if dtype == "fp16":
        assert 0 < r.summary["skipped_steps"] + \
            sum(x["skipped"] for x in want.steps[:3])


@pytest.mark.parametrize("ranks", (None, 2))
@pytest.mark.parametrize("a, b", [(0, 4), (4, 0), (1, 3), (2, 1)])
def test_resumes_at_another_stage_and_home(ranks, a, b, whole, place, nvme):
    want = uninterrupted(whole, place, ranks, "bf16")
    _, r = halves(place, ranks, config(ranks, "bf16", HOMES[a], nvme),
                  config(ranks, "bf16", HOMES[b], nvme))
    assert r.bits == want.bits and r.hash == want.hash


@pytest.mark.parametrize("a, b", [(2, None), (None, 3), (3, 2)])
def test_resumes_on_another_number_of_ranks(a, b, whole, place, nvme):
    want = uninterrupted(whole, place, None, "fp32")
    _, r = halves(place, a, config(a, "fp32", HOMES[3], nvme),
                  config(b, "fp32", HOMES[2], nvme), [b])
    assert [x["step"] for x in r.steps] == list(range(1, 7))
    for x, y in zip(want.steps, r.steps):  # rounding only: test_ranks.py
        assert math.isclose(x["loss"], y["loss"], rel_tol=1e-5)
        assert math.isclose(x["grad_norm"], y["grad_norm"], rel_tol=1e-5)


@pytest.mark.single
def test_resumed_run_goes_on_from_the_newest_of_several(place):
    out = place.folder / "several"
    c = {**config(None), "run.save_interval": 2, "run.keep_last": 2}
    place.good(None, {**c, "run.steps": 5}, output=out)
    kept = sorted(p.name for p in (out / "checkpoints").iterdir())
    assert kept == ["step-00000004", "step-00000005"]
    whole = place.good(None, config(None))
    r = place.good(None, c, ["--resume"], output=out)
    assert r.bits == whole.bits and r.hash == whole.hash


@pytest.mark.single
def test_finished_run_resumes_to_the_same(place):
    out = place.folder / "finished"
    a = place.good(None, config(None), output=out)
    b = place.good(None, config(None), ["--resume"], output=out)
    assert b.hash == a.hash and len(b.steps) == 6


# ---- signals ----

# Tasks are delayed by up to 5 ms: some steps a second, on any machine.
SLOW = {"run.inject_delay_us": 5000, "run.steps": 10**6}


def saved(output):
    return sorted(int(p.name[5:]) for p in (output / "checkpoints").iterdir()
                  if re.fullmatch(r"step-\d+", p.name))


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM,
                                    signal.SIGUSR1))
@pytest.mark.parametrize("ranks, only", [(None, None), (2, None), (2, 1)])
def test_signal_saves_and_resume_goes_on(ranks, only, number, place, nvme):
    """`only`: to one rank; the others learn it from the step's scalars."""
    c = config(ranks, "bf16", HOMES[3], nvme)
    run_ = place.start(ranks, {**c, **SLOW}, output=place.folder / "stopped")
    run_.until_step(2)
    run_.signal(number, only)
    r = run_.finish()
    assert r.rc == 0, str(r)
    assert "izar: finishing the step;" in r.err
    assert "interrupted: continue with the same command and --resume" in r.out
    assert not run.DUMPS.search(r.out + r.err), str(r)
    assert r.summary["reason"] == "interrupted"
    stop = r.summary["steps"]
    assert saved(r.output) == [stop] and 2 <= stop == len(r.steps)
    more = {**c, "run.steps": stop + 2}
    want = place.good(ranks, more)
    b = place.good(ranks, more, ["--resume"], output=r.output)
    assert b.bits == want.bits and b.hash == want.hash


def handles_signals(pid):
    """SIGUSR1 is the last one, and no library's."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    caught = re.search(r"^SigCgt:\t(\w+)$", text, re.M)[1]
    return int(caught, 16) >> signal.SIGUSR1 - 1 & 1


@pytest.mark.single
@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_second_signal_stops_at_once(number, place):
    c = {**config(None), "run.inject_delay_us": 400000, "run.workers": 1}
    run_ = place.start(None, {**c, "run.steps": 10**6})
    run_.until(lambda: handles_signals(run_.process.pid), "the handlers")
    run_.signal(number)
    run_.until(lambda: "once more stops at once" in run_.text(1), "the message")
    run_.signal(number)
    r = run_.finish()
    assert r.rc == 128 + number, str(r)
    # One that finishes its step saves it too.
    assert not (r.output / "checkpoints").exists()


def test_mpirun_hands_a_signal_on(place, nvme):
    """SIGUSR1 to mpirun reaches all ranks: what batch systems can send."""
    c = config(2, "fp32", HOMES[3], nvme)
    run_ = place.start(2, {**c, **SLOW})
    run_.until_step(1)
    run_.process.send_signal(signal.SIGUSR1)
    r = run_.finish()
    assert r.rc == 0, str(r)
    assert r.summary["reason"] == "interrupted" and saved(r.output)


# ---- refusals ----

@pytest.mark.single
def test_output_with_a_checkpoint_is_not_written_over(place):
    out = place.folder / "taken"
    c = {**config(None), "run.steps": 2}
    place.good(None, c, output=out)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    r = place.launch(None, c, output=out)
    run.refused(r, "run.output", str(out), "--resume", "step 2")
    assert before == {p: p.stat().st_mtime_ns for p in before}


@pytest.mark.single
def test_resume_without_a_checkpoint_is_refused(place):
    run.refused(place.launch(None, config(None), ["--resume"]),
                "--resume", "no checkpoint")


@pytest.mark.parametrize("change, words", [
    ({"model": {"width": 48}}, ("model.width", "24", "48")),
    ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 12},
     ("train_batch_size", "24"))])
@pytest.mark.single
def test_another_model_or_batch_is_refused(change, words, place):
    out = place.folder / "other"
    c = {**config(None), "run.steps": 2}
    place.good(None, c, output=out)
    run.refused(place.launch(None, {**c, **change}, ["--resume"], output=out),
                *words)


@pytest.mark.parametrize("ranks", (None, 2))
@pytest.mark.parametrize("damage", ("truncate", "flip", "remove"))
def test_damaged_checkpoint_is_named(ranks, damage, place):
    out = place.folder / "damaged"
    c = {**config(ranks), "run.steps": 2}
    place.good(ranks, c, output=out)
    file = sorted((out / "checkpoints").rglob("*.safetensors"))[-1]
    data = bytearray(file.read_bytes())
    if damage == "truncate":
        file.write_bytes(data[:-4])
    elif damage == "flip":
        data[-40] ^= 16
        file.write_bytes(data)
    else:
        file.unlink()
    r = place.launch(ranks, {**c, "run.steps": 4}, ["--resume"], output=out)
    run.refused(r, "checkpoint", file.name, everyone=True)
    assert len(r.steps) == 2  # nothing was trained on it


@pytest.mark.single
def test_crash_in_the_middle_of_a_save_leaves_the_one_before(place):
    out = place.folder / "crash"
    c = config(None)
    place.good(None, {**c, "run.steps": 3}, output=out)
    half = out / "checkpoints" / "step-00000004.tmp"
    half.mkdir()
    (half / "rank-00000-of-00001.safetensors").write_bytes(b"half")
    (out / "checkpoints" / "step-00000005").mkdir()  # no index: not complete
    want = place.good(None, c)
    r = place.good(None, c, ["--resume"], output=out)
    assert r.bits == want.bits and r.hash == want.hash
    assert not half.exists()


@pytest.mark.parametrize("ranks", (None, 2))
def test_killed_run_resumes_from_its_last_save(ranks, place):
    c = {**config(ranks), "run.save_interval": 2}
    run_ = place.start(ranks, {**c, **SLOW})
    run_.until_step(5)
    run_.kill()
    r = run_.finish()
    last = saved(r.output)[-1]
    assert last >= 2 and last % 2 == 0
    more = {**c, "run.steps": last + 2}
    want = place.good(ranks, more)
    b = place.good(ranks, more, ["--resume"], output=r.output)
    steps = {x["step"]: x["loss"] for x in b.steps  # the last one said
             if x["step"] <= last + 2}  # what was killed came further
    assert list(steps.values()) == want.losses[:len(steps)] and \
        steps[last + 2] == want.losses[-1]
    assert b.hash == want.hash


@pytest.mark.single
def test_effective_config_runs_as_it_is(place):
    r = place.good(None, config(None))
    c = json.loads((r.output / "config.json").read_text())
    c["run"]["output"] = str(place.folder / "again")
    path = place.folder / "effective.json"
    path.write_text(json.dumps(c))
    again = run.Run(None, path).finish()
    assert again.rc == 0, str(again)
    assert again.bits == r.bits and again.hash == r.hash
