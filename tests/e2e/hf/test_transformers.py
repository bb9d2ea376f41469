# SPDX-License-Identifier: Apache-2.0
"""Our folders as transformers and PEFT read them, where IZ_TEST_PYTHON names a
Python that has both: their loss of one sample is ours."""
import json
import os

import pytest

import run
from test_hf import KINDS, STILL, model, written

PYTHON = os.environ.get("IZ_TEST_PYTHON")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="IZ_TEST_PYTHON: a Python with transformers and peft")
SCRIPT = run.ROOT / "tests/runtime/hf/loss.py"
SEQ = 16
# Sums in another order, fp32 on both sides.
BOUND = 2e-5


def theirs(folder, sample, *adapter):
    r = run.call(PYTHON, SCRIPT, folder, sample, *adapter, timeout_s=600)
    assert r.rc == 0, str(r)
    told = json.loads(r.out.splitlines()[-1])
    assert told["missing"] == told["unexpected"] == [], told
    return told["loss"]


@pytest.fixture
def sample(place):
    """The one sample of all steps: a sequence and the token behind it."""
    path = place.folder / "sample"
    path.write_bytes(place.data.read_bytes()[100:101 + SEQ])
    return path


def on(sample, **more):
    return {"train_batch_size": 1, "data.path": str(sample),
            "data.val_fraction": 0, **more}


def close(a, b):
    assert abs(a - b) < BOUND * abs(b), f"{a} and {b}"


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_our_loss(kind, place, sample):
    out = place.folder / "trained"
    place.good(1, model(written(place, kind), **{"run.export": str(out)}))
    r = place.good(1, on(sample, **model(out), **STILL))
    close(r.losses[0], theirs(out, sample))


@pytest.mark.parametrize("targets", ("*", "*.c_attn.weight, h.2.mlp.*"))
def test_peft_computes_our_loss(targets, place, sample):
    base, adapter = written(place, "gpt2"), place.folder / "adapter"
    lora = {"lora": {"rank": 4, "alpha": 6.0, "targets": targets},
            "lora.export": "adapter", "optimizer.params.lr": 3e-2}
    place.good(1, on(sample, **model(base), **lora, **{"run.export": str(adapter)}))
    # The same run, a step longer: its last loss is that of the exported weights.
    r = place.good(1, on(sample, **model(base), **lora, **{"run.steps": 4}))
    close(r.losses[3], theirs(base, sample, adapter))
    assert abs(r.losses[3] - r.losses[0]) > 100 * BOUND
