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


def theirs(what, *args):
    r = run.call(PYTHON, run.ROOT / "tests/runtime/hf/nf4.py", what, *args,
                 timeout_s=600)
    assert r.rc == 0, str(r)
    return json.loads(r.out.splitlines()[-1])


STILL = {"run.steps": 1, "train_batch_size": 3, "optimizer.params.lr": 0.0,
         "lora": {"rank": 4, "targets": "*"}, "model.base_dtype": "nf4"}


@pytest.mark.parametrize("ranks", (1, 3))
def test_the_values_are_those_of_bitsandbytes(ranks, place):
    """Weights have the same codes, and some scales the code next to theirs."""
    model = {**run.MODEL, "width": 192, "layers": 2}
    before = hf.write(place.folder / "in", hf.gpt2_tensors(model, "F32"),
                      hf.gpt2_config(model))
    after = place.folder / "out"
    place.model = model
    place.good(ranks, {**STILL, "model.import": str(before), "run.export": str(after),
                       "zero_optimization.stage": 3 if ranks > 1 else 0})
    names = [k for k in hf.gpt2_shapes(model) if k.endswith("attn.c_attn.weight") or
             k.endswith("proj.weight") or k.endswith("c_fc.weight")]
    assert len(names) == 8
    for far, steps in theirs("compare", before, after, *names):
        assert far < 0.02 and steps < 1


@pytest.mark.parametrize("ranks", (1, 3))
def test_a_folder_of_theirs_has_their_values(ranks, place):
    """Bit for bit, also where another scale would have been chosen here."""
    config = hf.llama_config("qwen2", hidden_size=192, intermediate_size=131)
    shapes = hf.llama_shapes(config)
    before = hf.write(place.folder / "in", hf.random_tensors(shapes, "F32"), config)
    names = [k for k in shapes if k.endswith("proj.weight")]
    assert len(names) == 21
    packed, after = place.folder / "packed", place.folder / "out"
    theirs("write", before, packed, *names)
    place.use(run.built("models/llama"), {"seq": 16})
    place.good(ranks, {**STILL, "model.import": str(packed), "run.export": str(after),
                       "zero_optimization.stage": 3 if ranks > 1 else 0})
    assert theirs("same", packed, after, *names) == []
