# SPDX-License-Identifier: Apache-2.0
"""Blocks that handle some rows of a sample at a time (run.sequence_chunk): the losses
of all rows at once, the same bits for as many rows wherever the run is (see the matrix,
too), and less memory, as planned."""
import re

import pytest

import long_sample
import rows
import run

KEY = "run.sequence_chunk"
ALONE = {"model.router_aux_loss_coef": 0}  # the balance depends on the rows at a time
MODELS = {  # of rows.py, and settings beside
    "gpt2": ("gpt2", {}),
    "llama": ("all of llama", {}),
    "gemma2": ("norms behind", {"model.window": 30}),
    "cohere2": ("parallel", {"model.window": 9}),
    "bias": ("llama", {"model.family": "starcoder2", "model.qkv_bias": True}),
    "moe": ("moe", ALONE),
    "sinks": ("sinks", ALONE),
    "groups": ("groups", {}),
    "documents": ("llama", {"data.document_end": 101}),
    "adapters": ("llama", {"lora": {"rank": 3, "alpha": 5, "targets": "*"},
                           "parameters": [{"match": "*norm*", "frozen": False}]}),
    "experts": ("moe", {**ALONE, **rows.ON_EXPERTS}),
    "nf4": ("llama", rows.TUNED["nf4"] | {"parameters": []})}
STEPS = {"run.steps": 4, "train_batch_size": 4, "run.eval_batches": 1, "model.seq": 100,
         "optimizer.params.lr": 0.01, "run.workers": 2}

LENGTHS = ("boundaries", "scratch", "batches")  # grow with a sample


@pytest.mark.parametrize("name", MODELS)
def test_the_losses_are_those_of_all_rows_at_once(name, place):
    model, more = MODELS[name]
    rows.use(place, model)
    whole = place.good(1, {**STEPS, **more})
    for n in (1000, 100, 37, 1):
        r = place.good(1, {**STEPS, **more, KEY: n,
                           "run.recompute": "widened" if n == 37 else "full"})
        if n >= 100:
            assert r.numbers == whole.numbers
            continue
        assert (r.bytes_of("activations") > 0) == (n == 37)
        rows.near(whole.steps, r.steps, 3e-6, 1e-4)
        assert r.validation[-1] == pytest.approx(whole.validation[-1], rel=3e-6)


def test_many_chunks_have_the_scratch_of_the_last(place):
    """Of 512 chunks a plan counts about one in nine.  The last has two rows."""
    one = {"run.steps": 1, "train_batch_size": 1, "run.workers": 2, "model.seq": 4090,
           "model.layers": 1, "model.heads": 1, "model.width": 64}
    whole = place.good(1, one)
    rows.near(whole.steps, place.good(1, {**one, KEY: 8}).steps, 3e-6, 1e-4)


@pytest.mark.parametrize("dtype, beside", (("bf16", "llama"), ("fp16", "llama"),
                                           ("bf16", "nf4"), ("bf16", "adapters")))
def test_sums_over_chunks_are_of_fp32(dtype, beside, place):
    """Of single rows, 100 to a sample: in 16 bits they would lose what is small."""
    model, more = MODELS[beside]
    rows.use(place, model)
    more = {**STEPS, **more, **run.typed(dtype), "run.steps": 1}
    whole, r = place.good(1, more), place.good(1, {**more, KEY: 1})
    rows.near(whole.steps, r.steps, 1e-5, 2e-4)


def test_a_long_sample_has_transformers_losses(place, known):
    """Before and after a step, in an eighth of the memory that all rows at once take.
    What is resident is what is planned."""
    place.use(run.built("models/llama"))
    folder, sample = long_sample.write(place.folder / "in")
    one = {"run.steps": 2, "train_batch_size": 1, "run.workers": 1,
           "data.path": str(sample), "data.val_fraction": 0, "gradient_clipping": 0.0,
           "optimizer": {"type": "AdamW", "params": long_sample.ADAM},
           "model": {"import": str(folder), "seq": long_sample.SEQ}}
    whole = place.launch(1, one, ["--plan"]).out
    limit = int(float(re.search(r"^ +total +([\d.]+)", whole, re.M)[1]) * 2**20 / 8)
    run.refused(place.launch(1, {**one, "run.memory_limit_bytes": limit}),
                "of memory per rank, there are")
    r = place.good(1, {**one, KEY: 2048, "run.memory_limit_bytes": limit})
    assert r.losses == pytest.approx(long_sample.LOSSES, rel=1e-5)
    empty = known(1, {"run.steps": 1, "run.workers": 1})
    grown = r.summary["peak_resident_bytes"] - empty.summary["peak_resident_bytes"]
    assert 0.9 * r.bytes_in("device") <= grown <= 1.1 * r.bytes_in("device")


@pytest.mark.parametrize("name", ("gpt2", "llama", "moe"))
def test_plans_of_very_long_samples_overflow_nowhere(name, place):
    """What grows with the rows has sixteen times as many bytes for 2^24 as for 2^20 of
    them, all together or some at a time."""
    model, more = MODELS[name]
    rows.use(place, model)
    for key in ("off", 1 << 16):
        total = {}
        for seq in (1 << 20, 1 << 24):
            c = {**more, "model.seq": seq, "train_batch_size": 2, KEY: key,
                 "run.memory_limit_bytes": 10**15}
            total[seq] = run.planned(place.good(1, c, ["--plan"]).out, LENGTHS)
        assert total[1 << 24] == pytest.approx(16 * total[1 << 20], rel=0.1), key
    r = place.launch(1, {**c, "train_batch_size": 256}, ["--plan"])
    run.refused(r, "train_micro_batch_size_per_gpu", "set 127 or more slices")
    if name == "moe":  # of 2^30 tokens
        r = place.launch(1, {**c, "train_batch_size": 64, KEY: "off"}, ["--plan"])
        run.refused(r, "with 2 experts each")


@pytest.mark.parametrize("machine", ("h100-80-vm", "rtx4090-workstation"))
def test_a_million_tokens_fit_one_gpu_by_auto(machine):
    """Of the shipped config; boundaries pass the GPU in chunks."""
    configs = run.ROOT / "configs"
    r = run.call(run.built("models/llama"), configs / "llama-3-8b-1m.json", "--plan",
                 "--machine", configs / f"machines/{machine}.json", "--set", f"{KEY}=auto")
    assert r.rc == 0 and re.search(r"blocks handle \d+ rows", r.out), str(r)
    assert "boundaries on nvme" in r.out and "izar: it fits" not in r.err


def test_what_fits_is_named_and_taken(place):
    """The largest number of rows, where none is asked for, and by auto."""
    shape = {"layers": 1, "heads": 4, "kv_heads": 1, "width": 32, "ffn": 1024,
             "seq": 4096, "vocab": 64}
    data = place.folder / "tokens"
    data.write_bytes(bytes(b % 64 for b in place.data.read_bytes()) * 4)
    place.use(run.built("models/llama"), shape)
    one = {"run.steps": 2, "train_batch_size": 1, "run.workers": 1, "data.path": str(data),
           "run.eval_batches": 0}
    limit = {"run.recompute": "full",
             "run.memory_limit_bytes": place.good(1, one).bytes_in("device") // 4}
    named, = {re.search(rf"it fits with {KEY}=(\d+) ",
                        place.launch(1, {**one, **limit, KEY: rows}).err)[1]
              for rows in ("off", 4095)}
    assert 128 <= int(named) < 4096
    r = place.good(1, {**one, **limit, KEY: "auto"})
    assert r.config["run"]["sequence_chunk"] == int(named)
