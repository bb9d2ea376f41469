# SPDX-License-Identifier: Apache-2.0
"""A slow disk of one rank is no dead rank, and a dead one is found beside it."""
import signal

import pytest

import run

SAVES = {"run.save": True, "run.save_interval": 1, "run.comm_timeout_s": 2,
         "train_batch_size": 2}
WAITS = "for the other ranks in {}, and goes on: is a disk slow?"


def slow(rank, name, **more):
    return {"LD_PRELOAD": run.built("tests/libslow.so"), "SLOW_RANK": str(rank),
            "SLOW_NAME": name, **{f"SLOW_{k}": str(v) for k, v in more.items()}}


@pytest.mark.parametrize("victim, name, phase, mode", (
    (1, "rank-00001", "the save of a checkpoint", "sync"),
    (1, "rank-00001", "the save of a checkpoint", "async"),
    (0, "index.json", "the save of a checkpoint", "async"),
    (0, "config.json", "the start of the run", "sync")))
def test_a_save_or_start_may_take_longer_than_a_wait(victim, name, phase, mode, place):
    r = place.good(2, {**SAVES, "run.save_mode": mode}, env=slow(victim, name, S=5))
    assert r.saved[-1] == 3
    assert f"izar: rank {1 - victim}: has waited" in r.err, str(r)
    assert WAITS.format(phase) in r.err, str(r)


@pytest.mark.parametrize("mode", ("sync", "async"))
@pytest.mark.parametrize("number", (signal.SIGSTOP, signal.SIGKILL))
def test_a_rank_that_ends_or_stops_in_a_save_is_found(number, mode, place):
    """Beside a save under way, by the next collective."""
    r = place.start(2, {**SAVES, "run.save_mode": mode, "run.steps": 10**6},
                    env=slow(1, "rank-00001", SIGNAL=int(number)))
    pids = []
    try:
        r.until(lambda: len(r.pids()) >= 2, "ranks")
        pids = r.pids()
        end = r.finish()
    finally:
        r.kill()
    stops = ("rank 1 is stopped", "is another rank dead or stopped?")
    said = ("rank 1 is gone", "Killed") if number == signal.SIGKILL else \
        stops[:1] if mode == "sync" else stops
    assert end.rc != 0 and not end.saved, str(end)
    assert any(x in end.err for x in said), str(end)
    assert run.all_gone(pids)
