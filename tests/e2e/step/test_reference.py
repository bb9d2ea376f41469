# SPDX-License-Identifier: Apache-2.0
"""A whole training run, with accumulation, clipping, weight decay and a schedule,
against an independent one in double precision (reference.json, written by
reference.py)."""
import json
import pathlib

import pytest

STEPS = 30
# One window: every sample is the same, so the order of samples plays no part.
TEXT = b"It was the best of times, it was the worst of times, it was the age "
SETTINGS = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW",
                  "params": {"lr": 3e-3, "betas": [0.9, 0.95], "eps": 1e-8,
                             "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupCosineLR",
                  "params": {"warmup_num_steps": 8, "total_num_steps": 40}},
    "model": {"layers": 2, "heads": 2, "width": 32, "seq": len(TEXT) - 1,
              "vocab": 256},
    "run": {"steps": STEPS},
}


def settings(data):
    return {**SETTINGS, "data": {"path": str(data), "val_fraction": 0}}


def relative(a, b):
    return abs(a - b) / abs(b)


def test_a_run_is_that_of_the_reference(place):
    data = place.folder / "window"
    data.write_bytes(TEXT)
    r = place.good(1, settings(data))
    want = json.loads((pathlib.Path(__file__).parent /
                       "reference.json").read_text())
    assert len(r.steps) == len(want) == STEPS
    for got, ref in zip(r.steps, want):
        # fp32 against double: rounding of 2^-24 grows slowly with the steps.
        assert relative(got["loss"], ref["loss"]) < 2e-5, got
        assert relative(got["grad_norm"], ref["grad_norm"]) < 2e-3, got
        assert got["lr"] == pytest.approx(ref["lr"], rel=1e-12), got
