# SPDX-License-Identifier: Apache-2.0
"""A copy of the parameters in each group of ranks: what it moves and where, what
it takes, and what it does not change.  (That no bit changes in any place,
schedule and type: test_matrix.py.)"""
import pytest

import run
from rows import on

KEY = "zero_optimization.zero_hpz_partition_size"
RANKS, GROUP, LAYERS = 4, 2, run.MODEL["layers"]


def config(group=GROUP, home="none", **more):
    """Without groups for sums: those of a host would have other bits elsewhere."""
    return {"train_batch_size": 12, "run.sum_group": RANKS, "run.ring": 1,
            **run.offload(3, home, home, None), KEY: group, **more}


def units():
    """Bytes of embedding, blocks and head in fp32, as padded for the ranks."""
    embed, *blocks, head = (4 * n for n in run.units(run.MODEL, RANKS))
    return embed, sum(blocks), head


@pytest.fixture
def two_hosts(known):
    """A run with or without groups on two hosts."""
    return lambda group, home="none", **more: known(RANKS, config(group, home, **more),
                                                    env=on("aabb"))


@pytest.fixture
def a_step(two_hosts):
    """What one more step sends, of rank 0, and what it fetches."""
    def a_step(group=GROUP, home="none", **more):
        runs = [two_hosts(group, home, **{**more, "run.steps": n}) for n in (2, 3)]
        return {k: runs[1].summary[k] - runs[0].summary[k]
                for k in ("sent_bytes", "far_bytes", "fetched_bytes")}
    return a_step


@pytest.mark.parametrize("home, ring", (("none", 1), ("cpu", LAYERS + 1)))
def test_a_fetch_does_not_leave_the_host(home, ring, a_step):
    """Whatever the ring fetches: between hosts go the sums, and one shard of four
    to the other host's copy.  Without copies it leaves the host."""
    embed, blocks, head = units()
    sums = 2 * embed + blocks + head
    whole = embed + blocks + head
    fetched = 3 * embed + 2 * blocks + head if ring == 1 else whole
    got, plain = (a_step(g, home, **{"run.ring": ring}) for g in (GROUP, 1))
    assert got["fetched_bytes"] == fetched
    assert got["far_bytes"] == sums * 2 // 4 + whole // 4
    # rank 0 has one of the two shards that it is dealt, and sends its own once
    assert plain["sent_bytes"] - got["sent_bytes"] == \
        fetched * 3 // 4 - fetched // 2 - whole // 4
    assert plain["far_bytes"] - got["far_bytes"] == (fetched - whole) // 4


def test_any_placement_sends_the_same(place, known):
    """Through memory or by messages, in one order.  The same bits: test_matrix.py."""
    want = known(RANKS, config())
    for r in (place.good(RANKS, config(), env=on("abab")),
              place.good(RANKS, config(**{"run.host_comm": "messages"}))):
        assert r.numbers == want.numbers, str(r)
        assert r.summary["order_hash"] == want.summary["order_hash"]
        assert r.summary["sent_bytes"] == want.summary["sent_bytes"] > 0


@pytest.mark.parametrize("home, ring", (("none", 1), ("cpu", LAYERS + 1)))
def test_a_copy_takes_its_part_of_all_parameters(home, ring, two_hosts):
    plain, r = (two_hosts(g, home, **{"run.ring": ring, "run.steps": 3})
                for g in (1, GROUP))
    tier = "cpu" if home == "cpu" else "device"
    assert r.memory[("parameter copies", tier)][1] == sum(units()) // GROUP
    have = {k: v for k, v in r.memory.items() if k[0] != "parameter copies"}
    assert have == plain.memory
    assert f"every {GROUP} ranks have a copy of the parameters" in r.out


def test_a_group_of_all_ranks_is_no_group(two_hosts):
    plain, r = (two_hosts(g, **{"run.ring": 1, "run.steps": 3}) for g in (1, RANKS))
    assert r.memory == plain.memory and r.numbers == plain.numbers
    for k in ("sent_bytes", "order_hash", "fetched_bytes"):
        assert r.summary[k] == plain.summary[k]


def test_frozen_parameters_are_copied_once(a_step):
    """Of a step's bytes to the other host, the trained ones alone."""
    frozen = {"parameters": [{"match": "h.[123].*", "frozen": True},
                             {"match": "h.0.attn.*", "frozen": True}]}
    got, plain = (a_step(g, **frozen) for g in (GROUP, RANKS))
    c = run.MODEL["width"]
    # as many bytes as a shard of four has in fp32
    embed, *_, block, head = run.units(run.MODEL, RANKS)
    trained = embed + head + block + run.padded(8 * c * c + 9 * c, RANKS)  # but attention
    fetched = plain["fetched_bytes"] // 4  # a remote shard comes to a host once
    assert plain["far_bytes"] - got["far_bytes"] == fetched - trained


@pytest.mark.parametrize("home, more", (
    ("none", {"lora": {"rank": 2, "targets": "*attn*"}}), ("cpu", {})))
def test_evaluation_samples_and_checkpoints_are_the_same(home, more, place):
    c = {"run.eval_batches": 2, "run.eval_interval": 1, "run.sample_tokens": 4,
         "run.sample_prompt": "In", "run.save_interval": 2, "run.steps": 5,
         "run.keep_last": 9, "run.inject_delay_us": 300,
         "zero_optimization.sub_group_size": 2048, **more}
    plain = place.good(RANKS, config(1, home, **{**c, "run.save_mode": "sync"}))
    r = place.good(RANKS, config(GROUP, home, **{**c, "run.save_mode": "async"}))
    assert r.numbers == plain.numbers and r.validation == plain.validation
    assert run.sampled(r) == run.sampled(plain)
    assert r.saved == plain.saved == [2, 4] and r.files == plain.files


# ---- limits ----

def test_what_does_not_fit_goes_without_copies(place, known):
    r = known(RANKS, config())
    most = {"run.memory_limit_bytes": r.bytes_in("device", "cpu")}
    place.good(RANKS, config(**most))
    most["run.memory_limit_bytes"] -= 1
    refused = place.launch(RANKS, config(**most))
    run.refused(refused, f"it fits with {KEY}=1")
    assert place.good(RANKS, config(1, **most)).numbers == r.numbers
