# SPDX-License-Identifier: Apache-2.0
"""Gradients that really overflow in fp16: which steps are skipped, and what the
loss scale does, by DeepSpeed's rule and the same wherever the states live."""
import pytest

import run

STEPS = 18


def scales(overflows, power, window, hysteresis, consecutive=False):
    """DeepSpeed's dynamic scale before each step: an overflow uses up the
    hysteresis, then halves; every `window` steps after the first good one
    double, and refill."""
    scale, left, last = 2.0 ** power, hysteresis, -1
    for i, overflow in enumerate(overflows):
        yield scale
        if overflow:
            if left > 1:
                left -= 1
            else:
                scale /= 2
            last = i
            continue
        stable = i - last - 1
        doubles = stable > 0 and stable % window == 0
        if doubles or consecutive:
            left = hysteresis
        if doubles:
            scale *= 2


def config(power=22, **fp16):
    c = {"enabled": True, "initial_scale_power": power, "loss_scale_window": 2,
         **fp16}
    return {"fp16": c, "run.steps": STEPS, "train_batch_size": 12,
            "scheduler": {"type": "WarmupLR",
                          "params": {"warmup_num_steps": 6,
                                     "warmup_type": "linear"}}}


def check_rule(r, **rule):
    skipped = [x["skipped"] for x in r.steps]
    want = list(scales(skipped, **rule))
    assert [x["loss_scale"] for x in r.steps] == want, str(r)
    for x in r.steps:
        assert x["skipped"] == isinstance(x["grad_norm"], str), str(x)
    assert r.summary["skipped_steps"] == sum(skipped)
    return skipped


@pytest.mark.parametrize("hysteresis, consecutive", (
    (1, False), (2, False), (2, True), (3, True)))
def test_scale_follows_deepspeeds_rule(hysteresis, consecutive, place):
    r = place.good(1, config(hysteresis=hysteresis,
                                consecutive_hysteresis=consecutive))
    skipped = check_rule(r, power=22, window=2, hysteresis=hysteresis,
                         consecutive=consecutive)
    first = skipped.index(False)
    # All that the rule is about happens: a start far too high, and an overflow
    # after the scale has grown again.
    assert first >= 3 and True in skipped[first:]
    assert skipped.count(False) >= 5


def test_rate_counts_updates_not_steps(known):
    steps = known(1, config()).steps
    done = 0
    for x in steps:
        want = 3e-3 * min(max(done - 1, 0) / 6, 1)
        assert x["lr"] == pytest.approx(want, rel=1e-12, abs=1e-18)
        done += not x["skipped"]
    assert 0 < done < STEPS


def test_skipped_steps_change_nothing(place, known):
    start = place.good(1, {**config(power=40), "run.steps": 0})
    skip = place.good(1, {**config(power=40), "run.steps": 4})
    assert all(x["skipped"] for x in skip.steps)
    assert skip.hash == start.hash
    assert known(1, config()).hash != start.hash


@pytest.mark.parametrize("ranks, home", [
    (1, (1, "nvme", "none")), (1, (3, "cpu", "nvme")), (2, (1, "none", "none")),
    (2, (3, "nvme", "nvme"))])
def test_same_steps_are_skipped_everywhere(ranks, home, known, place, nvme):
    r = place.good(ranks, {**config(), **run.offload(*home, nvme)})
    skipped = check_rule(r, power=22, window=2, hysteresis=2)
    assert 3 < sum(skipped) < STEPS - 3
    assert r.numbers == known(ranks, config()).numbers


@pytest.mark.sanitized
def test_overflow_at_the_smallest_scale_ends_the_run(place):
    r = place.launch(1, config(power=24, min_loss_scale=2.0 ** 23))
    run.refused(r, "fp16.min_loss_scale", "8.38861e+06")


def test_static_scale_stays(place):
    r = place.good(1, config(loss_scale=1024))
    assert {x["loss_scale"] for x in r.steps} == {1024}
    assert not any(x["skipped"] for x in r.steps)
