# SPDX-License-Identifier: Apache-2.0
"""Pairs of texts: DPO and IPO against TRL, the same bits wherever the reference
lives, and what is refused."""
import json
import os
import pathlib
import re

import pytest

import preferences
import run
from inputs import pair_texts, pairs_shard, some_pairs
from preferences import NAMES
from run import ckpt, hf

LORA = {"lora": {"rank": 3, "alpha": 5, "targets": "*"}}
SOME = {"parameters": [{"match": "*", "frozen": True},
                       {"match": "h.[23].*", "frozen": False}]}
BOTH = {**LORA, "parameters": [{"match": "h.[13].*.bias", "frozen": False}]}
TUNED = {"lora": LORA, "all": {}, "some": SOME, "both": BOTH}


def on(place, path, **loss):
    """The place's runs read pairs."""
    place.data, place.bytes = path, False
    return {f"loss.{k}": v for k, v in {"type": "dpo", **loss}.items()}


@pytest.fixture
def dpo(place):
    seq = run.MODEL["seq"]
    path = pairs_shard(place.folder / "pairs.bin", *pair_texts(some_pairs(), seq), seq)
    return {**on(place, path, sft=0.2), "train_batch_size": 24, "run.steps": 4,
            "optimizer.params.lr": 0.01, "data.val_fraction": 0.2,
            "run.eval_batches": 1, "run.eval_interval": 2, "run.slices": 1}


# ---- against TRL ----

@pytest.mark.sanitized
@pytest.mark.parametrize("name, micro", zip(preferences.LOSSES, (12, 6, 2)))
def test_steps_are_those_of_trl(name, micro, place):
    """It has one micro-batch, computes in double here, and reports its means in fp32."""
    want = json.loads(preferences.FILE.read_text())[name]
    folder = hf.write(place.folder / "in", preferences.tensors(),
                      hf.gpt2_config(preferences.GPT2))
    seq, place.model = preferences.SEQ, {}
    path = pairs_shard(place.folder / "pairs.bin", *pair_texts(preferences.pairs(), seq), seq)
    r = place.good(1, {
        **on(place, path, **preferences.LOSSES[name]), "data.val_fraction": 0,
        "model": {"import": str(folder), "seq": seq},
        "train_batch_size": 2 * preferences.PAIRS,
        "train_micro_batch_size_per_gpu": micro, "run.steps": preferences.STEPS,
        "gradient_clipping": preferences.CLIP,
        "optimizer": {"type": "AdamW", "params": preferences.ADAM}})
    assert len(r.steps) == len(want) == preferences.STEPS
    for i, (got, ref) in enumerate(zip(r.steps, want)):
        # fp32 against double: 2e-6 at most here; the first step is nearer.
        assert got["loss"] == pytest.approx(ref["loss"], rel=1e-7 if i == 0 else 4e-6)
        for k in NAMES:
            assert got[k] == pytest.approx(ref[k], rel=4e-6, abs=4e-6), (i, k)
    assert re.search(r"last step:  margin [\d.]+ in favour of 100% of its pairs", r.out)


# ---- where copies are; the same bits: test_matrix.py ----

def test_the_base_is_fetched_once_for_both(place, dpo, nvme):
    c = {**LORA, **run.offload(3, "none", "nvme", nvme), "train_batch_size": 24,
         "run.steps": 4, "run.slices": 1, "run.eval_batches": 1, "run.eval_interval": 2}
    pairs = place.good(2, {**dpo, **c})
    place.data, place.bytes = place.folder / "text", True
    place.data.write_bytes(bytes(range(1, 200)) * 100)
    plain = place.good(2, c)
    for key in ("fetched_bytes", "up_bytes", "down_bytes"):
        assert pairs.summary[key] == plain.summary[key], key
    assert pairs.summary["fetched_bytes"] > 0


