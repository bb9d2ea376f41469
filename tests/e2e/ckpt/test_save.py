# SPDX-License-Identifier: Apache-2.0
"""Checkpoints written beside training: that they have the files and losses of those
for which training waits is in tests/e2e/step/test_matrix.py."""
import re

import pytest

import run

NONE, NVME = (0, "none", "none"), (3, "nvme", "nvme")
CONFIG = {"run.save": False, "run.save_interval": 2, "run.keep_last": 9, "run.steps": 7,
          "train_batch_size": 12, "run.save_buffers": 2}


@pytest.mark.sanitized
@pytest.mark.parametrize("home, mode, more", [
    ((1, "cpu", "none"), "async", {"run.state_dtype": "fp8"}),
    (NVME, "auto", {"run.nvme_checksum": True}),
    (NONE, "auto", {"bf16.enabled": True, "run.master": "remainder"})])
def test_what_is_saved_beside_training_or_waits(home, mode, more, place, nvme):
    """What async refuses is in tests/runtime/config/refusals.txt."""
    assert place.good(1, {**CONFIG, **run.offload(*home, nvme), **more,
                          "run.save_mode": mode}).saved == [2, 4, 6]


def spans(r, *kinds):
    return [t for t in r.tasks if t["task"] in kinds]


@pytest.mark.alone
def test_training_goes_on_while_a_checkpoint_is_written(place):
    """By the order of what the tasks did, not by their speed: the next step's
    forward begins before the last write, and no chunk is updated before it
    was copied."""
    c = {**CONFIG, "run.task_log": True, "run.inject_delay_us": 2000,
         "run.save_interval": 3, "run.steps": 5, "run.save_buffers": 64}
    for _ in range(5):  # on a busy machine the next step may come late
        r = place.good(1, {**c, "run.save_mode": "async"})
        last_write = max(t["end_us"] for t in spans(r, "save") if t["unit"] >= 0)
        forward = min(t["begin_us"] for t in spans(r, "forward") if t["step"] == 3)
        if forward < last_write:
            break
    assert forward < last_write, str(r)
    copied = {t["unit"]: t["end_us"]
              for t in sorted(spans(r, "snapshot"), key=lambda t: t["end_us"])}
    assert copied.keys() == run.UNITS
    for t in spans(r, "adam"):
        if t["step"] >= 3:
            assert t["begin_us"] >= copied[t["unit"]]
        else:
            assert t["end_us"] <= copied[t["unit"]]
    wait = place.good(1, {**c, "run.save_mode": "sync"})
    assert not spans(wait, "save", "snapshot")


@pytest.mark.sanitized
def test_buffers_are_planned_and_bound(place):
    """One buffer is enough; each more is that much more staging."""
    none, one, nine = (place.good(1, {**CONFIG, **more}) for more in (
        {"run.save_mode": "sync"}, {"run.save_buffers": 1}, {"run.save_buffers": 9}))
    assert none.bytes_of("staging") == 0 < one.bytes_of("staging") <= 4 * run.MIB
    assert nine.bytes_of("staging") == 9 * one.bytes_of("staging")
    assert one.files == nine.files


def test_a_save_that_cannot_be_written_ends_the_run(place):
    """On all ranks, with the one before intact."""
    out = place.folder / "out"
    (out / "checkpoints").mkdir(parents=True)
    (out / "checkpoints" / "step-00000004.tmp").write_text("in the way")
    r = place.launch(2, {**CONFIG, "run.steps": 60, "run.save_mode": "async"}, output=out)
    assert r.rc == 1 and not run.DUMPS.search(r.out + r.err), str(r)
    assert "step-00000004.tmp" in r.err and "Not a directory" in r.err
    assert r.saved == [2] and len(r.steps) < 60
    assert r.summary["reason"] == "not saved" and len(r.hash) == 16


def test_a_save_that_cannot_be_renamed_leaves_nothing(place):
    """Its files are written beside training, and what it replaces cannot move."""
    out = place.folder / "out"
    (out / "checkpoints/step-00000004.old/precious").mkdir(parents=True)
    (out / "checkpoints/step-00000004").write_text("in the way")
    r = place.launch(2, {**CONFIG, "run.steps": 60, "run.save_mode": "async"}, output=out)
    assert r.rc == 1 and "step-00000004: cannot move aside" in r.err, str(r)
    assert "saved step 2" in r.out and "saved step 4" not in r.out
    assert not list((out / "checkpoints").glob("*.tmp"))


def test_what_is_not_finite_is_not_saved(place):
    """The last checkpoint is that of the last good step, as with waiting."""
    c = {**CONFIG, "run.save_interval": 1, "run.steps": 40, "run.keep_last": 99,
         "optimizer.params.lr": 1e6, "gradient_clipping": 0,
         "optimizer.params.weight_decay": 0, "run.in_flight": 4,
         "parameters": [{"match": "*", "lr_scale": 1e6}]}
    free, wait = (place.launch(1, {**c, "run.save_mode": x}) for x in ("async", "sync"))
    for r in (free, wait):
        assert r.rc == 1 and "is not finite" in r.err and "is intact" in r.err, str(r)
    assert free.saved == wait.saved == list(range(1, wait.saved[-1] + 1))
    assert free.files == wait.files


def test_a_signal_ends_the_save_under_way(place):
    """Nothing half-written is left, and the step it stopped at is saved too, once."""
    run_ = place.start(1, {
        **CONFIG, "run.save": True, "run.save_interval": 1, "run.inject_delay_us": 5000,
        "run.steps": 10**6, "run.keep_last": 10**6})
    run_.until_step(3)
    run_.signal(2)
    r = run_.finish()
    assert r.rc == 0, str(r)
    assert not list((r.output / "checkpoints").glob("*.tmp"))
    assert r.saved[-1] == r.summary["steps"] and 2 in r.saved
    told = re.findall(r"^saved step (\d+) in", r.out, re.M)
    assert len(told) == len(set(told)) > 2
