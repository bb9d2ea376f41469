# SPDX-License-Identifier: Apache-2.0
"""The same global batches on another number of ranks: the same sums in another
order, so the same numbers but for rounding."""
import pytest

import rows
import run
from rows import near

BATCH = 24
STEPS = 6
# Relative bounds.  Only the order of sums differs, and only where a sum is
# rounded.  fp32: sums of up to 24 x 16 tokens' terms of one gradient element are
# cut in parts, each partial sum rounded to 2^-24; the loss sees a change of the
# weights only through the gradient, i.e. at 2^-24 x (depth of about 100 dependent
# roundings in 6 steps) = 6e-6.  bf16 and fp16: each rank's gradient is rounded to
# 2^-9 or 2^-12 before the sum over ranks, an update of the weights has that
# relative error, and the loss moves by less than 30 % in 6 steps: 0.3 x 2^-9 =
# 6e-4; fp16 also loses small elements (2^-24 / the scale of 256), which Adam's
# first steps make as large as any, and gets the same bound.
BOUNDS = {"fp32": (1e-5, 1e-5), "bf16": (6e-4, 1e-2), "fp16": (6e-4, 1e-2)}


def config(dtype):
    return {"train_batch_size": BATCH, "run.steps": STEPS,
            "gradient_clipping": 0.5, "zero_optimization.stage": 3,
            **run.typed(dtype, initial_scale_power=8)}


@pytest.mark.parametrize("ranks, dtype", ((2, "bf16"), (3, "fp16"), (4, "fp32")))
def test_same_losses_on_any_number_of_ranks(ranks, dtype, known):
    r = known(ranks, config(dtype))
    assert len(r.steps) == STEPS
    near(known(1, config(dtype)).steps, r.steps, *BOUNDS[dtype])
    # It learns, so the comparison is not one of constants.
    assert r.losses[-1] < 0.95 * r.losses[0]


@pytest.mark.parametrize("ranks, update", ((1, "adam"), (2, "adam"), (1, "muon")))
def test_accumulation_is_exact_up_to_rounding(ranks, update, place, known):
    c = {**config("fp32"), **rows.UPDATES[update]}
    one = known(ranks, c)
    cut = place.good(ranks, {**c,
                             "train_micro_batch_size_per_gpu": 1,
                             "gradient_accumulation_steps": BATCH // ranks})
    near(one.steps, cut.steps, 1e-5, 1e-5)


def test_one_rank_may_be_mpiruns(place, known):
    """It is started without mpirun in all other tests."""
    assert place.apart([[]], {}).numbers == known(1, {}).numbers


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_collectives_start_in_one_order(stage, place):
    """The hash of kinds, sizes and names in order is the same however tasks are
    delayed."""
    hashes = {place.good(2, {"zero_optimization.stage": stage, "run.inject_seed": seed,
                             "run.inject_delay_us": 300 * (seed > 0)}).summary["order_hash"]
              for seed in range(3)}
    assert len(hashes) == 1


def test_memory_that_cannot_be_read(place):
    """No rank may read the memory of another, as in some containers."""
    forbid = run.built("tests/forbid")
    if run.call(forbid, "true").rc:
        pytest.skip("no seccomp here")
    place.wrap(f'#!/bin/sh\nexec "{forbid}" {{}} "$@"\n')
    c, env = config("fp32"), {"OMPI_MCA_btl_vader_single_copy_mechanism": "none"}
    r = place.launch(2, {**c, "run.host_comm": "memory"}, env=env)
    run.refused(r, "run.host_comm", "may not read the memory of rank")
    messages = place.good(2, {**c, "run.host_comm": "messages"}, env=env)
    auto = place.good(2, c, env=env)
    assert "ranks of one host send messages: rank 0 may not read" in auto.out
    assert "send messages" not in messages.out
    assert auto.bits == messages.bits
