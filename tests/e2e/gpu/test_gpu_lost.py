# SPDX-License-Identifier: Apache-2.0
"""Ranks that die or stop while GPUs talk through NCCL, on the stand-in.  The
launcher would end the other ranks when one is killed, so each rank has a parent
that hides this: what ends the others is what they have seen themselves."""
import contextlib
import os
import pathlib
import signal
import time

import pytest

import rows
import run
from test_gpu import ROW

pytestmark = pytest.mark.skipif(run.GPU != "standin",
                                reason="needs the stand-in for NCCL")
PROMPT_S = 60  # "within seconds", on a busy machine
TIMEOUT_S = 5
STEPS = 10**6


# A rank that is killed is followed by a process that only sleeps, and may not even
# take notice of the end.
REAPED = """#!/bin/sh
{} "$@"
status=$?
[ $status -ne 137 ] || exec sleep 100
exit $status
"""
UNREAPED = """#!/usr/bin/python3
import os, signal, subprocess, sys, time
p = subprocess.Popen(["{}", *sys.argv[1:]])
end = os.waitid(os.P_PID, p.pid, os.WEXITED | os.WNOWAIT)
if end.si_code == os.CLD_KILLED and end.si_status == signal.SIGKILL:
    time.sleep(100)
sys.exit(end.si_status)
"""


def left_over(config):
    """Processes that were started with this config and still live."""
    found = []
    for line in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_bytes().split(b"\0")
        except OSError:
            continue
        if str(config).encode() in words and run.alive(line.parent.name):
            found.append(line.parent.name)
    return found


def run_once(place, config, ranks, env):
    """How a run has ended, when, and its processes that were left then."""
    run_ = run.Run(place.command(ranks, config), config, env)
    try:
        r = run_.finish()
        now = time.time()
    finally:
        end = time.monotonic() + PROMPT_S
        while left_over(config) and time.monotonic() < end:
            time.sleep(0.05)
        left = left_over(config)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    return r, now, left


def ended(place, nvme, ranks, env, **changes):
    """A run that trains for ever unless something is wrong; how it has ended.
    All of its processes are gone.  Open MPI 4.1's launcher may crash on a message
    that comes while it ends (abort_ranks in runtime/comm/open.c), and what it
    leaves then is not the program's: such a run is made again."""
    row = {**ROW, "ranks": ranks, "stage": 3, "comm": "nccl"}
    env = {**rows.environment(place, row), **env}
    for _ in range(3):
        config = place.config({**rows.config_of(row, nvme), "run.steps": STEPS,
                               "gradient_clipping": 0, **changes})
        r, now, left = run_once(place, config, ranks, env)
        if r.rc != -signal.SIGSEGV:
            break
    assert not left and r.rc == 1, str(r)
    if r.steps:  # the last step was written just before
        written = (r.output / "metrics.jsonl").stat().st_mtime
        assert now - written < TIMEOUT_S + PROMPT_S, str(r)
    return r


def said(r, victim):
    """What the first rank that noticed has said; a stuck rank may be one."""
    lines = [x for x in r.err.splitlines() if x.startswith("izar: rank ")]
    assert lines and not lines[0].startswith(f"izar: rank {victim}:"), str(r)
    return lines[0]


def fault(victim, number, group=100):
    return {"IZ_STANDIN_FAULT": f"{victim}:{group}:{int(number)}"}


@pytest.mark.parametrize("ranks, victim", [(2, 0), (3, 1)])
def test_nccl_tells_of_a_rank_that_was_killed(ranks, victim, place, nvme):
    place.wrap(REAPED)
    r = ended(place, nvme, ranks, fault(victim, signal.SIGKILL))
    assert "NCCL: remote process exited" in said(r, victim), str(r)
    assert " (all-gather)" in said(r, victim) or \
        " (reduce-scatter)" in said(r, victim), str(r)
    assert 1 <= len(r.steps) < 100 or victim == 0, str(r)


@pytest.mark.parametrize("ranks, victim, parent", [
    (2, 0, REAPED), (2, 1, UNREAPED), (3, 1, REAPED), (3, 2, UNREAPED)],
    ids=["0 of 2", "unreaped 1 of 2", "1 of 3", "unreaped 2 of 3"])
def test_nobody_tells_of_a_rank_that_was_killed(ranks, victim, parent, place, nvme):
    """Between GPUs of one host NCCL does not notice."""
    place.wrap(parent)
    r = ended(place, nvme, ranks,
              {**fault(victim, signal.SIGKILL), "IZ_STANDIN_SILENT": "1"})
    assert f" through NCCL): rank {victim} is gone" in said(r, victim), str(r)


def test_a_rank_that_was_stopped(place, nvme):
    r = ended(place, nvme, 3, fault(0, signal.SIGSTOP),
              **{"run.comm_timeout_s": TIMEOUT_S})
    line = said(r, 0)
    assert f": waited {TIMEOUT_S} s for " in line, str(r)
    assert "through NCCL): is another rank dead or stopped?" in line, str(r)


@pytest.mark.parametrize("call, what", [
    ("ncclCommInitRank", "the communicator (connecting through NCCL)"),
    ("ncclGroupEnd", " (reduce-scatter through NCCL)"),
    ("ncclCommDestroy", "the communicator (closing through NCCL)")])
def test_a_call_of_nccl_that_never_returns(call, what, place, nvme):
    """The first calls wait for other ranks on the host, not on the GPU."""
    r = ended(place, nvme, 2, {"IZ_STANDIN_BLOCKS": call},
              **{"run.comm_timeout_s": TIMEOUT_S, "run.steps": 2})
    assert f": waited {TIMEOUT_S} s for " in said(r, None), str(r)
    assert what in said(r, None), str(r)


def test_a_rank_that_was_killed_in_a_collective_of_the_host(place, nvme):
    """The ranks' GPUs talk through MPI.  Again where the launcher crashed, as in
    ended()."""
    place.wrap(REAPED)
    row = {**ROW, "ranks": 2, "stage": 3, "comm": "mpi"}
    for _ in range(3):
        run_ = place.start(2, {**rows.config_of(row, nvme), "run.steps": STEPS},
                           env=rows.environment(place, row))
        run_.until_step(3)
        victim = run.children(run_.pids()[1])
        assert len(victim) == 1
        os.kill(victim[0], signal.SIGKILL)
        r = run_.finish(PROMPT_S)
        if r.rc != -signal.SIGSEGV:
            break
    assert r.rc == 1 and ": rank 1 is gone" in said(r, 1), str(r)
