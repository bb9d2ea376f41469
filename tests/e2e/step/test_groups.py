# SPDX-License-Identifier: Apache-2.0
"""Sums within groups of ranks, then over groups: the same bits on any placement."""
import pytest

import run

GROUP = "run.sum_group"
STAGES = [(0, "fp32", {}), (1, "bf16", {}), (2, "fp16", {}),
          (3, "bf16", {"run.schedule": "breadth_first"}), (3, "fp32", {})]
HOSTS = ("aabb", "abbc", "messages", "aabb", "abbc")
MESSAGES = {"run.host_comm": "messages"}


def config(stage, dtype="bf16", **more):
    return {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2,
            "zero_optimization.stage": stage, "run.sum_order": "auto",
            **run.typed(dtype, initial_scale_power=4), **more}


def on(hosts):
    """Ranks of one letter are on one host."""
    return {"LD_PRELOAD": run.built("tests/libhosts.so"), "HOSTS": hosts}


@pytest.mark.parametrize("stage, dtype, more, hosts", [
    (*s, h) for s, h in zip(STAGES, HOSTS)])
def test_a_group_has_its_bits_on_any_placement(stage, dtype, more, hosts, place, known):
    c = config(stage, dtype, **more, **{GROUP: 2})
    want = known(4, c)
    r = place.good(4, {**c, **MESSAGES}) if hosts == "messages" else \
        place.good(4, c, env=on(hosts))
    assert r.numbers == want.numbers, str(r)
    assert r.summary["order_hash"] == want.summary["order_hash"]
    assert r.summary["sent_bytes"] == want.summary["sent_bytes"]


def test_a_group_of_all_ranks_or_of_one_is_none(place, known):
    found = {g: known(4, config(1, **{GROUP: g})).numbers for g in (1, 2, 4)}
    assert found[1] == found[4] != found[2]


@pytest.mark.parametrize("hosts, want", [
    ("aaaa", 4), ("aabb", 2), ("abcd", 1), ("abab", 1), ("aaab", 1), ("aaaabb", 2)])
def test_the_default_is_a_host(hosts, want, place):
    r = place.good(len(hosts), config(1, train_batch_size=24, **{"run.steps": 1}),
                   env=on(hosts))
    assert r.config["run"]["sum_group"] == want
    groups = len(hosts) // want if want > 1 else 1
    assert (f"then {groups} groups in fp32" in r.out) == (groups > 1), str(r)


def test_one_contribution_of_a_group_crosses(place):
    """Of a gradient a rank sends one of four parts to the other host, not two."""
    far = {}
    for g in (2, 4):
        for steps in (1, 2):
            r = place.good(4, config(1, "fp32", **{GROUP: g, "run.steps": steps}),
                           env=on("aabb"))
            far[g, steps] = r.summary["far_bytes"]
    parts = {g: far[g, 2] - far[g, 1] for g in (2, 4)}
    m, c = run.MODEL, run.MODEL["width"]
    embed, block, head = (-(-n // 256) * 64 * 4 for n in (
        (m["vocab"] + m["seq"]) * c, 12 * c * c + 13 * c, 2 * c))
    blocks = m["layers"] * block
    assert parts[4] - parts[2] == 2 * embed + blocks + head
    assert parts[2] == 2 * embed + blocks + head + embed + blocks + head
