# SPDX-License-Identifier: Apache-2.0
"""The squares of a gradient come from the sum that leaves it in its accumulator.
A norm task, which reads the accumulator once more, is there only where the host
forms no such sum."""
import pytest

from run import UNITS

ACCUMULATED = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}


# The embedding's weight is the head's too: two contributions, so that even
# where backward writes gradients in place there is a sum.  Of several
# micro-batches each use has an accumulator, and the norm adds them.
@pytest.mark.parametrize("ranks,stage,changes,left", (
    (1, 1, {}, UNITS - {0}),
    (1, 2, {}, set()),
    (1, 0, {"run.slices": 2}, set()),
    (1, 0, ACCUMULATED, {0}),
    (2, 0, {}, set()),
    (2, 3, {}, set()),
    (2, 1, {"run.host_comm": "messages"}, set()),
    (2, 3, {**ACCUMULATED, "bf16.enabled": True}, {0}),
))
def test_a_unit_has_a_norm_task_only_without_a_sum(ranks, stage, changes, left,
                                                   place):
    r = place.good(ranks, {"zero_optimization.stage": stage, **changes,
                           "run.task_log": True})
    assert r.units("norm") == left, str(r)


# The model's blocks have 3 chunks of 4096 elements, its embedding has 2.
@pytest.mark.parametrize("ranks,changes,sums,squares", (
    (1, {"run.slices": 2}, {0: 2 * 2, 1: 2, 2: 2, 3: 1}, {0: 1, 1: 1, 2: 1}),
    (1, ACCUMULATED, {0: 2 * 4 * 2, 1: 4 * 2, 2: 4 * 2, 3: 4}, {0: 2 + 1, 1: 1, 2: 1}),
    (2, ACCUMULATED, {0: 2 * 2, 1: 2, 2: 2, 3: 2}, {0: 2 + 1}),
))
def test_all_workers_share_a_sum(ranks, changes, sums, squares, place):
    """Squares: a task per piece of the tied embedding, and one of all blocks."""
    def numbers(workers):
        r = place.good(ranks, {"zero_optimization.stage": 2, "model.layers": 2,
                               "zero_optimization.sub_group_size": 4096 // ranks,
                               "run.slices": 1, **changes, "run.workers": workers,
                               "run.task_log": True})
        if workers > 1:
            assert (r.per_step("reduce"), r.per_step("norm")) == (sums, squares)
        return r.numbers
    assert numbers(2) == numbers(1)