def test_copies_have_a_home_of_their_own(place, dpo, nvme):
    """The plan counts them there, the run allocates it, and the disk is read for them
    and not written."""
    each = place.good(2, {**dpo, "zero_optimization.stage": 3}).memory[
        "parameters", "device"][1] // 2
    for homes, tiers in (
            ("cpu", "cpu cpu"), ("cpu/none", "cpu device"), ("cpu/nvme", "cpu nvme"),
            ("nvme/cpu", "nvme cpu"), ("none/nvme", "device nvme")):
        r = place.good(2, {**dpo, **run.offload(3, "none", homes, nvme),
                           "run.eval_batches": 0, "run.eval_interval": 0})
        for tier in ("device", "cpu", "nvme"):
            have = r.memory.get(("parameters", tier), (0, 0))[1]
            n = tiers.split().count(tier) * each
            # In a file they are whole chunks.
            assert n <= have <= (n if tier != "nvme" else n + 4 * 2048 * 7), homes
            assert bool(n) == bool(have), (homes, tier)
        tasks, links = r.last("tasks"), r.last("links")
        assert ("disk" in links) == ("load" in tasks) == ("nvme" in homes), homes
        assert ("store" in tasks) == homes.startswith("nvme"), homes


def test_the_first_loss_is_that_of_no_difference(place, dpo):
    """Exactly: in every type the reference has the policy's bits."""
    for tuned, dtype in (("lora", "fp32"), ("all", "bf16"), ("all", "fp16"),
                         ("some", "fp16"), ("both", "bf16")):
        r = place.good(1, {**dpo, **TUNED[tuned], **run.typed(dtype), "loss.sft": 0,
                           "run.steps": 1})
        assert r.steps[0]["loss"] == pytest.approx(0.6931471805599453, rel=1e-15)
        assert r.steps[0]["rewards/margins"] == 0


@pytest.mark.parametrize("tuned", ("lora", "all", "both"))
def test_copies_are_in_no_export(tuned, place, dpo):
    """Neither in that of a checkpoint."""
    out = place.good(2, {**dpo, **TUNED[tuned], "run.save": True,
                         "run.export": str(place.folder / "whole")}).output
    ckpt("export", out, "--out", place.folder / "later")
    files = [hf.read(place.folder / x) for x in ("whole", "later")]
    assert files[0] == files[1] and not any("reference" in k for k in files[0])


# ---- refusals ----

def test_data_that_are_no_pairs_are_refused(place, dpo):
    seq = run.MODEL["seq"]
    tokens, mask = pair_texts(some_pairs(), seq)
    n, none = 4 * seq, [0] * seq
    for text, end, marks, words in (
            (0, n, mask[:n], ("no pairs of texts", "--preferences")),
            (seq, n + seq, mask[:n + seq], ("last pair is not whole",)),
            (seq, n, None, ("no loss mask",)),
            (seq, n, [*mask[:seq], *none, *mask[2 * seq:n]],
             ("text 1 has nothing to be learnt",))):
        path = place.folder / "odd.bin"
        path.with_suffix(".mask").unlink(missing_ok=True)
        pairs_shard(path, tokens[:end], marks, text)
        run.refused(place.launch(1, {**dpo, "data.path": str(path)}), *words)


def test_a_gpu_is_planned(place, dpo):
    """With two more boundaries, and a copy of what is trained."""
    machine = run.ROOT / "configs/machines/h100-80-dgx.json"
    plain, lora, full = (place.launch(1, {**c, "run.eval_batches": 0, "run.eval_interval": 0}, [
        "--plan", "--machine", str(machine)]) for c in (
            {**dpo, "loss.type": "cross_entropy", "loss.sft": 0, **LORA},
            {**dpo, **LORA}, dpo))
    assert plain.rc == lora.rc == full.rc == 0, f"{plain}{lora}{full}"
    more = 2 * 24 * 16 * 24 * 4
    assert run.planned(lora.out, ["boundaries"]) - run.planned(
        plain.out, ["boundaries"]) == pytest.approx(more, abs=0.02 * 2**20)


