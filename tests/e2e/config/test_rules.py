# SPDX-License-Identifier: Apache-2.0
"""Rules for parameters by name: weight decay and learning rate of a tensor."""
import array

import pytest

import run
from run import hf

LR, DECAY = 3e-3, 0.25
ONE = {"run.steps": 1, "optimizer.params.lr": LR}


def weights(place, name, overrides):
    return {k: array.array("f", x) for k, x in place.weights(name, overrides)[1].items()}


@pytest.fixture(scope="module")
def start(shared):
    """The weights before the first step, and after one without decay."""
    return (weights(shared, "start", {**ONE, "optimizer.params.lr": 0.0}),
            weights(shared, "plain", {**ONE, "optimizer.params.weight_decay": 0.0}))


# No bias, no norm decays: by one switch, two patterns, and the same ones as a whole
# and an exception.
EXCLUDE = (
    None,
    [{"match": "*.bias", "weight_decay": 0},
     {"match": "*ln_*.weight", "weight_decay": 0}],
    [{"match": "*", "weight_decay": 0},
     {"match": "*wt[e].weight", "weight_decay": DECAY},
     {"match": "wpe.weight", "weight_decay": DECAY},
     {"match": "h.?.attn.*.weight", "weight_decay": DECAY},
     {"match": "h.?.mlp.*.weight", "weight_decay": DECAY}],
)


@pytest.mark.parametrize("rules", EXCLUDE, ids=("switch", "exclude", "include"))
def test_decay_leaves_out_what_the_rules_say(rules, place, start):
    """One step of AdamW: p (1 - lr decay) - lr u, with the same u."""
    begin, plain = start
    how = {"parameters": rules} if rules else {"run.decay_matrices_only": True}
    decayed = weights(place, "out", {
        **ONE, **how, "optimizer.params.weight_decay":
        0.0 if rules is EXCLUDE[2] else DECAY})
    for name, after in decayed.items():
        if name.endswith(".bias") or "ln_" in name:
            assert after == plain[name], name
            continue
        assert after != plain[name]
        for p, q, p0 in zip(after, plain[name], begin[name]):
            assert abs(p - (q - LR * DECAY * p0)) <= 1e-8 + 3e-7 * abs(p), name


def test_the_rate_of_a_tensor_is_a_multiple(place, start):
    begin, plain = start
    scaled = weights(place, "out", {
        **ONE, "optimizer.params.weight_decay": 0.0,
        "parameters": [{"match": "h.1.*", "lr_scale": 0.5},
                       {"match": "wpe.*", "lr_scale": 0},
                       {"match": "h.1.ln_2.*", "lr_scale": 2}]})
    for name, after in scaled.items():
        by = (2 if name.startswith("h.1.ln_2") else 0.5
              if name.startswith("h.1.") else 0 if name.startswith("wpe") else 1)
        if by == 1:
            assert after == plain[name], name
        if by == 0:
            assert after == begin[name], name
        for p, q, p0 in zip(after, plain[name], begin[name]):
            assert abs((p - p0) - by * (q - p0)) <= 3e-7 * (abs(p) + 1e-3), name


@pytest.mark.sanitized
def test_every_tensor_and_what_it_gets_are_listed(place):
    path = place.config({"parameters": [{"match": "h.*.bias",
                                         "weight_decay": 0, "lr_scale": 2}]})
    r = run.call(run.PROGRAM, path, "--parameters")
    lines = {x.split()[0]: x for x in r.out.splitlines()}
    assert {"transformer." + k for k in lines} == set(hf.gpt2_shapes(run.MODEL))
    assert "[1, 96]  weight_decay 0  lr_scale 2" in lines["h.4.mlp.c_fc.bias"]
    assert "[24, 96]  weight_decay 0.1  lr_scale 1" in \
        lines["h.4.mlp.c_fc.weight"]


def test_decay_may_change_when_a_run_is_continued(place):
    """The rules are of the run, not of the checkpoint."""
    c = {"run.save": True, "run.steps": 4}
    whole = place.good(1, c)
    r = place.halves(1, {**c, "run.steps": 2}, {**c, "parameters": [
        {"match": "*", "weight_decay": 0}]})
    assert r.bits[:3] == whole.bits[:3] and r.bits[3] != whole.bits[3]
