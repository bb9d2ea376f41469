# SPDX-License-Identifier: Apache-2.0
"""The ids are those of the packages, of long texts and of any bytes too."""
import json
import random
import unicodedata

import pytest

import strings
from place import ENDS, FAMILIES, HERE, LICENSE, flat, jsonl, run, shards, trained

from tokenizing import tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_hard_strings_give_the_ids_of_the_package(family, place):
    golden = json.loads((HERE / "golden.json").read_text())[family]
    golden |= {n: trained(family).encode(s.encode()) for n, s in strings.HARD.items()}
    # A document of blanks alone is left out.
    cases = {n: s for n, s in strings.ALL.items() if s.strip()}
    files = {f"{i}.txt": s for i, s in enumerate(cases.values())}
    out = place.encode(place.tokenizer(family), files)
    end = trained(family).special()[ENDS[family]]
    have, ids = [], flat(shards(out))
    while ids:
        i = ids.index(end)
        have.append(ids[:i])
        ids = ids[i + 1:]
    assert dict(zip(cases, have)) == {n: golden[n] for n in cases}


def long_text():
    """Of some parts; most of it can be cut anywhere, some of it nowhere."""
    rng = random.Random(5)
    words = [w for w in strings.HARD.values() if len(w) < 500]
    words += ["the", "and", " of", "in", "\n", "I'll", "  12 (x)"]
    s = "".join(rng.choice(words) + " " * rng.choice((0, 0, 1, 1, 2))
                for _ in range(10000))
    return (s + "a" * 70000 + " " * 70000 + "\u4f60\u597d" * 20000 +
            LICENSE.read_text()).encode()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_text_gives_the_ids_of_the_whole(family, place):
    data = long_text()
    want = trained(family).encode(data)
    path = place.tokenizer(family)
    assert place.ids(path, data) == want
    out = place.encode(path, {"t.jsonl": jsonl([{"text": data.decode()}])},
                       "--end", "none")
    assert flat(shards(out)) == want


def test_no_part_ends_where_the_tokens_would_change(place, monkeypatch):
    """Every border of hard strings is tried, as if parts were small."""
    monkeypatch.setattr(tokens, "PART", 64)
    middle = b"\n".join(s.encode() for s in strings.HARD.values())
    data = b"x" * tokens.PART + middle + b"y" * 2 * tokens.PART
    refused = taken = 0
    for family in FAMILIES:
        one = tokens.open_tokenizer(str(place.tokenizer(family)), False)
        want = one.ids(data)
        for border in tokens.BORDER.finditer(data):
            at = border.start()
            end = tokens.part_end(one, data, at - tokens.PART, len(data))
            assert one.ids(data[:end]) + one.ids(data[end:]) == want
            taken += end == at
            refused += end != at
    assert taken > 100 and refused > 0


@pytest.mark.parametrize("family", ("gpt2", "llama3"))
def test_decoding_gives_the_bytes_back(family, place):
    rng = random.Random(3)
    path = place.tokenizer(family)
    for data in (bytes(rng.randrange(256) for _ in range(200000)),
                 b"".join(strings.ALL.values())):
        assert place.again(path, data) == data


def test_decoding_gives_form_c_with_nfc(place):
    data = "\n".join(strings.HARD.values())
    assert place.again(place.tokenizer("qwen2"), data.encode()).decode() == \
        unicodedata.normalize("NFC", data)


def test_a_space_is_added_in_front_but_not_behind_bytes_that_are_no_text(place):
    path = place.tokenizer("gpt2", lambda s: s["pre_tokenizer"].update(add_prefix_space=True))
    for text in (b"the end", b" the end"):
        assert place.ids(path, text) == trained("gpt2").encode(b" the end")
    bad = json.loads((HERE / "golden.json").read_text())["gpt2"]["latin-1"]
    assert place.ids(path, strings.BAD["latin-1"]) == \
        trained("gpt2").encode(b" d") + bad[1:]


# ---- a blank in front ----

# A normalizer, what cuts into words, and a model that has the words and all letters.
BLANKS = {
    "Llama 2": ({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]}, None),
    "T5": (None, {"type": "Metaspace", "replacement": "\u2581", "add_prefix_space": True}),
    "Mistral": (None, {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first",
                       "split": False}),
}


