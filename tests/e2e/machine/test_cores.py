# SPDX-License-Identifier: Apache-2.0
"""Which cores the ranks of a host compute on: what several may use is divided,
and refused where it is not clear whose it is."""
import os
import pathlib

import pytest

import run
from inputs import topology

# A plan looks how many blocks fit: not into all of a large memory.
CONFIG = {"train_batch_size": 6, "run.steps": 1, "run.workers": 0,
          "run.memory_limit_bytes": 1 << 25}


def test_cores_that_sets_share_in_part_are_refused(place):
    """As if of 8 cores each rank might use these."""
    r = place.apart([["env", "-u", "HWLOC_COMPONENTS", "HWLOC_XMLFILE=" + topology(
        place.folder / f"host{i}.xml", 2, 4, cores)]
        for i, cores in enumerate(([0, 1, 2, 3], [2, 3, 4, 6]))], CONFIG, ["--plan"])
    run.refused(r, "ranks 0 and 1 may both use cores 2-3, but their cores (0-3 and "
                "2-4,6) overlap")


def test_a_host_of_more_processors_than_are_counted_is_refused(place):
    r = place.launch(1, CONFIG, ["--plan"], env={
        "HWLOC_SYNTHETIC": "core:1024 pu:4", "HWLOC_COMPONENTS": None})
    run.refused(r, "rank 0 may use processor 2048 of this host: bind it to the first 2048")


@pytest.mark.parametrize("first", (0, 1))
def test_a_rank_leaves_cores_to_one_that_has_no_others(first, place):
    cores = {pathlib.Path(f"/sys/devices/system/cpu/cpu{c}/topology/thread_siblings_list")
             .read_text(): c for c in sorted(os.sched_getaffinity(0), reverse=True)}
    two = sorted(cores.values())[:2]
    if len(two) < 2:
        pytest.skip("needs two cores")
    words = [["taskset", "-c", str(two[0])],
             ["taskset", "-c", f"{two[0]},{two[1]}"]]
    r = place.apart(words if first else words[::-1], CONFIG, env={"STARPU_SILENT": "1"})
    assert r.rc == 0, str(r)
    for line in ([f"ranks 0-1: 1 worker each on cores {two[0]} and {two[1]} of"] if first
                 else [f"rank {i}: 1 worker on core {two[1 - i]} of" for i in (0, 1)]):
        assert line in r.out, str(r)
