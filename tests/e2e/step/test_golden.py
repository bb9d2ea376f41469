# SPDX-License-Identifier: Apache-2.0
"""Ten AdamW steps of imported models against independent ones in double
precision (golden.json, written by golden.py)."""
import json

import pytest

import golden
import rows
import run
from run import hf


@pytest.mark.sanitized
@pytest.mark.parametrize("kind, home", [
    (k, [(0, "none", "none"), (3, "cpu", "cpu")][i % 2])  # whose bits are the same
    for i, k in enumerate(golden.KINDS)])
def test_ten_steps_are_those_of_the_reference(kind, home, place):
    place.use(rows.program_of(kind))
    folder = hf.write(place.folder / "in", golden.tensors(kind),
                      golden.config(kind))
    data = place.folder / "window"
    data.write_bytes(golden.TEXT)
    r = place.good(1, {
        "model": {"import": str(folder), "seq": golden.SEQ},
        "data": {"path": str(data), "val_fraction": 0},
        "gradient_clipping": golden.CLIP, "run.steps": golden.STEPS,
        "optimizer": {"type": "AdamW", "params": golden.ADAM},
        "train_batch_size": 2, **run.offload(*home, None)})
    want = json.loads(golden.FILE.read_text())[kind]
    assert len(r.steps) == len(want) == golden.STEPS
    assert want[-1]["loss"] < 0.9 * want[0]["loss"]
    for got, ref in zip(r.steps, want):
        # fp32 against double: rounding of 2^-24 grows slowly with the steps.
        assert got["loss"] == pytest.approx(ref["loss"], rel=2e-5), got
        assert got["grad_norm"] == pytest.approx(ref["grad_norm"], rel=2e-3)
