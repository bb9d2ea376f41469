# SPDX-License-Identifier: Apache-2.0
"""Every scheduler that StarPU offers trains with the same bits, or is refused
before step 0 with those that may be chosen."""
import re

import pytest

import run


def config(disk, nvme, name):
    home = (3, "nvme", "cpu") if disk else (3, "none", "none")
    return {**run.offload(*home, nvme), "run.scheduler": name,
            "train_micro_batch_size_per_gpu": 1}


# Of StarPU's, those that no run may have.
NEVER = {"heteroprio", "modular-dmda", "modular-dmdap", "modular-dmdar", "modular-dmdas",
         "modular-ws"}


@pytest.fixture(scope="module")
def names(shared):
    """All that StarPU has: those of the message, and the ones it leaves out."""
    r = shared.launch(1, {"run.scheduler": "none-such"})
    offered = run.refused(r, "none-such", "it has").split("it has ")[1].split()
    assert not NEVER & set(offered)
    return [*offered, *sorted(NEVER)]


@pytest.mark.parametrize("ranks, disk", ((2, False), (1, True)), ids=("memory", "disk"))
def test_every_scheduler_has_the_bits_or_is_refused(ranks, disk, names, place,
                                                    nvme):
    assert {"prio", "eager", "lws", "dmda"} <= set(names)
    want, refused = None, set()
    for name in names:
        r = place.launch(ranks, config(disk, nvme, name))
        if r.rc == 0:
            want = want or r.numbers
            assert r.numbers == want, f"{name}\n{r}"
            assert re.search(rf"scheduler {name}\b", r.out), str(r)
        else:
            line = run.refused(r, "run.scheduler", f"'{name}' never end", everyone=True)
            assert " prio " in line and name not in line.split("choose among")[1].split()
            assert not r.steps
            refused.add(name)
    assert refused >= NEVER and (refused > NEVER) == disk


@pytest.mark.parametrize("name, disk, victim", (("prio", True, 0), ("eager", False, 1)))
def test_a_task_that_no_worker_gets_ends_the_run(name, disk, victim, place, nvme):
    """A scheduler of the user's own, which no list knows: the rank that is stuck
    says so, before the other has waited too long for it."""
    r = place.launch(2, {**config(disk, nvme, name), "run.comm_timeout_s": 4},
                     env={"STARPU_SCHED_LIB": run.built("tests/libkeeper.so"),
                          "KEEP_RANK": str(victim), "KEEP_TASK": "30"})
    line = run.refused(r, f"rank {victim}: ", "tasks wait and all workers are idle for 2 s",
                       f"the scheduler '{name}' gives none of them the first, ")
    kind, unit, step = re.search(r"first, (\w+) of unit (-?\d+) in step (\d+):", line).groups()
    assert kind in ("batch", "load", "fetch", "forward", "backward", "reduce", "norm")
    assert int(unit) in {-1, *run.UNITS} and 1 <= int(step) <= 3


def test_a_slow_task_is_not_a_stuck_one(place):
    """Tasks of up to a second; idle workers with tasks that wait end a run after
    half a second."""
    place.good(1, {"run.comm_timeout_s": 1, "run.inject_delay_us": 1000000,
                   "run.steps": 1, "model.layers": 1})
