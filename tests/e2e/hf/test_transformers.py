# SPDX-License-Identifier: Apache-2.0
"""Our folders as transformers and PEFT read them, where IZ_TEST_PYTHON names a
Python that has both, beyond what test_families.py does: their loss of one sample is
ours."""
import json
import os

import pytest

import rows
import run
from run import STILL, hf
from test_hf import KINDS, model, tensors_of, written

PYTHON = os.environ.get("IZ_TEST_PYTHON")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="IZ_TEST_PYTHON: a Python with transformers and peft")
SCRIPT = run.ROOT / "tests/e2e/hf/theirs.py"
SEQ = 16
# Sums in another order, fp32 on both sides.
BOUND = 2e-5


def theirs(folder, sample, *adapter):
    r = run.call(PYTHON, SCRIPT, "--loss", folder, sample, *adapter, timeout_s=600)
    assert r.rc == 0, str(r)
    return float(r.out.splitlines()[-1])


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
def test_transformers_computes_our_loss_of_documents(kind, place, sample):
    """With the mask, the positions and the labels of packed documents."""
    out, end = place.folder / "trained", 32
    sample.write_bytes(b"ab cdefg  hijkl mn"[:SEQ + 1])
    folder = written(place, kind, tensors=hf.scaled(tensors_of(kind), 4))
    place.good(1, model(folder, **{"run.export": str(out)}))
    r = place.good(1, on(sample, **model(out), **STILL, **{"data.document_end": end}))
    close(r.losses[0], theirs(out, sample, f"--end={end}"))
    assert abs(r.losses[0] - theirs(out, sample)) > 100 * BOUND


# bitsandbytes takes whole blocks of 64 to a row on a CPU.
WIDE = {32: 64, 44: 64, 16: 32}
QUANTISE = """
import json, sys, transformers
c = transformers.BitsAndBytesConfig(**json.loads(sys.argv[3]))
transformers.AutoModelForCausalLM.from_pretrained(
    sys.argv[1], quantization_config=c, dtype="float32").save_pretrained(sys.argv[2])
"""
BITS = ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
         "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "float32"},
        {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32",
         "bnb_4bit_quant_storage": "bfloat16"})


@pytest.mark.skipif(not PYTHON or run.call(PYTHON, "-c", "import bitsandbytes").rc != 0,
                    reason="a Python without bitsandbytes")
@pytest.mark.parametrize("kind, bits", (("gpt2", BITS[0]), ("mixtral", BITS[1])))
def test_transformers_saves_in_4_bits_what_we_read(kind, bits, place, sample):
    shape = {**run.MODEL, "width": 64, "heads": 4}
    shapes, c = (hf.gpt2_shapes(shape), hf.gpt2_config(shape)) if kind == "gpt2" else \
        hf.model_of(kind, WIDE)
    tensors = hf.random_tensors(shapes, "F32")
    base, out = written(place, kind, tensors=tensors, config=c), place.folder / "out"
    r = run.call(PYTHON, "-c", QUANTISE, base, out, json.dumps(bits), timeout_s=600)
    assert r.rc == 0, str(r)
    plain, ours = (place.good(1, on(sample, **model(x), **STILL)).losses[0]
                   for x in (base, out))
    close(ours, theirs(out, sample))
    assert abs(ours - plain) > BOUND


# An adapter of attention and of the tensors of all experts, as transformers 5 has them.
FUSE = """
import sys, peft, transformers
transformers.set_seed(1)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32")
config = peft.LoraConfig(
    task_type="CAUSAL_LM", r=4, lora_alpha=400, target_modules=["q_proj"],
    target_parameters=["gate_up_proj", "down_proj"], init_lora_weights=False)
peft.get_peft_model(model, config).save_pretrained(sys.argv[1] + "-adapter")
"""


@pytest.mark.parametrize("kind", rows.MIXTURES)
def test_a_fused_adapter_of_peft_is_a_start(kind, place, sample):
    """Others: test_families.py."""
    base = written(place, kind)
    r = run.call(PYTHON, "-c", FUSE, base, timeout_s=600)
    assert r.rc == 0, str(r)
    c = on(sample, **model(base), **STILL)
    r, plain = (place.good(1, {**c, **more}) for more in (
        {"lora.import": f"{base}-adapter"}, {}))
    close(r.losses[0], theirs(base, sample, f"{base}-adapter"))
    assert abs(r.losses[0] - plain.losses[0]) > 20 * BOUND


# Each matrix of an expert has its A, or the two stacked ones share one.  Not of a dense
# MLP beside them: PEFT takes its gate_proj and up_proj for those of experts.
@pytest.mark.parametrize("kind", rows.MIXTURES)
@pytest.mark.parametrize("targets", ("q_proj, *experts.[0-9]*", "*experts*"))
def test_peft_computes_our_loss_with_adapters_of_experts(kind, targets, place, sample):
    base = written(place, kind, tensors=hf.scaled(tensors_of(kind), 4))
    adapter = place.folder / "adapter"
    lora = {"lora": {"rank": 4, "alpha": 64.0, "targets": targets},
            "lora.export": "adapter", "optimizer.params.lr": 3e-2}
    place.good(1, on(sample, **model(base), **lora, **{"run.export": str(adapter)}))
    r = place.good(1, on(sample, **model(base), **lora, **{"run.steps": 4}))
    close(r.losses[3], theirs(base, sample, adapter))
    assert abs(r.losses[3] - r.losses[0]) > 100 * BOUND
