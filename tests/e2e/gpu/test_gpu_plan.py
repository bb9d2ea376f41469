# SPDX-License-Identifier: Apache-2.0
"""A plan for N ranks on this host is the one that N started ranks have: with as
many GPUs as the stand-in shows, a rank each or several to one."""
import re

import pytest

import run
from inputs import topology
from test_gpu import ROW

pytestmark = pytest.mark.skipif(run.GPU != "standin",
                                reason="needs several GPUs of the stand-in")
SAME_GPU = "run.comm: several ranks have the same GPU"


@pytest.fixture
def plan(start):
    """What a plan for these ranks prints, or theirs where they are started."""
    def plan(started, ranks, gpus, comm, more=(), workers=0, **env):
        row = {**ROW, "stage": 2, "optimizer": "cpu", "ranks": started, "comm": comm,
               "micro": 1, "workers": workers}
        options = [] if started > 1 else ["--ranks", ranks]
        return start(row, {"run.memory_limit_bytes": 10**11}, good=False,
                     options=["--plan", *options, *more],
                     env={"IZ_STANDIN_DEVICES": str(gpus), **env})
    return plan


def shared(r):
    return [int(n) for n in re.findall(
        r"^(\d+) of them share a GPU: [\d.]+ MiB each$", r.out, re.M)]


@pytest.mark.parametrize("ranks, gpus, comm, sharing", [
    (2, 2, "mpi", 1), (3, 4, "nccl", 1), (2, 1, "mpi", 2), (3, 2, "mpi", 2)])
def test_ranks_of_a_plan_share_the_gpus_of_this_host(ranks, gpus, comm, sharing, plan):
    """What collectives need is on the GPU, or pinned on the host."""
    said, started = (plan(n, ranks, gpus, comm) for n in (1, ranks))
    assert said.rc == 0 and said.out == started.out, f"{said}\n{started}"
    assert shared(said) == ([sharing] if sharing > 1 else [])
    device, host = map(float, re.search(r"^ *collectives +(\S+) +(\S+)", said.out, re.M).groups())
    assert (device > host == 0) if comm == "nccl" else (host > device == 0)
    if sharing > 1:
        # fewer blocks have room in a part of the GPU
        few, many = (int(re.search(r"up to (\d+) blocks", r.out)[1])
                     for r in (said, plan(1, 1, gpus, comm)))
        assert few < many


@pytest.mark.parametrize("ranks, gpus, comm, env", [
    (2, 1, "auto", {}), (3, 2, "nccl", {}),
    (2, 2, "auto", {"STARPU_WORKERS_CUDAID": "1"})])
def test_more_ranks_of_a_plan_than_gpus_are_refused(ranks, gpus, comm, env, plan):
    run.refused(plan(1, ranks, gpus, comm, **env), SAME_GPU, "run.comm: mpi",
                "--machine")
    run.refused(plan(ranks, ranks, gpus, comm, **env), SAME_GPU, "run.comm: mpi")


def test_some_ranks_are_started_for_a_plan_of_more(plan):
    fits = plan(2, 4, 4, "auto", ["--ranks", 4])
    assert fits.rc == 0, str(fits)
    run.refused(plan(2, 4, 2, "auto", ["--ranks", 4]), SAME_GPU)


def test_started_ranks_that_see_a_gpu_each(plan, place):
    """As a launcher may arrange it: there are as many as ranks were started."""
    place.wrap("#!/bin/sh\nSTARPU_WORKERS_CUDAID=$OMPI_COMM_WORLD_LOCAL_RANK "
               'exec {} "$@"\n')
    r = plan(2, 2, 2, "mpi", ["--ranks", 4])
    assert r.rc == 0 and shared(r) == [2], str(r)


@pytest.mark.parametrize("ranks, sharing", [(2, 1), (3, 2)])
def test_ranks_near_other_gpus_have_other_cores(ranks, sharing, place, plan):
    """Two packages of 12 cores with a GPU each: the plan has
    buffers for the workers of 12 cores, or of 6."""
    # The GPU's driver has a core, and of many cores copies have one too.
    workers = 10 if sharing == 1 else 5
    want = plan(1, ranks, 2, "mpi", workers=workers)
    path = topology(place.folder / "host.xml", 2, 12)
    place.wrap(f'#!/bin/sh\nexec env -u HWLOC_COMPONENTS HWLOC_XMLFILE={path} {{}} "$@"\n')
    for started in (1, ranks):
        r = plan(started, ranks, 2, "mpi")
        assert r.rc == 0 and r.out == want.out, f"{r}\n{want}"
