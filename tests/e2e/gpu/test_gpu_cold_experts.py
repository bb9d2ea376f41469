# SPDX-License-Identifier: Apache-2.0
"""Experts that the host of a GPU computes where few rows want them.  The
stand-in computes products as the CPU does, so the bits are those of a run that
leaves all experts to it."""
import json

import pytest

import rows
import run
from rows import PLAIN, standin

pytestmark = [standin, pytest.mark.sanitized, pytest.mark.usefixtures("known_gpu")]
PLACE = {**PLAIN, "model": "units of experts", "ranks": 1, "batch": 12, "micro": 2,
         "chunk": 2048, "steps": 4, "clip": 0.5, "dtype": "fp32", "device": "cuda",
         "stage": 3, "optimizer": "cpu", "param": "cpu", "ratio": 1,
         "boundaries": "host", "schedule": "breadth_first"}
EVAL = {"run.eval_batches": 1, "run.eval_interval": 2}
UNITS = [f"layers.{block}.{first}" for block in (1, 3) for first in (0, 3, 6)]


def auto(most):
    return {**EVAL, "run.cold_experts": "auto", "run.cold_expert_rows": most}


def cold(r):
    """The units of each step."""
    out = []
    for x in r.steps:
        step = []
        for part in x["cold_experts"].split():
            first, _, last = part.partition("..")
            step += UNITS[UNITS.index(first):UNITS.index(last or first) + 1]
        out.append(step)
    return out


def same(r, want):
    assert (r.numbers, r.validation) == (want.numbers, want.validation), str(r)


@pytest.mark.parametrize("row", rows.cases([
    {"dtype": "bf16", "schedule": "depth_first", "recompute": "none", "wave": 2},
    {"dtype": "fp16", "recompute": "widened", "ring": 1},
    {"dtype": "fp32", "micro": 12, "clip": 0, "delay_us": 300, "jitter_us": 500},
    {"dtype": "bf16", "optimizer": "nvme", "in_flight": 1, "overlap": False},
    {"dtype": "bf16", "update": "muon", "products": "host"}]))
def test_the_host_computes_the_same_bits(row, start):
    row = {**PLACE, **row}
    want = start(row, EVAL)
    r = start(row, auto(10**6))
    same(r, want)
    assert cold(r) == [[]] + 3 * [UNITS]
    assert "the host computed 6 of 6 units of experts in the last step" in r.out
    assert "cold_experts" not in want.steps[0]


def test_adapters_of_experts_and_a_frozen_base(start):
    for tuned in (rows.ON_EXPERTS, {"lora": {"rank": 3, "targets": "*attn*"}}):
        want = start(PLACE, {**EVAL, **tuned})
        same(start(PLACE, {**auto(10**6), **tuned}), want)


def test_rows_of_the_step_before_decide(start):
    """Of the units that are not cold, each had more rows than the limit, and the
    other way round: from one limit to the next only units are added."""
    row = {**PLACE, "steps": 6}
    want = start(row, EVAL)
    runs = []
    for most in (1, 40, 55, 70):
        r = start(row, auto(most))
        same(r, want)
        runs.append([set(step) for step in cold(r)])
    for few, many in zip(runs, runs[1:]):
        assert all(a <= b for a, b in zip(few, many))
    assert any(set() < step < set(UNITS) for run in runs for step in run), runs


@pytest.mark.parametrize("mode", ("sync", "async"))
def test_a_resumed_run_chooses_the_same(mode, start, place):
    """The choice for the next step is in the checkpoint."""
    more = {**auto(55), "run.save": True, "run.save_interval": 2, "run.save_mode": mode,
            "run.keep_last": 9}
    parts = str(place.folder / "parts")
    whole = start({**PLACE, "steps": 6}, more)
    start({**PLACE, "steps": 4}, more, output=parts)
    r = start({**PLACE, "steps": 6}, more, options=["--resume"], output=parts)
    assert r.bits[-2:] == whole.bits[-2:]
    assert cold(r)[-2:] == cold(whole)[-2:] and any(cold(r)[-2:])
    index = json.loads((place.folder / "parts/checkpoints/step-00000004/index.json").read_text())
    assert index["cold_experts"] == whole.steps[4]["cold_experts"]
    # Another run may do without.
    off = start({**PLACE, "steps": 7}, {**more, "run.cold_experts": "off"},
                options=["--resume"], output=parts)
    assert off.steps[-1]["step"] == 7


REFUSED = [
    ({"model.experts_per_unit": 0}, "model.experts_per_unit"),
    ({"run.device": "cpu"}, "on the CPU"),
    ({"zero_optimization.offload_param.device": "none"}, "offload_param.device to cpu"),
    ({"zero_optimization.offload_param.device": "nvme"}, "offload_param.device to cpu"),
    ({"zero_optimization.offload_optimizer.ratio": 0.5}, "ratio of 1.0"),
    ({"activation_checkpointing.cpu_checkpointing": False}, "cpu_checkpointing"),
]


@pytest.mark.parametrize("change, why", REFUSED)
def test_what_cannot_be_had_is_refused(change, why, start, nvme):
    if "nvme" in change.values():
        change = {**change, "zero_optimization.offload_param.nvme_path": str(nvme)}
    r = start(PLACE, {**auto(16), **change}, good=False)
    run.refused(r, "run.cold_experts: auto", why)


def test_several_ranks_are_refused(start):
    r = start({**PLACE, "ranks": 2}, auto(16), good=False)
    run.refused(r, "run.cold_experts: auto", "one rank")
