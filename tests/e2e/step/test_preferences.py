# SPDX-License-Identifier: Apache-2.0
"""Pairs of texts: DPO and IPO against TRL, the same bits wherever the reference
lives, and what is refused."""
import json
import os
import re

import pytest

import preferences
import run
from inputs import pair_texts, pairs_shard, some_pairs
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

@pytest.fixture
def theirs(place):
    """What starts from TRL's weights and reads its pairs, and has its settings."""
    folder = hf.write(place.folder / "in", preferences.tensors(),
                      hf.gpt2_config(preferences.GPT2))
    seq, place.model = preferences.SEQ, {}
    path = pairs_shard(place.folder / "pairs.bin",
                       *pair_texts(preferences.pairs(), seq), seq)
    return {**on(place, path), "data.val_fraction": 0,
            "gradient_clipping": preferences.CLIP,
            "model": {"import": str(folder), "seq": seq}, "run.steps": preferences.STEPS,
            "train_batch_size": 2 * preferences.PAIRS,
            "optimizer": {"type": "AdamW", "params": preferences.ADAM}}


def near(steps, want, bound):
    assert len(steps) == len(want) == preferences.STEPS
    for i, (got, ref) in enumerate(zip(steps, want)):
        for k in ("loss", *preferences.NAMES):
            assert got[k] == pytest.approx(ref[k], rel=bound, abs=bound), (i, k)


@pytest.mark.sanitized
@pytest.mark.parametrize("name, micro", zip(preferences.LOSSES, (12, 6, 2)))
def test_steps_are_those_of_trl(name, micro, theirs, place):
    """It has one micro-batch, computes in double here, and reports its means in fp32."""
    want = json.loads(preferences.FILE.read_text())[name]
    r = place.good(1, {**theirs, "loss": preferences.LOSSES[name],
                       "train_micro_batch_size_per_gpu": micro})
    # fp32 against double: 2e-6 at most here; the first step is nearer.
    near(r.steps, want, 4e-6)
    assert r.losses[0] == pytest.approx(want[0]["loss"], rel=1e-7)
    assert re.search(r"last step:  margin [\d.]+ in favour of 100% of its pairs", r.out)


@pytest.fixture
def by_trl(place):
    """What TRL itself computes."""
    python, program = os.environ.get("IZ_TEST_PYTHON"), preferences.__file__
    if not python or run.call(python, "-c", "import trl").rc:
        pytest.skip("IZ_TEST_PYTHON: a Python with trl")

    def by_trl(*words):
        file = place.folder / "theirs.json"
        r = run.call(python, program, file, *words, timeout_s=900)
        assert r.rc == 0, str(r)
        return json.loads(file.read_text())
    return by_trl


def test_an_adapter_learns_as_in_trl(theirs, place, by_trl):
    """From the same initial one, without which TRL's reference is the base, too."""
    first = place.folder / "first"
    c = {**theirs, **LORA, "loss": preferences.LOSSES["dpo"]}
    place.good(1, {**c, "run.steps": 1, "run.export": str(first), "lora.export": "adapter",
                   "optimizer.params.lr": 0.0})
    r = place.good(1, c)
    near(r.steps, by_trl(place.folder / "in", first), 1e-5)
    assert r.losses[-1] < 0.99 * r.losses[0]


def test_the_golden_file_has_trls_numbers(by_trl):
    have, want = by_trl(), json.loads(preferences.FILE.read_text())
    for name in want:
        near(have[name], want[name], 1e-6)


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
    for homes in ("cpu", "cpu/none", "cpu/nvme", "nvme/cpu", "none/nvme"):
        tiers = 2 * homes.replace("none", "device").split("/")  # of both, if it is one
        r = place.good(2, {**dpo, **run.offload(3, "none", homes, nvme),
                           "run.eval_batches": 0, "run.eval_interval": 0})
        for tier in ("device", "cpu", "nvme"):
            have = r.memory.get(("parameters", tier), (0, 0))[1]
            n = tiers[:2].count(tier) * each
            # In a file they are whole chunks.
            assert n <= have <= (n + 4 * 2048 * 7 if n and tier == "nvme" else n), homes
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