# ---- from records to a run ----

def test_tokenize_writes_what_a_run_reads(place):
    pytest.importorskip("jinja2")
    records = place.folder / "records.jsonl"
    records.write_text("".join(json.dumps(x) + "\n" for x in (
        {"prompt": "Two and two", "chosen": " are four.", "rejected": " are 5."},
        {"prompt": [{"role": "user", "content": "Hi"}],
         "chosen": [{"role": "assistant", "content": "Hello!"}],
         "rejected": [{"role": "assistant", "content": "What?"}]})))
    chat = place.folder / "chat.jinja"
    chat.write_text("{% for m in messages %}{{ m.role }}:{{ m.content + eos_token }}"
                    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}")
    r = run.call(run.ROOT / "tools/tokenize", "--tokenizer", "bytes", "--chat", chat,
                 "--out", place.folder / "out", "--preferences", 64, records)
    assert r.rc == 0 and "the longest text has 25" in r.out, str(r)
    path = place.folder / "out_train_000000.bin"
    c = {**on(place, path), **LORA, "data.val_fraction": 0, "train_batch_size": 4,
         "model.seq": 64, "run.steps": 1}
    # Of these records the answers alone, and what ends them, are learnt.
    mask = path.with_suffix(".mask").read_bytes()[1024:]
    learnt = [sum(mask[i:i + 64]) for i in range(0, 256, 64)]
    assert learnt == [11, 8, 7, 6]
    assert place.good(1, c).losses == pytest.approx([0.6931471805599453])
    run.refused(place.launch(1, {**c, "model.seq": 32}), "texts of 64 tokens")


@pytest.fixture
def python_with_trl():
    python = os.environ.get("IZ_TEST_PYTHON")
    if not python or run.call(python, "-c", "import trl").rc:
        pytest.skip("IZ_TEST_PYTHON: a Python with trl")
    return python


def theirs(python, file, *words):
    r = run.call(python, pathlib.Path(preferences.__file__), file, *words, timeout_s=900)
    assert r.rc == 0, str(r)
    return json.loads(file.read_text())


def test_an_adapter_learns_as_in_trl(place, python_with_trl):
    """From the same initial one, without which TRL's reference is the base, too."""
    base = hf.write(place.folder / "in", preferences.tensors(),
                    hf.gpt2_config(preferences.GPT2))
    seq, place.model = preferences.SEQ, {}
    path = pairs_shard(place.folder / "pairs.bin",
                       *pair_texts(preferences.pairs(), seq), seq)
    c = {**on(place, path, **preferences.LOSSES["dpo"]), "data.val_fraction": 0,
         "model": {"import": str(base), "seq": seq}, **LORA,
         "train_batch_size": 2 * preferences.PAIRS, "gradient_clipping": preferences.CLIP,
         "optimizer": {"type": "AdamW", "params": preferences.ADAM}}
    first = place.folder / "first"
    place.good(1, {**c, "run.steps": 1, "run.export": str(first), "lora.export": "adapter",
                   "optimizer.params.lr": 0.0})
    want = theirs(python_with_trl, place.folder / "theirs.json", base, first)
    r = place.good(1, {**c, "run.steps": preferences.STEPS})
    for got, ref in zip(r.steps, want):
        for k in ("loss", *NAMES):
            assert got[k] == pytest.approx(ref[k], rel=1e-5, abs=1e-5), k
    assert r.losses[-1] < 0.99 * r.losses[0]


def test_the_golden_file_has_trls_numbers(place, python_with_trl):
    """They are computed anew."""
    have = theirs(python_with_trl, place.folder / "again.json")
    want = json.loads(preferences.FILE.read_text())
    for name in want:
        for a, b in zip(have[name], want[name]):
            assert a == pytest.approx(b, rel=1e-6, abs=1e-7)
