# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: what is refused.  Their bits are in test_matrix.py, their
gradients in tests/models/test_moe.c."""
import pytest

import rows
import run

pytestmark = pytest.mark.single


@pytest.fixture
def moe(place):
    rows.use(place, "moe")
    return place


def test_a_gpu_is_refused_before_step_0(moe):
    machine = run.ROOT / "configs/machines/h100-80-dgx.json"
    r = moe.launch(1, {}, ["--plan", "--machine", str(machine)])
    run.refused(r, "run.device", "mixtures of experts (moe) run on the CPU alone")


def test_folders_of_hugging_face_are_refused(moe):
    out = moe.folder / "out"
    run.refused(moe.launch(1, {"run.export": str(out)}), "run.export",
                "this model has no names for it")
    r = moe.launch(1, {"model.import": str(moe.folder)})
    run.refused(r, "model.import", "this model has no names for it")
    assert not out.exists()


def test_experts_are_not_kept_in_4_bits(moe):
    r = moe.launch(1, {"model.base_dtype": "nf4",
                       "lora": {"rank": 2, "alpha": 2, "targets": "*attn*"}})
    run.refused(r, "model.base_dtype: nf4", "experts of moe")


def test_the_losses_of_routers_are_learnt(moe):
    """A coefficient changes the weights; the loss of step 1 is without it."""
    row = {**rows.PLAIN, "model": "moe", "ranks": 1, "dtype": "fp32", "batch": 12,
           "steps": 2}
    c = rows.config_of(row, None)
    runs = [moe.good(1, {**c, "run.hash": True,
                         f"model.router_{name}_loss_coef": value})
            for name, value in (("aux", 0), ("aux", 1), ("z", 0), ("z", 1))]
    assert len({r.hash for r in runs}) == 4
    assert len({r.losses[0] for r in runs}) == 1
