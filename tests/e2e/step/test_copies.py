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


@pytest.fixture
def a_step(known):
    """A run of two hosts, and what its last step sends, of rank 0, and fetches."""
    def a_step(group, home="none", **more):
        two, three = (known(RANKS, config(group, home, **{**more, "run.steps": n}),
                            env=on("aabb")) for n in (2, 3))
        return three, {k: three.summary[k] - two.summary[k]
                       for k in ("sent_bytes", "far_bytes", "fetched_bytes")}
    return a_step


@pytest.mark.parametrize("home, ring", (("none", 1), ("cpu", LAYERS + 1)))
def test_a_fetch_does_not_leave_the_host(home, ring, a_step):
    """Whatever the ring fetches: between hosts go the sums, and one shard of four
    to the other host's copy.  Without copies it leaves the host."""
    embed, *blocks, head = (4 * n for n in run.units(run.MODEL, RANKS))
    whole = embed + sum(blocks) + head
    fetched = 3 * embed + 2 * sum(blocks) + head if ring == 1 else whole
    (r, got), (without, plain) = (a_step(g, home, **{"run.ring": ring}) for g in (GROUP, 1))
    assert got["fetched_bytes"] == fetched
    assert got["far_bytes"] == (whole + embed) * 2 // 4 + whole // 4
    # rank 0 has one of the two shards that it is dealt, and sends its own once
    assert plain["sent_bytes"] - got["sent_bytes"] == \
        fetched * 3 // 4 - fetched // 2 - whole // 4
    assert plain["far_bytes"] - got["far_bytes"] == (fetched - whole) // 4
    # and a copy takes its part of all parameters
    copies = r.memory["parameter copies", "cpu" if home == "cpu" else "device"]
    assert copies[1] == whole // GROUP
    assert {k: v for k, v in r.memory.items() if "copies" not in k[0]} == without.memory
    assert f"every {GROUP} ranks have a copy of the parameters" in r.out


def test_frozen_parameters_are_copied_once(a_step):
    """Of a step's bytes to the other host, the trained ones alone."""
    frozen = {"parameters": [{"match": "h.[123].*", "frozen": True},
                             {"match": "h.0.attn.*", "frozen": True}]}
    (_, got), (_, plain) = (a_step(g, **frozen) for g in (GROUP, RANKS))
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
