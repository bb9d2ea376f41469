# SPDX-License-Identifier: Apache-2.0
"""The same global batches on another number of ranks: the same sums in another
order, so the same numbers but for rounding."""
import math
import pathlib
import subprocess

import pytest

import run

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
    c = {"train_batch_size": BATCH, "run.steps": STEPS,
         "gradient_clipping": 0.5, "zero_optimization.stage": 3}
    if dtype != "fp32":
        c[f"{dtype}.enabled"] = True
    if dtype == "fp16":
        c["fp16.initial_scale_power"] = 8
    return c


@pytest.fixture(scope="module")
def alone():
    return {}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_same_losses_on_any_number_of_ranks(ranks, dtype, alone, place):
    if dtype not in alone:
        alone[dtype] = place.good(None, config(dtype)).steps
    steps = place.good(ranks, config(dtype)).steps
    assert len(steps) == len(alone[dtype]) == STEPS
    loss_bound, norm_bound = BOUNDS[dtype]
    for a, b in zip(alone[dtype], steps):
        assert math.isclose(a["loss"], b["loss"], rel_tol=loss_bound)
        assert math.isclose(a["grad_norm"], b["grad_norm"], rel_tol=norm_bound)
    # It learns, so the comparison is not one of constants.
    assert steps[-1]["loss"] < 0.95 * steps[0]["loss"]


@pytest.mark.parametrize("ranks", (None, 2, 4))
def test_accumulation_is_exact_up_to_rounding(ranks, place):
    n = ranks or 1
    one = place.good(ranks, config("fp32"))
    cut = place.good(ranks, {**config("fp32"),
                             "train_micro_batch_size_per_gpu": 1,
                             "gradient_accumulation_steps": BATCH // n})
    for a, b in zip(one.steps, cut.steps, strict=True):
        assert math.isclose(a["loss"], b["loss"], rel_tol=1e-5)
        assert math.isclose(a["grad_norm"], b["grad_norm"], rel_tol=1e-5)


@pytest.mark.single
def test_bounds_tell_another_batch_apart(place):
    def losses(batch):
        return place.good(None, {**config("fp32"),
                                 "train_batch_size": batch}).losses
    want = losses(BATCH)
    assert not any(math.isclose(x, y, rel_tol=BOUNDS["fp32"][0])
                   for x, y in zip(want, losses(BATCH - 1)))
    assert not all(math.isclose(x, y, rel_tol=BOUNDS["bf16"][0])
                   for x, y in zip(want, losses(BATCH // 2)))


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_collectives_start_in_one_order(stage, place):
    """The hash of kinds, sizes and names in order is the same however tasks are
    delayed."""
    hashes = set()
    for seed in range(4):
        r = place.good(2, {"zero_optimization.stage": stage,
                           "run.inject_delay_us": 300 * (seed > 0),
                           "run.inject_seed": seed})
        hashes.add(r.summary["order_hash"])
    assert len(hashes) == 1


@pytest.mark.parametrize("stage, dtype", [(0, "fp32"), (2, "bf16"), (3, "fp32")])
def test_memory_and_messages_give_the_same_bits(stage, dtype, place):
    c = {**config(dtype), "zero_optimization.stage": stage}
    memory = place.good(3, {**c, "run.host_comm": "memory"})
    messages = place.good(3, {**c, "run.host_comm": "messages"})
    assert memory.bits == messages.bits and memory.hash == messages.hash
    assert memory.summary["order_hash"] == messages.summary["order_hash"]
    assert memory.summary["sent_bytes"] == messages.summary["sent_bytes"] > 0


@pytest.fixture
def forbidden(tmp_path, monkeypatch):
    """No rank may read the memory of another, as in some containers."""
    forbid = pathlib.Path(run.PROGRAM).parents[1] / "tests" / "forbid"
    if subprocess.run([forbid, "true"], check=False).returncode:
        pytest.skip("no seccomp here")
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\nexec {forbid} {run.PROGRAM} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(run, "PROGRAM", str(program))
    return {"STARPU_HOME": str(pathlib.Path(forbid).parents[1] / "starpu-home"),
            "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}


def test_memory_that_cannot_be_read(forbidden, place):
    c = config("fp32")
    r = place.launch(2, {**c, "run.host_comm": "memory"}, env=forbidden)
    run.refused(r, "run.host_comm", "may not read the memory of rank")
    messages = place.good(2, {**c, "run.host_comm": "messages"}, env=forbidden)
    auto = place.good(2, c, env=forbidden)
    assert "ranks of one host send messages: rank 0 may not read" in auto.out
    assert "send messages" not in messages.out
    assert auto.bits == messages.bits
