# SPDX-License-Identifier: Apache-2.0
"""Our folders as transformers and PEFT read them, where IZ_TEST_PYTHON names a
Python that has both: their loss of one sample is ours."""
import json
import os
import pathlib
import subprocess
import sys

import pytest

import run

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "runtime/hf"))
import folder as hf  # noqa: E402

PYTHON = os.environ.get("IZ_TEST_PYTHON")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="IZ_TEST_PYTHON: a Python with transformers and peft")
SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "runtime/hf" / "loss.py"
SEQ = 16
STILL = {"optimizer.params.lr": 0.0, "optimizer.params.weight_decay": 0.0,
         "run.steps": 1}
# Sums in another order, fp32 on both sides.
BOUND = 2e-5


def theirs(folder, sample, *adapter):
    p = subprocess.run([PYTHON, SCRIPT, folder, sample, *adapter],
                       capture_output=True, text=True, timeout=600, check=False)
    assert p.returncode == 0, p.stdout + p.stderr
    told = json.loads(p.stdout.splitlines()[-1])
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


def imported(folder):
    return {"model": {"import": str(folder), "seq": SEQ}}


def close(a, b):
    assert abs(a - b) < BOUND * abs(b), f"{a} and {b}"


@pytest.mark.parametrize("kind", ("gpt2", *hf.LLAMA))
def test_transformers_computes_our_loss(kind, place, sample, monkeypatch):
    if kind == "gpt2":
        tensors, config = hf.gpt2_tensors(run.MODEL, "F32"), hf.gpt2_config(run.MODEL)
    else:
        run.use_program(monkeypatch, "llama")
        config = hf.llama_config(kind)
        tensors = hf.random_tensors(hf.llama_shapes(config), "F32")
    start = hf.write(place.folder / "in", tensors, config)
    out = place.folder / "trained"
    place.good(None, {**imported(start), "run.export": str(out)})
    r = place.good(None, on(sample, **imported(out), **STILL))
    close(r.losses[0], theirs(out, sample))


@pytest.mark.parametrize("targets", ("*", "*.c_attn.weight, h.2.mlp.*"))
def test_peft_computes_our_loss(targets, place, sample):
    base, adapter = place.folder / "base", place.folder / "adapter"
    hf.write(base, hf.gpt2_tensors(run.MODEL, "F32"), hf.gpt2_config(run.MODEL))
    lora = {"lora": {"rank": 4, "alpha": 6.0, "targets": targets},
            "lora.export": "adapter", "optimizer.params.lr": 3e-2}
    place.good(None, on(sample, **imported(base), **lora,
                        **{"run.export": str(adapter)}))
    # The same run, a step longer: its last loss is that of the exported weights.
    r = place.good(None, on(sample, **imported(base), **lora, **{"run.steps": 4}))
    close(r.losses[3], theirs(base, sample, adapter))
    assert abs(r.losses[3] - r.losses[0]) > 100 * BOUND
