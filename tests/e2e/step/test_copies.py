# SPDX-License-Identifier: Apache-2.0
"""A copy of the parameters in each group of ranks: what it moves and where, what
it takes, and what it does not change.  (That no bit changes in any place,
schedule and type: test_matrix.py.)"""
import pytest

import run

KEY = "zero_optimization.zero_hpz_partition_size"
RANKS, GROUP, LAYERS = 4, 2, run.MODEL["layers"]
HOMES = ("none", "cpu")


def config(group=GROUP, home="none", **more):
    """Without groups for sums: those of a host would have other bits elsewhere."""
    return {"train_batch_size": 12, "run.sum_group": RANKS, "run.ring": 1,
            **run.offload(3, home, home, None), KEY: group, **more}


def on(hosts):
    """Ranks of one letter are on one host."""
    return {"LD_PRELOAD": run.built("tests/libhosts.so"), "HOSTS": hosts}


def units():
    """Bytes of embedding, blocks and head in fp32, as padded for the ranks."""
    m, c = run.MODEL, run.MODEL["width"]
    embed, block, head = (-(-n // (64 * RANKS)) * 64 * RANKS * 4 for n in (
        (m["vocab"] + m["seq"]) * c, 12 * c * c + 13 * c, 2 * c))
    return embed, LAYERS * block, head


def a_step(place, hosts, **more):
    """What one more step sends, of rank 0, and what it fetches."""
    runs = [place.good(RANKS, config(**{**more, "run.steps": n}), env=on(hosts))
            for n in (2, 3)]
    return {k: runs[1].summary[k] - runs[0].summary[k]
            for k in ("sent_bytes", "far_bytes", "fetched_bytes")}


@pytest.mark.parametrize("home", HOMES)
def test_a_fetch_does_not_leave_the_host(home, place):
    """Whatever the ring fetches: between hosts go the sums, and one shard of four
    to the other host's copy."""
    embed, blocks, head = units()
    sums = 2 * embed + blocks + head
    whole = embed + blocks + head
    for ring, fetched in ((1, 3 * embed + 2 * blocks + head), (LAYERS + 1, whole)):
        got = a_step(place, "aabb", home=home, **{"run.ring": ring})
        assert got["fetched_bytes"] == fetched
        assert got["far_bytes"] == sums * 2 // 4 + whole // 4
        # rank 0 has one of the two shards that it is dealt, and sends its own once
        plain = a_step(place, "aabb", group=1, home=home, **{"run.ring": ring})
        assert plain["sent_bytes"] - got["sent_bytes"] == \
            fetched * 3 // 4 - fetched // 2 - whole // 4


def test_without_copies_a_fetch_leaves_the_host(place):
    """The test above can fail."""
    far = [a_step(place, "aabb", group=g, **{"run.ring": ring})["far_bytes"]
           for g in (1, GROUP) for ring in (1, LAYERS + 1)]
    embed, blocks, _ = units()
    assert far[0] - far[1] == (2 * embed + blocks) // 4
    assert far[1] == far[2] == far[3]


@pytest.mark.parametrize("hosts", ("abcd", "abab", "aaab"))
def test_any_placement_has_the_same_bits(hosts, place):
    want = place.good(RANKS, config())
    r = place.good(RANKS, config(), env=on(hosts))
    assert r.numbers == want.numbers, str(r)
    assert r.summary["order_hash"] == want.summary["order_hash"]
    assert r.summary["sent_bytes"] == want.summary["sent_bytes"]


@pytest.mark.parametrize("home", HOMES)
def test_a_copy_takes_its_part_of_all_parameters(home, place):
    plain, r = (place.good(RANKS, config(g, home)) for g in (1, GROUP))
    tier = "cpu" if home == "cpu" else "device"
    assert r.memory[("parameter copies", tier)][1] == sum(units()) // GROUP
    have = {k: v for k, v in r.memory.items() if k[0] != "parameter copies"}
    assert have == plain.memory
    assert f"every {GROUP} ranks have a copy of the parameters" in r.out


def test_a_group_of_all_ranks_is_no_group(place):
    plain, r = (place.good(RANKS, config(g)) for g in (1, RANKS))
    assert r.memory == plain.memory and r.numbers == plain.numbers
    for k in ("sent_bytes", "order_hash", "fetched_bytes"):
        assert r.summary[k] == plain.summary[k]


