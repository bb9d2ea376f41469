# SPDX-License-Identifier: Apache-2.0
"""Sums within groups of ranks, then over groups: what they are and what they send.
(The same bits on any placement: test_matrix.py.)"""
import pytest

import run
from rows import on

GROUP = "run.sum_group"


def config(dtype="bf16", **more):
    return {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2,
            "zero_optimization.stage": 1, "run.sum_order": "auto",
            **run.typed(dtype), **more}


def test_a_group_of_all_ranks_or_of_one_is_none(known):
    found = {g: known(4, config(**{GROUP: g})).numbers for g in (1, 2, 4)}
    assert found[1] == found[4] != found[2]


@pytest.mark.parametrize("hosts, want", [
    ("aaaa", 4), ("aabb", 2), ("abcd", 1), ("abab", 1), ("aaab", 1), ("aaaabb", 2)])
def test_the_default_is_a_host(hosts, want, place):
    r = place.good(len(hosts), config(train_batch_size=24, **{"run.steps": 1}),
                   env=on(hosts))
    assert r.config["run"]["sum_group"] == want
    groups = len(hosts) // want if want > 1 else 1
    assert (f"then {groups} groups in fp32" in r.out) == (groups > 1), str(r)


def test_one_contribution_of_a_group_crosses(known):
    """Of a gradient a rank sends one of four parts to the other host, not two."""
    def far(group, steps):
        return known(4, config("fp32", **{GROUP: group, "run.steps": steps}),
                     env=on("aabb")).summary["far_bytes"]
    embed, *rest = run.units(run.MODEL, 4)  # as many bytes as a quarter has in fp32
    parts = 2 * embed + sum(rest)
    assert far(4, 2) - far(4, 1) == 2 * parts + embed + sum(rest)
    assert far(2, 2) - far(2, 1) == parts + embed + sum(rest)
