# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: what routers tell, and units of experts.  Their bits are in
test_matrix.py, their gradients in tests/e2e/hf/test_families.py."""
import json
import math
import re

import pytest

import rows
import run
from run import hf

ROW = {**rows.PLAIN, "model": "moe", "ranks": 1, "dtype": "fp32", "batch": 12, "steps": 3}


@pytest.fixture
def moe(place):
    rows.use(place, "moe")
    return place


@pytest.mark.parametrize("per_unit", (0, 3))
def test_a_plan_finds_the_largest_of_mixed_blocks(per_unit, moe):
    """Every other one has experts, which may be units of their own."""
    def said(layers, words):
        r = moe.good(1, {"model.width": 513, "model.moe_intermediate_size": 500,
                         "model.experts_per_unit": per_unit, "model.layers": layers,
                         "run.memory_limit_bytes": 10**15}, ["--plan"])
        return float(re.search(words, r.out)[1])
    few, many = (said(n, r"([\d.]+)M parameters") for n in (4, 8))
    most = said(4, r"at least 4096 blocks of this shape fit: ([\d.]+)B parameters")
    assert most * 1000 == pytest.approx(few + (many - few) / 4 * 4092, rel=2e-3)


def test_the_balance_is_a_choice_of_the_run(moe):
    """Another coefficient than an import's is no contradiction, another shape is."""
    out = moe.folder / "out"
    moe.good(1, {"run.export": str(out), "model.router_aux_loss_coef": 0.5})
    assert json.loads((out / "config.json").read_text())["router_aux_loss_coef"] == 0.5
    again = {"model.import": str(out), "model.router_aux_loss_coef": 0.25, "run.steps": 1}
    assert moe.good(1, again).config["model"]["router_aux_loss_coef"] == 0.25
    r = moe.launch(1, {**again, "model.num_experts": 3})
    run.refused(r, "model.num_experts: 3", "config.json it is 7")


def test_the_losses_of_routers_are_learnt(moe):
    """A coefficient changes the weights; the loss of step 1 is without it."""
    c = rows.config_of(ROW, None)
    runs = [moe.good(1, {**c, "run.hash": True,
                         f"model.router_{name}_loss_coef": value})
            for name, value in (("aux", 0), ("aux", 1), ("z", 0), ("z", 1))]
    assert len({r.hash for r in runs}) == 4
    assert len({r.losses[0] for r in runs}) == 1


TOLD = ("router_loss", "router_balance", "router_z", "expert_least", "expert_most",
        "dropped")


def told(r):
    return [[x[k] for k in TOLD] for x in r.steps]


def test_what_routers_tell_is_the_same_on_any_ranks(moe):
    """And in any place: test_matrix.py."""
    one, two = (told(moe.good(n, rows.config_of({**ROW, "ranks": n, "micro": 2}, None)))
                for n in (1, 2))
    assert all(x[3] < 1 < x[4] and x[5] == 0 for x in one)
    assert two == [pytest.approx(x, rel=1e-6) for x in one]


def test_a_line_of_what_is_not_finite_is_json(moe):
    r = moe.launch(1, {**rows.config_of(ROW, None), "run.steps": 200,
                       "optimizer.params.lr": 1e6, "optimizer.params.weight_decay": 0,
                       "parameters": [{"match": "*", "lr_scale": 1e6}]})
    assert r.rc == 1 and "not finite" in r.err, str(r)
    assert any(isinstance(x["router_loss"], str) for x in r.steps)


@pytest.mark.sanitized
def test_a_router_that_sees_no_difference(place):
    """All weights are zero: every token goes to the first experts."""
    place.use(run.built("models/moe"))
    shapes, c = hf.model_of("qwen3_moe")
    tensors = hf.random_tensors(shapes, "F32")
    for name, (dtype, shape, data) in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensors[name] = dtype, shape, bytes(len(data))
    folder = hf.write(place.folder / "in", tensors, c)
    r = place.good(1, {"model": {"import": str(folder), "seq": 16}, "run.steps": 1})
    e, k = c["num_local_experts"], c["num_experts_per_tok"]
    assert told(r)[0] == pytest.approx(
        [c["router_aux_loss_coef"] * k, k, math.log(e)**2, 0, e / k, 0])
    assert f"experts had 0.00 to {e / k:.2f} of an even share" in r.out


@pytest.mark.parametrize("per_unit", (0, 3))
def test_what_is_gathered_does_not_grow_with_the_blocks(per_unit, moe):
    """Units of every size that blocks repeat take turns."""
    gathered = {}
    for layers in (6, 12):
        r = moe.good(1, {"zero_optimization.stage": 3, "run.ring": 2,
                         "model.layers": layers, "model.experts_per_unit": per_unit},
                     ["--plan", "--ranks", 2])
        gathered[layers] = run.planned(r.out, ("gathered units",))
    assert 0 < gathered[6] == gathered[12]


# ---- experts as units of their own ----

def test_units_of_experts_are_the_same_model(moe):
    """However a block is cut: the same losses and, in the end, the same folder."""
    row = {**ROW, "micro": 3, "slices": 1, "clip": 0}
    c, begin = rows.config_of(row, None), moe.folder / "begin"
    moe.good(1, {**c, "run.steps": 1, "run.export": str(begin)})
    model = {"import": str(begin), **{k: rows.MOE[k] for k in (
        "seq", "router_aux_loss_coef", "router_z_loss_coef")}}
    runs, folders = [], []
    for ranks, n, more in ((1, 0, {}), (1, 1, {}), (1, 3, {"recompute": "none"}), (1, 7, {}),
                           (2, 0, {}), (2, 2, {"stage": 3, "param": "cpu",
                                               "schedule": "breadth_first"})):
        out = moe.folder / f"out{ranks}.{n}"
        r = moe.good(ranks, {**rows.config_of({**row, **more}, None), "run.export": str(out),
                             "model": {**model, "experts_per_unit": n}})
        runs.append((ranks, r.losses, r.validation))
        folders.append((ranks, hf.read(out)))
    for have in (runs, folders):
        for ranks in (1, 2):
            first, *others = (x for x in have if x[0] == ranks)
            assert others and all(x == first for x in others)
    assert runs[0][1][2] < runs[0][1][0]
