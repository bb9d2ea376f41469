# SPDX-License-Identifier: Apache-2.0
"""What a run says at its end: shares that add up, bytes that were moved, one
sentence about the limit; and the user's STARPU_ variables in its header."""
import pytest

from run import offload

SMALL = {"run.steps": 6, "run.eval_batches": 1}


def check(r):
    """What holds for every summary."""
    limit = r.last("limit")
    assert abs(sum(limit["share"].values()) - 1) < 1e-3, limit
    assert all(0 <= s <= 1.0001 for s in limit["share"].values()), limit
    assert limit["window_s"] > 0
    kinds = r.last("tasks")
    assert sum(k["count"] for k in kinds.values()) == r.summary["tasks"]
    for idle in r.last("workers").values():
        assert all(-0.01 <= x <= 100.01 for x in idle)
    # "limited by: " and the sentence, folded, is there once
    words = " ".join(r.out.split())
    assert words.count("limited by: " + limit["text"]) == 1, str(r)
    end = r.out[r.out.index("finished after"):]
    assert max(map(len, end.splitlines())) <= 96, end
    return limit


@pytest.mark.sanitized
def test_one_rank_alone(place):
    r = place.good(1, SMALL)
    check(r)
    assert r.last("links") == {}
    assert set(r.last("workers")) == {"compute"}
    assert len(r.last("workers")["compute"]) == 2


def test_the_memory_of_an_evaluation_does_not_grow_with_it(place):
    """Its tasks wait for memory, not in memory."""
    (place.folder / "val").write_bytes(bytes(16 * 12001))
    peaks = [place.good(2, {
        **offload(3, "none", "none", None), "run.steps": 1, "train_batch_size": 2,
        "data.val_path": str(place.folder / "val"), "run.eval_batches": n
    }).summary["peak_resident_bytes"] for n in (10, 6000)]
    assert peaks[1] - peaks[0] < 80 << 20, peaks


def test_the_rate_is_that_of_the_whole_batch(place):
    """Of all ranks, micro-batches and slices."""
    r = place.good(2, {"train_batch_size": 16, "run.slices": 2,
                       "train_micro_batch_size_per_gpu": 4})
    for x in r.steps:
        assert x["tokens_per_s"] == pytest.approx(16 * 16 / x["seconds"], rel=1e-2)


def test_two_ranks_and_a_disk(place, nvme):
    r = place.good(2, {**SMALL, **offload(3, "nvme", "cpu", nvme)})
    check(r)
    links = r.last("links")
    assert set(links) == {"network", "disk"}
    # The collectives count for themselves; scalars of steps come on top.
    sent = r.summary["sent_bytes"]
    assert 0 <= sent - links["network"]["bytes"] < 0.05 * sent
    # Each step loads and stores the states, in whole chunks.
    states = r.memory["optimizer", "nvme"][1]
    assert links["disk"]["bytes"] == 2 * 6 * states
    assert links["disk"]["seconds"] > 0
    workers = r.last("workers")
    assert set(workers) == {"compute", "network", "disk"}
    for name, link in links.items():  # busy while one of its workers is
        busy = [100 - idle for idle in workers[name]]
        assert max(busy) - 0.1 <= link["busy_percent"] <= sum(busy) + 0.1


def test_one_step_is_not_enough_to_tell(place):
    r = place.good(1, {"run.steps": 1})
    assert r.last("limit")["by"] == "unknown"
    assert "limited by: not known" in r.out


@pytest.mark.alone
def test_slow_tasks_without_a_second_chain_lack_tasks(place):
    """One slice, delays that make each task long: the other worker idles."""
    r = place.good(1, {**SMALL, "run.inject_delay_us": 1,
                          "model.width": 192, "model.heads": 3,
                          "model.seq": 64})
    limit = check(r)
    assert limit["share"]["no task"] > 0.25, limit


# ---- the environment ----

def test_the_header_shows_the_users_variables(place):
    env = {"STARPU_SCHED": "lws", "STARPU_PREFETCH": "0", "STARPU_NCPU": "1",
           "STARPU_OF_NOBODY": "x" * 200}
    r = place.good(1, {"run.steps": 2, "run.scheduler": "eager",
                          "run.workers": 2}, env=env)
    head = r.out[:r.out.index("step 1/")]
    for name, value in env.items():
        assert f"environment: {name}={value}\n" in head
    assert "scheduler lws" in head and ": 1 worker on " in head
    assert len(r.last("workers")["compute"]) == 1


def test_what_izar_sets_itself_is_not_shown(place):
    """Neither what the program sets, nor what a tool of ours names in IZ_SET."""
    r = place.good(1, {"run.steps": 1},
                   env={"STARPU_PREFETCH": "0", "IZ_SET": " STARPU_PREFETCH"})
    assert "STARPU_WORKERS_NOBIND" not in r.out
    assert "environment: STARPU_NCPU" not in r.out
    assert "STARPU_PREFETCH" not in r.out


def test_cores_can_be_kept_free(place):
    """The same as one worker less."""
    whole = place.good(1, {"run.steps": 1, "run.workers": 0})
    cores = len(whole.last("workers")["compute"])
    if cores < 2 or "quota of" in whole.out:
        pytest.skip("one core, or a part of some")
    bind = {"STARPU_MAIN_THREAD_BIND": "1"}
    for workers, env, left in ((0, {"STARPU_RESERVE_NCPU": "1"}, cores - 1),
                               (0, bind, cores - 1), (2, bind, 2)):
        r = place.good(1, {"run.steps": 1, "run.workers": workers}, env=env)
        assert len(r.last("workers")["compute"]) == left
