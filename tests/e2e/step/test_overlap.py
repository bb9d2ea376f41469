# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a step under the forward of the next one, with clipping on.
Part of its time lies beside computation only when barriers are off; how much is
the machine's affair and not asserted."""
import collections
import os

import pytest

import run

pytestmark = pytest.mark.alone

STEPS = 12
CONFIG = {
    "model": {**run.MODEL, "width": 96, "layers": 4}, "run.workers": 2,
    "gradient_clipping": 0.1, "train_batch_size": 4, "run.steps": STEPS,
    "zero_optimization.sub_group_size": 8192, "run.slices": 2,
    "run.in_flight": 3, "run.task_log": True}
CAN_OVERLAP = len(os.sched_getaffinity(0)) >= 2


def by_step(r):
    """{(kind, step): [(begin, end, unit)]} of the run's tasks."""
    found = collections.defaultdict(list)
    for t in r.tasks:
        found[t["task"], t["step"]].append((t["begin_us"], t["end_us"], t["unit"]))
    return found


def end(tasks):
    return max(last for _, last, _ in tasks)


def overlap(tasks, step):
    return end(tasks["adam", step]) > min(tasks["forward", step + 1])[0]


@pytest.mark.parametrize("home", ((1, "none", "none"), (3, "nvme", "nvme")))
def test_adam_runs_under_the_next_steps_forward(home, place, nvme):
    """Only without barriers."""
    config = {**run.offload(*home, nvme), **CONFIG}
    wait = place.good(1, {**config, "run.overlap": False})
    assert wait.summary["optimizer_hidden_percent"] == 0, str(wait)
    tasks = by_step(wait)
    assert not any(overlap(tasks, s) for s in range(STEPS - 1))
    for _ in range(5):  # a busy machine may run one worker at a time
        r = place.good(1, config)
        assert r.numbers == wait.numbers
        tasks = by_step(r)
        # Exact: an update never begins before the clip factor of its step is known.
        assert all(min(tasks["adam", s])[0] >= end(tasks["clip", s]) for s in range(STEPS))
        if r.summary["optimizer_hidden_percent"] > 0 and any(
                overlap(tasks, s) for s in range(STEPS - 1)):
            return
    assert not CAN_OVERLAP, str(r)


def test_updates_on_disk_go_before_the_rest_of_the_backward(place, nvme):
    """Where every core computes, a disk would be idle until the backward ends, which
    lasts long enough here for any disk."""
    tasks = by_step(place.good(1, {
        **run.offload(2, "nvme", "none", nvme), **CONFIG, "run.workers": 1, "run.slices": 1,
        "gradient_clipping": 0, "train_batch_size": 64}))
    before = sum(min(tasks["adam", s])[0] < max(tasks["backward", s])[0]
                 for s in range(1, STEPS))
    assert before >= 6  # a slow disk may be late in some


def test_a_forward_follows_a_disk_that_is_behind(place, nvme):
    """What the disk has not done when the backward ends, it does in the order in which
    the next forward needs it.  Delays make the updates longer than the backward."""
    r = place.good(1, {**run.offload(2, "nvme", "none", nvme), **CONFIG, "run.slices": 1,
                       "gradient_clipping": 0, "run.inject_delay_us": 3000})
    tasks, late = by_step(r), 0
    for s in range(3, STEPS - 1):
        forward = min(tasks["forward", s + 1])[0]
        assert all(last <= forward for _, last, unit in tasks["adam", s] if unit == 0)
        late += overlap(tasks, s)
    assert late >= (STEPS - 4) / 2, str(r)