def unigram(place, name):
    words = ["\u2581the", "the", "\u2581end", "end", "\u2581", "\n", *"abcdefghijklmnopqrstuvwxyz./<>"]
    path = place.new() / "tokenizer.json"
    path.write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [
            {"id": i, "content": a, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": a != "<think>"}
            for i, a in enumerate(("<unk>", "</s>", "<think>"))],
        "normalizer": BLANKS[name][0], "pre_tokenizer": BLANKS[name][1],
        "post_processor": None, "decoder": None, "model": {"type": "Unigram", "unk_id": 0, "vocab": [
            [w, -len(w) ** -2] for w in ("<unk>", "</s>", "<think>", *words)]}}))
    return path, words


@pytest.mark.parametrize("name", BLANKS)
def test_no_blank_is_added_behind_a_prompt(name, place):
    """Nor behind a part of a long text; behind an added token it is, as in the whole."""
    path, words = unigram(place, name)
    prompts = [{"prompt": "the", "completion": c} for c in ("end", " end", "end<think>the")]
    ids = flat(shards(place.encode(path, {"t.jsonl": jsonl(prompts)})))
    said = ["</s>" if i == 1 else "<think>" if i == 2 else words[i - 3] for i in ids]
    again = "the" if name == "Mistral" else "\u2581the"
    assert said == ["\u2581the", "end", "</s>", "\u2581the", "\u2581end", "</s>",
                    "\u2581the", "end", "<think>", again, "</s>"]
    one = tokens.open_tokenizer(str(path), False)
    data = b"the end.\n<think>the" * 20000
    assert 0 < tokens.part_end(one, data, 0, len(data)) < 2 * tokens.PART
    assert tokens.encode(one, data) == one.ids(data)


# ---- special tokens ----

def test_special_tokens_of_a_text_are_ordinary_text(place):
    tok = trained("qwen2")
    data = b"a<|im_end|>b<|endoftext|>"
    path = place.tokenizer("qwen2")
    assert place.ids(path, data) == tok.encode(data)
    s = tok.special()
    assert place.ids(path, data, "--special") == [
        *tok.encode(b"a"), s["<|im_end|>"], *tok.encode(b"b"),
        s["<|endoftext|>"]]


def test_a_special_token_that_cannot_be_text_is_named_or_left_out(place):
    """A Unigram model takes its name for a word.  What is unknown is no such token."""
    path, words = unigram(place, "T5")
    the = words.index("\u2581the") + 3
    bad = jsonl({"text": t} for t in ("the", "the </s> end", "A"))
    place.refuse(path, bad, name="t.jsonl", words=["line 2", "special token </s>"])
    place.refuse(path, b"the " * 40000 + b"</s>", "--skip-bad", words=["token </s>"])
    out = place.encode(path, {"t.jsonl": bad}, "--skip-bad")
    assert flat(shards(out)) == [the, 1, words.index("\u2581") + 3, 0, 1]
    assert place.ids(path, b"the</s>", "--special") == [the, 1]


def test_added_tokens_that_are_not_special_are_always_found(place):
    tok = trained("qwen2")
    think = tok.special()["<think>"]
    assert place.ids(place.tokenizer("qwen2"), b"so <think> on") == [
        *tok.encode(b"so "), think, *tok.encode(b" on")]


# ---- SentencePiece ----

@pytest.fixture(scope="module", params=("bpe", "unigram"))
def sentencepiece_model(request, tmp_path_factory):
    package = pytest.importorskip("sentencepiece")
    prefix = tmp_path_factory.mktemp("sp") / "small"
    package.SentencePieceTrainer.train(
        input=str(LICENSE), model_prefix=str(prefix), vocab_size=400,
        byte_fallback=True, model_type=request.param, minloglevel=2)
    return package.SentencePieceProcessor(model_file=f"{prefix}.model"), \
        f"{prefix}.model"


def test_a_sentencepiece_model_gives_the_ids_of_its_package(sentencepiece_model, place):
    package, path = sentencepiece_model
    lines = [x for x in LICENSE.read_text().splitlines() if x]
    lines += ["x".join(lines * 10), strings.BAD["latin-1"].decode("latin-1")]
    out = place.encode(path, {"t.jsonl": jsonl({"text": x} for x in lines)})
    assert flat(shards(out)) == [i for x in lines for i in [*package.encode(x), 2]]
    p = run("--tokenizer", path, "--decode", out / "out_train_000000.bin")
    assert p.stdout.decode().replace(" ", "") == "".join(lines).replace(" ", "")
    bad = strings.BAD["latin-1"]
    assert place.ids(path, bad) == package.encode(bad)
    prompts = jsonl({"prompt": "the", "completion": c} for c in ("License", " License"))
    words = "".join(map(package.id_to_piece, flat(shards(place.encode(
        path, {"t.jsonl": prompts})))))
    assert words == "\u2581theLicense</s>\u2581the\u2581License</s>"