def test_frozen_parameters_are_copied_once(place):
    """Of a step's bytes to the other host, the trained ones alone."""
    frozen = {"parameters": [{"match": "h.[123].*", "frozen": True},
                             {"match": "h.0.attn.*", "frozen": True}]}
    got = a_step(place, "aabb", **frozen)
    plain = a_step(place, "aabb", **frozen, group=RANKS)
    c = run.MODEL["width"]

    def shard(n):
        return -(-n // (64 * RANKS)) * 64 * 4
    attn = 4 * c * c + 4 * c
    block = shard(12 * c * c + 13 * c)
    trained = shard((run.MODEL["vocab"] + run.MODEL["seq"]) * c) + shard(2 * c) + \
        block + shard(12 * c * c + 13 * c - attn)
    fetched = plain["fetched_bytes"] // 4  # a far shard comes to a host once
    assert plain["far_bytes"] - got["far_bytes"] == fetched - trained


@pytest.mark.parametrize("home", HOMES)
def test_evaluation_and_samples_are_the_same(home, place):
    c = {"run.eval_batches": 2, "run.eval_interval": 1, "run.sample_tokens": 4,
         "run.sample_prompt": "In", "run.inject_delay_us": 300}
    plain, r = (place.good(RANKS, config(g, home, **c)) for g in (1, GROUP))
    assert r.numbers == plain.numbers and r.validation == plain.validation
    assert run.sampled(r) == run.sampled(plain)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("more", ({}, {"lora": {"rank": 2, "targets": "*attn*"}}))
def test_checkpoints_are_the_same_files(home, more, place):
    c = {"run.save_interval": 2, "run.steps": 5, "run.keep_last": 9,
         "run.inject_delay_us": 300, "zero_optimization.sub_group_size": 2048, **more}
    plain = place.good(RANKS, config(1, home, **{**c, "run.save_mode": "sync"}))
    r = place.good(RANKS, config(GROUP, home, **{**c, "run.save_mode": "async"}))
    assert r.numbers == plain.numbers
    assert r.saved == plain.saved == [2, 4] and r.files == plain.files


@pytest.mark.parametrize("before, after", [
    ((4, 2), (4, 2)), ((4, 1), (4, 2)), ((4, 2), (2, 1)), ((2, 1), (4, 2)),
    ((4, 2), (4, 1))])
def test_a_run_goes_on_with_copies_or_without(before, after, place):
    """And on another number of ranks, whose bits are its own."""
    def halves(a, b):
        first, then = ({**config(group), "run.save": True, "run.steps": n,
                        "run.sum_group": 1, "train_micro_batch_size_per_gpu": 12 // ranks}
                       for (ranks, group), n in ((a, 3), (b, 6)))
        half = place.good(a[0], first)
        return place.good(b[0], then, ["--resume"], output=half.output)
    r = halves(before, after)
    assert r.numbers == halves((before[0], 1), (after[0], 1)).numbers, str(r)


# ---- refusals ----

@pytest.mark.parametrize("changes, words", [
    ({"zero_optimization.stage": 2}, f"{KEY}: 2 needs zero_optimization.stage 3, found 2"),
    ({"zero_optimization.offload_param": {"device": "nvme", "nvme_path": "/x"}},
     f"{KEY}: 2 needs offload_param.device none or cpu, found nvme"),
    ({KEY: 3}, f"{KEY}: 3: groups of so many do not divide 4 ranks"),
    ({KEY: 8}, f"{KEY}: 8: groups of so many do not divide 4 ranks"),
    ({KEY: 0}, f"{KEY}: 0 is not in 1"),
    ({"zero_optimization.mics_shard_size": 2}, "mics_shard_size: 2")])
def test_what_cannot_be_is_refused(changes, words, place):
    for args in ([], ["--plan"]):
        run.refused(place.launch(RANKS, {**config(), **changes}, args), words,
                    everyone=True)


def test_what_does_not_fit_goes_without_copies(place):
    plain, r = (place.good(RANKS, config(g)) for g in (1, GROUP))
    most = {"run.memory_limit_bytes": r.bytes_in("device", "cpu")}
    assert place.good(RANKS, config(**most)).numbers == r.numbers
    most["run.memory_limit_bytes"] -= 1
    refused = place.launch(RANKS, config(**most))
    run.refused(refused, f"it fits with {KEY}=1")
    assert place.good(RANKS, config(1, **most)).numbers == plain.numbers
