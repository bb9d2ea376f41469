# SPDX-License-Identifier: Apache-2.0
"""Blocks that handle some rows of a sample at a time (run.sequence_chunk): the losses
of all rows at once, the same bits for as many rows wherever the run is (see the matrix,
too), less memory, as planned, and what is refused."""
import re

import pytest

import rows
import run
from rows import LLAMA, MOE

KEY = "run.sequence_chunk"
LONG = {**LLAMA, "seq": 100}
MODELS = {  # program, shape, settings beside
    "gpt2": ("gpt2", {**run.MODEL, "seq": 100}, {}),
    "llama": ("llama", {**LONG, "qk_norm": True}, {}),
    "gemma2": ("llama", {**LONG, "family": "gemma2", "window": 30, "tie_embeddings": True,
                         "attn_logit_softcapping": 2, "final_logit_softcapping": 3}, {}),
    "cohere2": ("llama", {**LONG, "family": "cohere2", "window": 9, "logit_scale": 0.5}, {}),
    "bias": ("llama", {**LONG, "family": "starcoder2", "qkv_bias": True}, {}),
    "moe": ("moe", {**MOE, "seq": 100, "router_aux_loss_coef": 0}, {}),
    "sinks": ("moe", {**rows.MODELS["sinks"], "seq": 100, "router_aux_loss_coef": 0}, {}),
    "groups": ("moe", {**rows.MODELS["groups"], "seq": 100}, {}),
    "documents": ("llama", LONG, {"data.document_end": 101}),
    "adapters": ("llama", LONG, {"lora": {"rank": 3, "alpha": 5, "targets": "*"},
                                 "parameters": [{"match": "*norm*", "frozen": False}]}),
    "experts": ("moe", {**MOE, "seq": 100, "router_aux_loss_coef": 0}, rows.ON_EXPERTS),
    "nf4": ("llama", LONG, rows.TUNED["nf4"] | {"parameters": []})}
STEPS = {"run.steps": 4, "train_batch_size": 4, "run.eval_batches": 1,
         "optimizer.params.lr": 0.01, "run.workers": 2}


def norms(r):
    return [x["grad_norm"] for x in r.steps]


@pytest.mark.parametrize("name", MODELS)
def test_the_losses_are_those_of_all_rows_at_once(name, place):
    program, shape, more = MODELS[name]
    place.use(run.built(f"models/{program}"), shape)
    whole = place.good(1, {**STEPS, **more})
    for n in (1000, 100, 37, 1):
        r = place.good(1, {**STEPS, **more, KEY: n})
        if n >= 100:
            assert r.numbers == whole.numbers
            continue
        assert r.losses == pytest.approx(whole.losses, rel=3e-6), n
        assert norms(r) == pytest.approx(norms(whole), rel=1e-4), n
        assert r.validation[-1] == pytest.approx(whole.validation[-1], rel=3e-6)


@pytest.mark.parametrize("name, kept", (("gpt2", "none"), ("cohere2", "widened"),
                                        ("documents", "widened"), ("moe", "none"),
                                        ("moe", "widened"), ("nf4", "widened")))
def test_chunks_keep_what_backward_would_repeat(name, kept, place):
    program, shape, more = MODELS[name]
    place.use(run.built(f"models/{program}"), shape)
    more = {**STEPS, **more, KEY: 37}
    r = place.good(1, {**more, "run.recompute": kept})
    assert r.bytes_of("activations") > 0
    assert r.numbers == place.good(1, more).numbers


@pytest.mark.parametrize("dtype, beside", (("bf16", "llama"), ("fp16", "llama"),
                                           ("bf16", "nf4"), ("bf16", "adapters")))
def test_sums_over_chunks_are_of_fp32(dtype, beside, place):
    """Of single rows, 100 to a sample: in 16 bits they would lose what is small."""
    place.use(run.built("models/llama"), {**LONG, "qk_norm": True})
    more = {**STEPS, **MODELS[beside][2], **run.typed(dtype), "run.cpu_products": "fp32", "run.steps": 1}
    whole, r = place.good(1, more), place.good(1, {**more, KEY: 1})
    assert norms(r) == pytest.approx(norms(whole), rel=2e-4)


def test_memory_is_bounded_by_the_rows(place):
    """An eighth of what all rows together take is enough.  The largest number of rows that
    fits is named where none is asked for, and taken by auto."""
    shape = {"layers": 1, "heads": 4, "kv_heads": 1, "width": 32, "ffn": 1024,
             "seq": 4096, "vocab": 64}
    data = place.folder / "tokens"
    data.write_bytes(bytes(b % 64 for b in place.data.read_bytes()) * 4)
    place.use(run.built("models/llama"), shape)
    one = {"run.steps": 2, "train_batch_size": 1, "run.workers": 1, "data.path": str(data),
           "run.eval_batches": 0}
    whole = place.good(1, one)
    r = place.good(1, {**one, KEY: 128})
    assert r.bytes_in("device") * 8 < whole.bytes_in("device")
    assert r.losses == pytest.approx(whole.losses, rel=3e-6)
    limit = {"run.recompute": "full",
             "run.memory_limit_bytes": whole.bytes_in("device") // 4}
    named, = re.findall(rf"it fits with {KEY}=(\d+) ",
                        place.launch(1, {**one, **limit}).err)
    assert 128 <= int(named) < 4096
    r = place.good(1, {**one, **limit, KEY: "auto"})
    assert r.config["run"]["sequence_chunk"] == int(named)


@pytest.mark.parametrize("program, model, more, said", [
    ("llama", LONG, {KEY: 0}, "0 is less than 1"),
    ("llama", LONG, {KEY: "all"}, '"all"'),
    ("llama", LONG, {KEY: 8, **rows.TUNED["dropout"]}, "lora.dropout"),
    ("moe", {**MOE, "experts_per_unit": 3}, {KEY: 8}, "model.experts_per_unit"),
    ("vit", rows.MODELS["vit"], {KEY: 8}, "set off")])
def test_what_cannot_be_is_refused(program, model, more, said, place):
    place.use(run.built(f"models/{program}"), model)
    r = place.launch(1, {"run.steps": 1, **more})
    run.refused(r, KEY, said)
