# SPDX-License-Identifier: Apache-2.0
"""Every bit of a gradient's sum, beside a slow sum that is made from the declared
order alone (tests/fake/summed.c)."""
import re

import pytest

import run

ACCUM = "data_types.grad_accum_dtype"
GROUP = "run.sum_group"
MESSAGES = {"run.host_comm": "messages"}
ORDERS = ("ranks_first", "local_first")
BROAD = {"run.schedule": "breadth_first"}
PLACES = {
    "0": (0, {}), "1": (1, {}), "2 broad": (2, BROAD), "3 broad": (3, BROAD),
    "2 waves": (2, {"run.parallel_micro_batches": 2}), "3": (3, {})}
# Ranks, samples of a micro-batch, slices, type, and more.
SUMS = [(3, 2, 2, "fp32", {}), (3, 2, 1, "bf16", {}), (2, 1, 1, "fp16", {}),
        (3, 2, 2, "bf16", {ACCUM: "bf16"}), (2, 4, 4, "bf16", {}),
        (1, 2, 2, "bf16", {ACCUM: "bf16"}), (2, 8, 2, "bf16", {ACCUM: "fp32"}),
        (4, 4, 2, "bf16", {GROUP: 2}), (6, 4, 1, "fp16", {GROUP: 3}),
        (4, 8, 1, "bf16", {GROUP: 2}), (4, 4, 1, "fp32", {GROUP: 2, **MESSAGES})]


def config(case, order, place="1"):
    ranks, micro, slices, dtype, more = case
    stage, other = PLACES[place]
    return {"train_batch_size": 8 * ranks, "run.steps": 2, "run.slices": slices,
            "train_micro_batch_size_per_gpu": micro, "run.sum_order": order,
            "run.parallel_micro_batches": 1, "zero_optimization.stage": stage,
            **run.typed(dtype, initial_scale_power=0), **other, **more}


# Each sum in each order, and each order in every place.
WHERE = [(o, p) for o in ORDERS for p in PLACES if (o, p) != ("local_first", "3")]
CASES = [(s, order, [p for o, p in WHERE if o == order][i % (6 - j)])
         for j, order in enumerate(ORDERS) for i, s in enumerate(SUMS)]


@pytest.mark.parametrize("case, order, where", CASES, ids=str)
def test_a_sum_has_the_declared_bits(case, order, where, place):
    place.program = run.built("tests/summed")
    r = place.good(case[0], config(case, order, where))
    compared = re.findall(r"^summed: (\d+) elements compared$", r.out, re.M)
    assert len(compared) == 1 and \
        int(compared[0]) > 2 * run.parameters(run.MODEL) // case[0], str(r)


def test_the_declaration_is_printed(place):
    r = place.launch(1, config(SUMS[7], "local_first"), ["--plan", "--ranks", 4])
    assert "then 2 ranks in fp32 (as bf16), then 2 groups in fp32\n" in r.out, str(r)
    for order, words in (("ranks_first", "2 slices in fp32 (as bf16), then 3 ranks in "
                          "fp32, then 4 micro-batches in fp32"),
                         ("local_first", "2 slices in fp32, then 4 micro-batches in "
                          "fp32 (as bf16), then 3 ranks in fp32")):
        r = place.launch(1, config((3, 2, 2, "bf16", {}), order), ["--plan", "--ranks", 3])
        assert f"gradients are added over {words}\n" in r.out, str(r)
