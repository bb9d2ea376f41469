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
        with contextlib.suppress(OSError):
            if str(config).encode() in line.read_bytes().split(b"\0") and \
                    run.alive(line.parent.name):
                found.append(line.parent.name)
    return found


def ended(place, nvme, row, env, act=lambda run_: None, **changes):
    """A run that trains for ever unless something is wrong; how it has ended.
    All of its processes are gone.  Open MPI 4.1's launcher may crash on a message
    that comes while it ends (abort_ranks in runtime/comm/open.c), and what it
    leaves then is not the program's: such a run is made again."""
    row = {**ROW, "stage": 3, **row}
    for _ in range(3):
        config = place.config({**rows.config_of(row, nvme), "run.steps": STEPS,
                               "gradient_clipping": 0, **changes})
        run_ = run.Run(place.command(row["ranks"], config), config,
                       {**rows.environment(place, row), **env})
        try:
            act(run_)
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
        if r.rc != -signal.SIGSEGV:
            break
    assert not left and r.rc == 1, str(r)
    if r.steps:  # the last step was written just before
        written = (r.output / "metrics.jsonl").stat().st_mtime
        assert now - written < TIMEOUT_S + PROMPT_S, str(r)
    return r


def said(r, victim=None):
    """What the first rank that noticed has said; a stuck rank may be one."""
    lines = [x for x in r.err.splitlines() if x.startswith("izar: rank ")]
    assert lines and not lines[0].startswith(f"izar: rank {victim}:"), str(r)
    return lines[0]


def nccl(ranks):
    return {"ranks": ranks, "comm": "nccl"}


def fault(victim, number, **more):
    return {"IZ_STANDIN_FAULT": f"{victim}:100:{int(number)}", **more}


@pytest.mark.parametrize("ranks, victim", [(2, 0), (3, 1)])
def test_nccl_tells_of_a_rank_that_was_killed(ranks, victim, place, nvme):
    place.wrap(REAPED)
    r = ended(place, nvme, nccl(ranks), fault(victim, signal.SIGKILL))
    line = said(r, victim)
    assert "NCCL: remote process exited" in line, str(r)
    assert " (all-gather)" in line or " (reduce-scatter)" in line, str(r)
    assert 1 <= len(r.steps) < 100 or victim == 0, str(r)


@pytest.mark.parametrize("ranks, victim, parent", [
    (2, 0, REAPED), (2, 1, UNREAPED), (3, 1, REAPED), (3, 2, UNREAPED)],
    ids=["0 of 2", "unreaped 1 of 2", "1 of 3", "unreaped 2 of 3"])
def test_nobody_tells_of_a_rank_that_was_killed(ranks, victim, parent, place, nvme):
    """Between GPUs of one host NCCL does not notice."""
    place.wrap(parent)
    r = ended(place, nvme, nccl(ranks), fault(victim, signal.SIGKILL, IZ_STANDIN_SILENT="1"))
    assert f" through NCCL): rank {victim} is gone" in said(r, victim), str(r)


# The first calls wait for other ranks on the host, not on the GPU.
@pytest.mark.parametrize("ranks, victim, env, steps, what", [
    (3, 0, fault(0, signal.SIGSTOP), STEPS, "through NCCL): is another rank dead or stopped?"),
    *((2, None, {"IZ_STANDIN_BLOCKS": call}, 2, what) for call, what in (
        ("ncclCommInitRank", "the communicator (connecting through NCCL)"),
        ("ncclGroupEnd", " (reduce-scatter through NCCL)"),
        ("ncclCommDestroy", "the communicator (closing through NCCL)")))])
def test_a_rank_or_a_call_that_stops(ranks, victim, env, steps, what, place, nvme):
    r = ended(place, nvme, nccl(ranks), env,
              **{"run.comm_timeout_s": TIMEOUT_S, "run.steps": steps})
    line = said(r, victim)
    assert f": waited {TIMEOUT_S} s for " in line and what in line, str(r)


def test_a_rank_that_was_killed_in_a_collective_of_the_host(place, nvme):
    """The ranks' GPUs talk through MPI."""
    def kill(run_):
        run_.until_step(3)
        victim, = run.children(run_.pids()[1])
        os.kill(victim, signal.SIGKILL)
    place.wrap(REAPED)
    r = ended(place, nvme, {"ranks": 2, "comm": "mpi"}, {}, kill)
    assert ": rank 1 is gone" in said(r, 1), str(r)
