# SPDX-License-Identifier: Apache-2.0
"""A base in 4 bits beside that of bitsandbytes, where IZ_TEST_PYTHON names a Python
that has it."""
import json
import os

import pytest

import run
from run import hf

PYTHON = os.environ.get("IZ_TEST_PYTHON")
pytestmark = pytest.mark.skipif(
    not PYTHON or run.call(PYTHON, "-c", "import bitsandbytes, safetensors").rc != 0,
    reason="IZ_TEST_PYTHON: a Python with bitsandbytes and safetensors")


@pytest.mark.parametrize("ranks", (1, 3))
def test_the_values_are_those_of_bitsandbytes(ranks, place):
    """Weights have the same codes, and some scales the code next to theirs."""
    model = {**run.MODEL, "width": 192, "layers": 2}
    before = hf.write(place.folder / "in", hf.gpt2_tensors(model, "F32"),
                      hf.gpt2_config(model))
    after = place.folder / "out"
    place.model = model
    place.good(ranks, {
        "model.base_dtype": "nf4", "model.import": str(before), "run.steps": 1,
        "train_batch_size": 3, "optimizer.params.lr": 0.0, "run.export": str(after),
        "zero_optimization.stage": 3 if ranks > 1 else 0,
        "lora": {"rank": 4, "targets": "*"}})
    names = [k for k in hf.gpt2_shapes(model) if k.endswith("attn.c_attn.weight") or
             k.endswith("proj.weight") or k.endswith("c_fc.weight")]
    assert len(names) == 8
    r = run.call(PYTHON, run.ROOT / "tests/runtime/hf/nf4.py", before, after, *names,
                 timeout_s=600)
    assert r.rc == 0, str(r)
    for far, steps in json.loads(r.out.splitlines()[-1]):
        assert far < 0.02 and steps < 1
