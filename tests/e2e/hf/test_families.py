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


@pytest.mark.skipif(not PYTHON, reason="IZ_TEST_PYTHON: a Python with transformers")
def test_transformers_has_these_losses():
    r = run.call(PYTHON, families.__file__, timeout_s=1200)
    assert r.rc == 0, str(r)
