# SPDX-License-Identifier: Apache-2.0
"""What decides the bits of a GPU's products beside their operands: how many logits
are computed at a time.  By the program with its own kernels on the stand-in, with a
stand-in for cuBLASLt (tests/fake/cublaslt.c)."""

import pytest

import rows
import run
from test_gpu_kernels import MODELS

pytestmark = [pytest.mark.skipif(run.GPU != "kernels",
                                 reason="needs the programs with GPU kernels"),
              pytest.mark.usefixtures("known_gpu")]
CONFIG = {"run.device": "cuda", "run.save": True, "train_batch_size": 4,
          "IZ_STANDIN_DEVICES": "2", "STARPU_SILENT": "1"}
LOGITS = "gpu_logits_bytes"
FEW, DEFAULT = 20 << 10, 256 << 20


@pytest.fixture
def go(place):
    """Starts a run, or one that goes on where there is an output of that name."""
    rows.use(place, "gpt2", MODELS, kernels=True)

    def go(out, steps=2, ranks=1, good=True, **keys):
        output = place.folder / out
        act = place.good if good else place.launch
        return act(ranks, {**CONFIG, "run.steps": steps,
                           **{f"run.{k}": v for k, v in keys.items()}},
                   ["--resume"] if output.exists() else (), output)
    return go


def chosen(r, key):
    return r.config["run"][key]


def test_a_resumed_run_computes_as_many_logits_at_a_time(go, kept):
    key = f"run.{LOGITS}"
    few = kept(1, key, FEW, {**CONFIG, key: FEW}, {key: 0})
    many = go("many", 6)
    assert chosen(many, LOGITS) == DEFAULT and few.hash != many.hash, f"{few}\n{many}"


@pytest.mark.parametrize("begun, goes_on", ((FEW, FEW), (0, DEFAULT)))
def test_steps_on_the_cpu_forget_no_logits(begun, goes_on, go):
    go("out", 1, **{LOGITS: begun}, device="cuda" if begun else "cpu")
    assert chosen(go("out", 2, device="cpu"), LOGITS) == begun
    assert chosen(go("out", 3), LOGITS) == goes_on
