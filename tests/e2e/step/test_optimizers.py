# SPDX-License-Identifier: Apache-2.0
"""Lion's updates are those of the paper's formula, m and v in fewer bytes learn as
fp32 does, and a plan knows what each takes.  Their bits are in test_matrix.py."""
import array

import pytest

import rows
import run

LION = rows.UPDATES["lion"]
P = LION["optimizer"]["params"]
CONFIG = {**LION, "train_batch_size": 12, "run.steps": 4, "gradient_clipping": 0.5}


def config(**more):
    return {**CONFIG, **more}


def numbers(output, step):
    """{array: values} of a checkpoint."""
    return {k: array.array("f", data) for k, data in run.arrays(output, step).items()}


@pytest.fixture(scope="module")
def three(shared):
    """Checkpoints of the first three steps, and the first of AdamW, whose m is
    the same average of the same gradient."""
    more = {"gradient_clipping": 0, "run.save": True, "run.save_interval": 1,
            "run.steps": 3, "run.keep_last": 9}
    lion = shared.good(1, config(**more))
    adam = shared.good(1, config(**{
        **more, "run.steps": 1,
        "optimizer": {"type": "AdamW",
                      "params": {"lr": 1e-3, "betas": [0.99, 0.999]}}}))
    return [numbers(lion.output, s) for s in (1, 2, 3)], numbers(adam.output, 1)


def test_the_first_state_is_the_average_of_adams_gradient(three):
    (first, *_), adam = three
    names = [k for k in first if k.endswith("/m")]
    assert len(names) == 7 and not any(k.endswith("/v") for k in first)
    for k in names:
        assert first[k] == adam[k]


def test_an_update_is_that_of_the_paper(three):
    """In double: the gradient of a step follows from two states."""
    steps, _ = three
    (b1, b2), lr, wd = P["betas"], P["lr"], P["weight_decay"]
    told = moved = 0
    for old, new in zip(steps, steps[1:]):
        for k in (k for k in old if k.endswith("/m")):
            master = k[:-1] + "master"
            for m0, m1, p0, p1 in zip(old[k], new[k], old[master], new[master]):
                g = (m1 - b2 * m0) / (1 - b2)
                u = b1 * m0 + (1 - b1) * g
                # m is rounded to 2^-24 of itself, of which g is 100 times that
                if abs(u) < 1e-4 * abs(m0) + 1e-4 * abs(m1):
                    continue
                want = p0 - lr * ((u > 0) - (u < 0) + wd * p0)
                assert abs(p1 - want) < 2e-7 * max(1, abs(p0)), (k, p0, p1, want)
                told += 1
                moved += p0 != p1
    assert told > 0.95 * 2 * run.parameters(run.MODEL) * 0.9 and moved > told / 2


# Bytes of one state; Adam has two of them.
SIZE = {"fp32": 4, "bf16": 2, "fp8": 1 + 1 / 64}


def has_bytes(r, kind, states, master):
    n, size = run.parameters(run.MODEL), master + states * SIZE[kind]
    assert size * n <= r.bytes_of("optimizer") <= size * (n + 64 * 7)


@pytest.mark.parametrize("kind", SIZE)
def test_lion_has_one_state(kind, place):
    has_bytes(place.good(1, {**LION, "bf16.enabled": True, "run.state_dtype": kind,
                             "run.steps": 1}), kind, 1, 4)


def test_every_kind_learns_in_its_bytes(place):
    last = {}
    for kind in SIZE:
        r = place.good(1, {"train_batch_size": 8, "run.steps": 40,
                           "gradient_accumulation_steps": 2, "run.state_dtype": kind})
        has_bytes(r, kind, 2, 0)
        last[kind] = r.losses[-1]
    for kind in SIZE:
        assert abs(last[kind] - last["fp32"]) < 0.02 * last["fp32"], last
    assert len(set(last.values())) == 3
