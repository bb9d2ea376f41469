# SPDX-License-Identifier: Apache-2.0
"""Gradients that really overflow in fp16.  The loss scale's rule is in
tests/runtime/engine/test_schedule.c; the same bits wherever states live, in
test_matrix.py."""
import pytest

import run

STEPS = 18


def config(power=22, **fp16):
    c = {"enabled": True, "initial_scale_power": power, "loss_scale_window": 2,
         **fp16}
    return {"fp16": c, "run.steps": STEPS, "train_batch_size": 12,
            "scheduler": {"type": "WarmupLR",
                          "params": {"warmup_num_steps": 6,
                                     "warmup_type": "linear"}}}


def test_rate_counts_updates_not_steps(known):
    r = known(1, config())
    done = 0
    for x in r.steps:
        assert x["skipped"] == isinstance(x["grad_norm"], str), str(x)
        want = 3e-3 * min(max(done - 1, 0) / 6, 1)
        assert x["lr"] == pytest.approx(want, rel=1e-12, abs=1e-18)
        done += not x["skipped"]
    assert 0 < done < STEPS and r.summary["skipped_steps"] == STEPS - done


def test_skipped_steps_change_nothing(place, known):
    start = place.good(1, {**config(power=40), "run.steps": 0})
    skip = place.good(1, {**config(power=40), "run.steps": 4})
    assert all(x["skipped"] for x in skip.steps)
    assert skip.hash == start.hash
    assert known(1, config()).hash != start.hash


@pytest.mark.sanitized
def test_overflow_at_the_smallest_scale_ends_the_run(place):
    r = place.launch(1, config(power=24, min_loss_scale=2.0 ** 23))
    run.refused(r, "fp16.min_loss_scale", "8.38861e+06")
