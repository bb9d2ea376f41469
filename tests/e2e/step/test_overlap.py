# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a step under the forward of the next one, with clipping on.
Part of its time lies beside computation only when barriers are off; how much is
the machine's affair and not asserted."""
import os

import pytest

import run

pytestmark = pytest.mark.alone

CONFIG = {
    "model": {**run.MODEL, "width": 96, "layers": 4}, "run.workers": 2,
    "gradient_clipping": 0.1, "train_batch_size": 4, "run.steps": 12,
    "zero_optimization.sub_group_size": 8192, "run.slices": 2,
    "run.in_flight": 3,
}
CAN_OVERLAP = len(os.sched_getaffinity(0)) >= 2
def task_times(r):
    """{(kind, step): (first begin, last end)} of the run's tasks."""
    times = {}
    for t in r.tasks:
        key = t["task"], t["step"]
        begin, end = times.get(key, (t["begin_us"], t["end_us"]))
        times[key] = min(begin, t["begin_us"]), max(end, t["end_us"])
    return times


def steps_that_overlap(times, steps):
    """Those whose last update ends after the forward of the next step began."""
    return [s for s in range(steps - 1)
            if times["adam", s][1] > times["forward", s + 1][0]]


@pytest.mark.parametrize("home", ((1, "none", "none"), (3, "nvme", "nvme")))
def test_adam_runs_under_the_next_steps_forward(home, place, nvme):
    """Only without barriers."""
    config = {**CONFIG, **run.offload(*home, nvme), "run.task_log": True}
    config["zero_optimization"]["sub_group_size"] = 8192
    wait = place.good(1, {**config, "run.overlap": False})
    assert wait.summary["optimizer_hidden_percent"] == 0, str(wait)
    assert not steps_that_overlap(task_times(wait), config["run.steps"])
    for _ in range(5):  # a busy machine may run one worker at a time
        r = place.good(1, config)
        assert r.numbers == wait.numbers
        times = task_times(r)
        # Exact: an update never begins before the clip factor of its step is known.
        for s in range(config["run.steps"]):
            assert times["adam", s][0] >= times["clip", s][1]
        hidden = r.summary["optimizer_hidden_percent"] > 0
        if hidden and steps_that_overlap(times, config["run.steps"]):
            return
    assert not CAN_OVERLAP, str(r)


def test_updates_on_disk_go_before_the_rest_of_the_backward(place, nvme):
    """Where every core computes, a disk would be idle until the backward ends, which
    lasts long enough here for any disk."""
    config = {**CONFIG, **run.offload(2, "nvme", "none", nvme), "run.workers": 1,
              "run.slices": 1, "gradient_clipping": 0, "run.steps": 12,
              "train_batch_size": 64,
              "run.task_log": True}
    tasks = place.good(1, config).tasks
    before = 0
    for s in range(1, 12):
        first = min(t["begin_us"] for t in tasks
                    if t["task"] == "adam" and t["step"] == s)
        last = max(t["begin_us"] for t in tasks
                   if t["task"] == "backward" and t["step"] == s)
        before += first < last
    assert before >= 6  # a slow disk may be late in some


def test_a_forward_follows_a_disk_that_is_behind(place, nvme):
    """What the disk has not done when the backward ends, it does in the order in which
    the next forward needs it.  Delays make the updates longer than the backward."""
    steps = 14
    config = {**CONFIG, **run.offload(2, "nvme", "none", nvme), "run.workers": 2,
              "run.slices": 1, "gradient_clipping": 0, "run.steps": steps,
              "run.task_log": True}
    r = place.good(1, {**config, "run.inject_delay_us": 3000})
    tasks = r.tasks
    followed = 0
    for s in range(3, steps - 1):
        updates = [t for t in tasks if t["task"] == "adam" and t["step"] == s]
        forward = min(t["begin_us"] for t in tasks
                      if t["task"] == "forward" and t["step"] == s + 1)
        assert all(t["end_us"] <= forward for t in updates if t["unit"] == 0)
        followed += forward < max(t["end_us"] for t in updates)
    assert followed >= (steps - 4) / 2, str(r)
