# SPDX-License-Identifier: Apache-2.0
"""Lion's updates are those of the paper's formula, m and v in fewer bytes learn as
fp32 does, and a plan knows what each takes.  Their bits are in test_matrix.py."""
import array

import pytest

import rows
import run

LION = rows.UPDATES["lion"]
SIZE = {"fp32": 4, "bf16": 2, "fp8": 1 + 1 / 64}  # bytes of one state


def has_bytes(r, kind, states):
    n, size = run.parameters(run.MODEL), states * SIZE[kind]
    assert size * n <= r.bytes_of("optimizer") <= size * (n + 64 * 7)


def test_lions_update_is_that_of_the_paper(place):
    """In double: the gradient of a step follows from two states."""
    r = place.good(1, {**LION, "gradient_clipping": 0, "run.save": True, "run.steps": 3,
                       "run.save_interval": 1, "run.keep_last": 9})
    has_bytes(r, "fp32", 1)
    steps = [{k: array.array("f", data) for k, data in run.arrays(r.output, s).items()}
             for s in (1, 2, 3)]
    params = LION["optimizer"]["params"]
    (b1, b2), lr, wd = params["betas"], params["lr"], params["weight_decay"]
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
                assert p1 == pytest.approx(want, rel=2e-7, abs=2e-7), k
                told += 1
                moved += p0 != p1
    assert told > 0.95 * 2 * run.parameters(run.MODEL) * 0.9 and moved > told / 2


def test_every_kind_learns_in_its_bytes(place):
    last = {}
    for kind in SIZE:
        r = place.good(1, {"train_batch_size": 8, "run.steps": 40,
                           "gradient_accumulation_steps": 2, "run.state_dtype": kind})
        has_bytes(r, kind, 2)
        last[kind] = r.losses[-1]
    assert list(last.values()) == pytest.approx([last["fp32"]] * 3, rel=0.02)
    assert len(set(last.values())) == 3
