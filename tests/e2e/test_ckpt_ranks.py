# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of any number of ranks are loaded by any other, at another stage
and from another home, of two models.  A part of the matrix; --full runs all."""
import itertools
import math
import shutil

import pytest

import run

RANKS = (1, 2, 3, 4)
MODELS = {
    "gpt2": run.MODEL,
    "llama": {"layers": 3, "heads": 6, "kv_heads": 2, "head_dim": 4,
              "width": 27, "ffn": 40, "seq": 16, "vocab": 256,
              "rope_theta": 1000, "qkv_bias": True, "tie_embeddings": True}}
HOMES = [(0, "none", "none"), (3, "nvme", "nvme"), (1, "cpu", "none"),
         (3, "none", "none"), (2, "nvme", "none"), (3, "cpu", "cpu")]
DTYPES = ("fp32", "bf16")

ALL = list(itertools.product(RANKS, RANKS))
# Every number of ranks saves and loads, and some load their own.
PART = {"gpt2": [(1, 4), (2, 3), (3, 1), (4, 2), (3, 3)],
        "llama": [(4, 1), (3, 2), (1, 3), (2, 4), (4, 4)]}


def pairs(model):
    return ALL if run.FULL else PART[model]


CASES = [pytest.param(m, n, to, id=f"{m}-{n}-{to}")
         for m in MODELS for n, to in pairs(m)]


def config(model, ranks, case, nvme, steps):
    dtype = DTYPES[case % 2]
    c = {"model": MODELS[model], "train_batch_size": 12, "run.save": True,
         "train_micro_batch_size_per_gpu": 3 if ranks == 4 else 2,
         "run.steps": steps, "run.workers": 1,
         **run.offload(*HOMES[(case + ranks) % len(HOMES)], nvme)}
    if dtype != "fp32":
        c[f"{dtype}.enabled"] = True
    return c


def launch(place, model, ranks, case, nvme, steps, *more, output=None):
    return place.good(None if ranks == 1 else ranks,
                      config(model, ranks, case, nvme, steps), *more,
                      output=output)


@pytest.mark.parametrize("model, saved_by, loaded_by", CASES)
def test_saved_by_some_ranks_and_loaded_by_others(model, saved_by, loaded_by,
                                                  place, nvme, monkeypatch):
    """All weights arrive bit for bit.  What follows has the bits of a run that
    never stopped for the same number of ranks, else its losses up to the order
    of sums, which m and v decide."""
    run.use_program(monkeypatch, model)
    case = ALL.index((saved_by, loaded_by))
    first = launch(place, model, saved_by, case, nvme, 3)
    whole = launch(place, model, saved_by, case, nvme, 6)
    out = place.folder / "moved"
    shutil.copytree(first.output, out)
    still = launch(place, model, loaded_by, case, nvme, 3, ["--resume"],
                   output=out)
    assert still.hash == first.hash and "nothing left to train" in still.out
    more = launch(place, model, loaded_by, case, nvme, 6, ["--resume"],
                  output=out)
    assert [x["step"] for x in more.steps] == list(range(1, 7))
    if saved_by == loaded_by:
        assert more.bits == whole.bits and more.hash == whole.hash
    near = 1e-5 if DTYPES[case % 2] == "fp32" else 5e-3
    for x, y in zip(whole.steps, more.steps):
        assert math.isclose(x["loss"], y["loss"], rel_tol=near), str(more)
