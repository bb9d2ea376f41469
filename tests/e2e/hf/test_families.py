# SPDX-License-Identifier: Apache-2.0
"""Each family of models/families.c: the losses of a small model are those that
transformers computes (families.py), and a folder goes in and out bit for bit."""
import json
import os

import pytest

import families
import rows
import run

GOLDEN = json.loads(families.GOLDEN.read_text())
PYTHON = os.environ.get("IZ_TEST_PYTHON")


def config(folder, sample, **more):
    return {"train_batch_size": 1, "gradient_clipping": 0.0,
            "data.path": str(sample), "data.val_fraction": 0,
            "optimizer": {"type": "AdamW", "params": families.ADAM},
            "model": {"import": str(folder), "seq": families.SEQ}, **more}


@pytest.mark.parametrize("family", GOLDEN)
def test_a_family_has_its_losses(family, place):
    """Before ten steps of AdamW, after each, and exported as it came."""
    place.use(rows.program_of("llama"))
    folder = families.write(family, GOLDEN, place.folder / "in")
    sample, out = place.folder / "sample", place.folder / "out"
    sample.write_bytes(families.SAMPLE)
    r = place.good(1, config(folder, sample, **{"run.steps": families.STEPS + 1}))
    want = GOLDEN[family]["losses"]
    assert abs(r.losses[0] - want[0]) < 1e-6 * want[0], (r.losses, want)
    for a, b in zip(r.losses, want):
        assert abs(a - b) < 1e-5 * max(1, b), (r.losses, want)
    place.good(1, config(folder, sample, **{
        "run.steps": 1, "optimizer.params.lr": 0.0, "run.export": str(out)}))
    assert families.hf.read(out) == \
        families.tensors(GOLDEN[family]["shapes"], family)


@pytest.mark.parametrize("family", GOLDEN)
def test_an_adapter_of_a_family_has_its_loss(family, place):
    """As PEFT has it, with ranks and scales of their own and modules in full; and it
    leaves as it came."""
    place.use(rows.program_of("llama"))
    folder = families.write(family, GOLDEN, place.folder / "in")
    adapter = families.write_adapter(family, GOLDEN, place.folder / "adapter")
    sample, out = place.folder / "sample", place.folder / "out"
    sample.write_bytes(families.SAMPLE)
    r = place.good(1, config(folder, sample, **{
        "run.steps": 1, "optimizer.params.lr": 0.0, "run.export": str(out),
        "lora": {"import": str(adapter), "export": "adapter"}}))
    want = GOLDEN[family]["adapted"]
    assert abs(r.losses[0] - want) < 2e-6 * want, (r.losses, want)
    name = "adapter_model.safetensors"
    assert families.hf.read_file(out / name) == \
        families.adapter_tensors(family, GOLDEN)


@pytest.mark.skipif(not PYTHON, reason="IZ_TEST_PYTHON: a Python with transformers")
def test_transformers_has_these_losses_of_what_is_written(place):
    place.use(rows.program_of("llama"))
    sample = place.folder / "sample"
    sample.write_bytes(families.SAMPLE)
    for family in GOLDEN:
        folder = families.write(family, GOLDEN, place.folder / "in" / family)
        place.good(1, config(folder, sample, **{
            "run.steps": 1, "optimizer.params.lr": 0.0,
            "run.export": str(place.folder / "out" / family)}))
    r = run.call(PYTHON, families.__file__, f"--in={place.folder / 'out'}",
                 timeout_s=1200)
    assert r.rc == 0, str(r)


@pytest.mark.skipif(not PYTHON, reason="IZ_TEST_PYTHON: a Python with peft")
def test_peft_has_the_loss_of_our_adapters(place):
    """Trained, of whole stacked weights, with the last norm or the embeddings."""
    place.use(rows.program_of("llama"))
    sample = place.folder / "sample"
    sample.write_bytes(families.SAMPLE)
    for i, family in enumerate(GOLDEN):
        folder = families.write(family, GOLDEN, place.folder / "in" / family)
        out = place.folder / "out" / family
        c = config(folder, sample, **{"optimizer.params.lr": 1e-2, "lora": {
            "rank": 3, "alpha": 7.0, "targets": "*", "use_rslora": i % 2 == 1,
            "rank_pattern": {"*.1.*": 2, "down_proj": 5}, "alpha_pattern": {"o_proj": 2},
            "modules_to_save": ("*norm*", "embed_tokens", "")[i % 3 if family != "olmo" else 1]}})
        place.good(1, {**c, "lora.export": "adapter", "run.steps": 3,
                       "run.export": str(out)})
        r = place.good(1, {**c, "run.steps": 4})
        (out / "loss").write_text(str(r.losses[3]))
    r = run.call(PYTHON, families.__file__, f"--adapters={place.folder / 'out'}",
                 timeout_s=1200)
    assert r.rc == 0, str(r)
