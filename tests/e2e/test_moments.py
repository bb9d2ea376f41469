# SPDX-License-Identifier: Apache-2.0
"""m and v in fewer bytes: the bits depend neither on stage, home nor chunks, a
checkpoint keeps them, and training learns as it does with fp32."""
import pytest

import run

KINDS = ("bf16", "fp8")
HOMES = [(0, "none", "none"), (1, "nvme", "none"), (2, "cpu", "none"),
         (3, "cpu", "cpu"), (3, "nvme", "nvme")]


def config(kind, dtype="fp32", home=HOMES[0], nvme=None, **more):
    c = {"train_batch_size": 8, "gradient_accumulation_steps": 2,
         "run.steps": 6, "run.state_dtype": kind, **more,
         **run.offload(*home, nvme)}
    if dtype != "fp32":
        c[f"{dtype}.enabled"] = True
    return c


@pytest.mark.parametrize("ranks, kind, dtype", [
    (None, "bf16", "bf16"), (2, "fp8", "fp32")])
def test_stage_home_and_chunks_do_not_matter(ranks, kind, dtype, place, nvme):
    n = ranks or 1
    micro = {"train_micro_batch_size_per_gpu": 4 // n}
    want = place.good(ranks, config(kind, dtype, **micro))
    for home in HOMES[1:]:
        chunk = {"zero_optimization.sub_group_size": 3000} \
            if home[0] == 3 else {}
        got = place.good(ranks, config(kind, dtype, home, nvme, **micro,
                                       **chunk))
        assert got.bits == want.bits and got.hash == want.hash, home


@pytest.mark.parametrize("kind, a, b", [("fp8", 4, 4), ("bf16", 1, 3)])
def test_three_and_three_are_six(kind, a, b, place, nvme):
    more = {"train_micro_batch_size_per_gpu": 2, "run.save": True}
    out = place.folder / "halves"
    want = place.good(2, config(kind, home=HOMES[a], nvme=nvme, **more))
    place.good(2, {**config(kind, home=HOMES[a], nvme=nvme, **more),
                   "run.steps": 3}, output=out)
    got = place.good(2, config(kind, home=HOMES[b], nvme=nvme, **more),
                     ["--resume"], output=out)
    assert got.bits == want.bits and got.hash == want.hash


def test_continues_on_another_number_of_ranks_and_kind(place, nvme):
    """fp8's blocks are cut elsewhere in the files, not elsewhere in a group."""
    out = place.folder / "halves"
    more = {"run.save": True, "train_batch_size": 8}
    place.good(2, {**config("fp8", **more), "run.steps": 3,
                   "train_micro_batch_size_per_gpu": 2}, output=out)
    place.good(1, {**config("fp8", home=HOMES[3], **more), "run.steps": 4},
               ["--resume"], output=out)
    place.good(1, config("bf16", home=HOMES[1], nvme=nvme, **more), ["--resume"],
               output=out)


def test_every_kind_learns(place):
    last = {kind: place.good(None, config(kind, **{"run.steps": 40}))
            .steps[-1]["loss"] for kind in ("fp32", *KINDS)}
    for kind in KINDS:
        assert abs(last[kind] - last["fp32"]) < 0.02 * last["fp32"], last
    assert len(set(last.values())) == 3


@pytest.mark.parametrize("kind, size", [("fp32", 8), ("bf16", 4),
                                        ("fp8", 2 + 2 / 64)])
def test_the_plan_knows(kind, size, place):
    r = place.good(None, config(kind, **{"run.steps": 1}))
    n = run.parameters(run.MODEL)
    held = sum(planned for (name, _), (planned, _) in r.memory.items()
               if name == "optimizer")
    assert size * n <= held <= size * (n + 64 * 7)
