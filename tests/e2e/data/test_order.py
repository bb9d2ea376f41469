# SPDX-License-Identifier: Apache-2.0
"""The function of docs/data.md says which sample comes when: the loss of every
step is that of its windows, with weights that do not move."""
import re

import pytest

import run

ALONE = {**run.STILL, "model": {**run.MODEL, "layers": 1}, "run.workers": 1}
T = run.MODEL["seq"]


@pytest.fixture(scope="module")
def start():
    text = (run.ROOT / "docs/data.md").read_text()
    code, = re.findall(r"```python\n(.*?)```", text, re.S)
    names = {}
    exec(code, names)
    return names["start"]


def train_on(place, path, steps, seed, ranks=1, **more):
    return place.good(ranks, {**ALONE, "data.path": str(path), "data.val_fraction": 0,
                              "train_batch_size": 1, "run.steps": steps, "run.seed": seed,
                              **more})


@pytest.mark.parametrize("windows, rest, seed", [(11, 3, 7), (16, 0, 9 * 10**18),
                                                 (17, 15, 0)])
def test_every_window_comes_when_the_page_says(windows, rest, seed, place, start):
    """One loss per window, over several epochs, and it is that of the window alone;
    then two of four samples each, on two ranks."""
    n = windows * T + 1 + rest
    text = place.data.read_bytes()[200:200 + n]
    path = place.folder / "text"
    path.write_bytes(text)
    steps = 6 * windows
    r = train_on(place, path, steps, seed)
    loss = {}
    for i in range(steps):
        loss.setdefault(start(i, n, T, seed), set()).add(r.losses[i])
    assert all(len(x) == 1 for x in loss.values())
    assert len(set.union(*loss.values())) == len(loss) > windows - (not rest)
    alone = place.folder / "alone"
    at = start(3, n, T, seed)
    alone.write_bytes(text[at:at + T + 1])
    # The seed, which also makes the weights, is the same.
    one = train_on(place, alone, 1, seed)
    assert {one.losses[0]} == loss[at]
    b = train_on(place, path, 4, seed, 2, train_batch_size=8, gradient_accumulation_steps=2)
    for s, got in enumerate(b.losses):
        want = sum(r.losses[8 * s:8 * s + 8]) / 8
        assert abs(got - want) < 1e-6
