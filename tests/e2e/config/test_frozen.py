# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters: no gradient, no state, and no backward below the lowest
unit that is trained."""
import fnmatch

import pytest

import run
from run import hf


def only(*patterns):
    """Nothing is trained but what matches."""
    return {"parameters": [{"match": "*", "frozen": True}] +
            [{"match": p, "frozen": False} for p in patterns]}


def but(*patterns):
    return {"parameters": [{"match": p, "frozen": True} for p in patterns]}


def is_frozen(name, rules):
    frozen = False
    for r in rules["parameters"]:
        if fnmatch.fnmatchcase(name, r["match"]):
            frozen = r["frozen"]
    return frozen


# ---- bytes ----

def sizes(rules):
    """Elements of each unit, trained and frozen."""
    units = {}
    for name, shape in hf.gpt2_shapes(run.MODEL, "").items():
        unit = (name.split(".")[1] if name.startswith("h.") else
                "head" if name.startswith("ln_f") else "embed")
        n = shape[0] * (shape[1] if len(shape) > 1 else 1)
        pair = units.setdefault(unit, [0, 0])
        pair[is_frozen(name, rules)] += n
    return units.values()


CASES = {"bottom": but("w[tp]e.weight", "h.[012].*"),
         "attention": but("h.?.attn.*", "wte.weight"),
         "vectors": only("*.bias", "*ln_?.weight"),
         "head": only("ln_f.*"),
         "positions": only("wpe.weight")}


@pytest.mark.parametrize("case, stage, ranks", [
    (case, *((2, 3), (3, 2), (0, 1))[i % 3]) for i, case in enumerate(CASES)])
def test_bytes_are_those_of_the_arithmetic(case, stage, ranks, place):
    n, rules = ranks, CASES[case]
    r = place.good(ranks, {**rules, "zero_optimization.stage": stage,
                           "bf16.enabled": True, "train_batch_size": 4 * n,
                           "run.steps": 1, "run.slices": 1})
    trained = sum(run.padded(t, n) for t, _ in sizes(rules))
    whole = trained + sum(run.padded(f, n) for _, f in sizes(rules))
    assert r.bytes_of("parameters") == 2 * whole // (n if stage == 3 else 1)
    assert r.bytes_of("optimizer") == 12 * trained // (n if stage else 1)
    assert r.bytes_of("gradients") == 2 * trained // (n if stage > 1 else 1)


# ---- numbers ----

@pytest.mark.parametrize("case, dtype", zip(CASES, ("fp32", "fp16", "bf16") * 2))
def test_what_is_trained_is_as_in_full_training(case, dtype, place):
    """One step without clipping: the same losses, the same weights.  What is frozen
    keeps its bits."""
    rules = CASES[case]
    c = {"run.steps": 1, "gradient_clipping": 0.0,
         **run.typed(dtype, initial_scale_power=8)}
    _, start = place.weights("start", {**c, "optimizer.params.lr": 0.0})
    a, full = place.weights("whole", c)
    b, part = place.weights("part", {**c, **rules})
    assert a.losses == b.losses
    assert b.steps[0]["grad_norm"] < a.steps[0]["grad_norm"]
    for name, data in part.items():
        assert data == (start if is_frozen(name, rules) else full)[name] != \
            (full if is_frozen(name, rules) else start)[name], name


# ---- work ----

@pytest.mark.parametrize("home", ("none", "nvme", "none/nvme"))
def test_no_task_for_what_is_frozen(home, place, nvme):
    """Units 0 to 3 are frozen: no backward, no reduce, norm or adam of them."""
    c = {**CASES["bottom"], **run.offload(3, "cpu", home, nvme),
         "run.task_log": True, "run.steps": 2, "run.recompute": "none"}
    done = {}
    for t in place.good(2, c).tasks:
        done.setdefault(t["task"], []).append(t["unit"])
    assert sorted(set(done["forward"])) == [0, 1, 2, 3, 4, 5]
    for kind in ("backward", "reduce", "adam"):
        assert min(done[kind]) == 4, kind
    assert sorted(done["reduce"]) == [4, 4, 5, 5, 6, 6]
    assert set(done["norm"]) == {-1}  # of losses


def test_activations_below_are_not_kept(place):
    """Of five equal blocks the upper two are kept."""
    c = {"run.recompute": "none", "run.steps": 1}
    all_of_them = place.good(1, c).bytes_of("activations")
    some = place.good(1, {**c, **CASES["bottom"]}).bytes_of("activations")
    assert 5 * some == 2 * all_of_them
