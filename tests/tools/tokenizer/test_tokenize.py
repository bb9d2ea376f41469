# SPDX-License-Identifier: Apache-2.0
"""tools/tokenize: ids of hard strings, shards, masks, what is refused, and what is left
when it is stopped."""
import functools
import json
import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
import time
import unicodedata

import pytest

import strings

HERE = pathlib.Path(__file__).resolve().parent
TOOLS = HERE.parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

from tokenizing import documents, records, tokens, work  # noqa: E402
from tokenizing import shards as files  # noqa: E402

TIMEOUT_S = 120
FAMILIES = ("gpt2", "llama3", "qwen2")
ENDS = {"gpt2": "<|endoftext|>", "llama3": "<|end_of_text|>", "qwen2": "<|endoftext|>"}


def run(*args, status=0, words=(), **more):
    p = subprocess.run([sys.executable, TOOLS / "tokenize", *map(str, args)],
                       capture_output=True, timeout=TIMEOUT_S, **more)
    assert p.returncode == status, p.stderr.decode()
    for w in words:
        assert w in p.stderr.decode(), p.stderr.decode()
    return p


class Family:
    """The small tokenizer of a family, as the package reads it."""

    def __init__(self, name):
        self.text = (HERE / f"{name}.json").read_text()
        self.spec = json.loads(self.text)
        package = pytest.importorskip("tokenizers")
        self.package = package.Tokenizer.from_str(self.text)
        self.package.encode_special_tokens = True

    def encode(self, text):
        return self.package.encode(text.decode(), add_special_tokens=False).ids

    def special(self):
        return {a["content"]: a["id"] for a in self.spec["added_tokens"]}


@functools.lru_cache(maxsize=None)
def trained(name):
    return Family(name)


def ints(path, count, size):
    data = path.read_bytes()[:count * size]
    return [int.from_bytes(data[i:i + size], "little")
            for i in range(0, len(data), size)]


def read_shard(path):
    """Tokens, by the layout as it is documented."""
    magic, version, count = ints(path, 3, 4)
    size = {(20240520, 1): 2, (20240801, 7): 4}[magic, version]
    data = path.read_bytes()[1024:]
    assert len(data) == count * size
    return [int.from_bytes(data[i:i + size], "little")
            for i in range(0, len(data), size)]


def read_mask(path):
    data = path.read_bytes()
    assert data[:4] == b"mask" and ints(path, 2, 4)[1] == 1
    assert ints(path, 3, 4)[2] == len(data) - 1024
    return list(data[1024:])


def shards(folder, split="train", ending="bin", read=read_shard):
    paths = sorted(folder.glob(f"out_{split}_*.{ending}"))
    return [read(p) for p in paths]


def flat(lists):
    return [x for one in lists for x in one]


class Place:
    def __init__(self, folder):
        self.folder, self.n = folder, 0

    def new(self):
        self.n += 1
        folder = self.folder / f"run{self.n}"
        folder.mkdir()
        return folder

    def tokenizer(self, family, change=None):
        spec = json.loads(trained(family).text)
        if change:
            change(spec)
        path = self.new() / "tokenizer.json"
        path.write_text(json.dumps(spec, ensure_ascii=self.n % 2 == 0))
        return path

    def encode(self, tokenizer, inputs, *options):
        """Runs it on the inputs {name: bytes}; the folder of the output."""
        out = self.new()
        names = []
        for name, data in inputs.items():
            (out / name).write_bytes(data)
            names.append(out / name)
        p = run("--tokenizer", tokenizer, "--out", out / "out", *options,
                *names)
        self.said = p.stdout.decode() + p.stderr.decode()
        return out

    def ids(self, tokenizer, data, *options):
        return flat(shards(self.encode(tokenizer, {"t.txt": data}, "--end",
                                       "none", *options)))


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


# ---- ids ----

@pytest.mark.parametrize("family", FAMILIES)
def test_hard_strings_give_the_golden_ids(family, place):
    golden = json.loads((HERE / "golden.json").read_text())[family]
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
                for _ in range(30000))
    return (s + "a" * 150000 + " " * 150000 + "\u4f60\u597d" * 40000 +
            (HERE / "corpus.txt").read_text()).encode()


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
        out = place.encode(path, {"t.txt": data}, "--end", "none")
        p = run("--tokenizer", path, "--decode", out / "out_train_000000.bin")
        assert p.stdout == data


def test_decoding_gives_form_c_with_nfc(place):
    path = place.tokenizer("qwen2")
    data = "\n".join(strings.HARD.values())
    out = place.encode(path, {"t.txt": data.encode()}, "--end", "none")
    p = run("--tokenizer", path, "--decode", out / "out_train_000000.bin")
    assert p.stdout.decode() == unicodedata.normalize("NFC", data)


def test_bytes_are_tokens(place):
    data = bytes(range(1, 256))
    assert place.ids("bytes", data) == list(data)
    out = place.encode("bytes", {"t.txt": data})
    assert flat(shards(out)) == [*data, 0]


def test_a_space_in_front_is_added_where_the_file_says_so(place):
    def change(spec):
        spec["pre_tokenizer"]["add_prefix_space"] = True
    path = place.tokenizer("gpt2", change)
    tok = trained("gpt2")
    assert place.ids(path, b"the end") == tok.encode(b" the end")
    assert place.ids(path, b" the end") == tok.encode(b" the end")
    # Behind bytes that are no text, the text goes on.
    bad = json.loads((HERE / "golden.json").read_text())["gpt2"]["latin-1"]
    assert place.ids(path, strings.BAD["latin-1"]) == \
        tok.encode(b" d") + bad[1:]


@pytest.mark.parametrize("each", (True, False))
def test_digits_before_byte_level(each, place):
    def change(spec):
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": each},
            {"type": "ByteLevel", "add_prefix_space": False,
             "trim_offsets": True}]}
    tok = trained("gpt2")
    parts = [b"in ", *((b"1", b"9", b"5") if each else (b"195",)), b" years "]
    assert place.ids(place.tokenizer("gpt2", change), b"in 195 years ") == \
        [i for p in parts for i in tok.encode(p)]


def test_splits_in_a_row_cut_what_the_one_before_left(place):
    def change(spec):
        spec["pre_tokenizer"]["pretokenizers"][0:0] = [
            {"type": "Split", "pattern": {"String": "e."},
             "behavior": "Isolated", "invert": False}]
    tok = trained("llama3")
    want = [i for p in (b"th", b"e.", b" hous", b"e.", b"es")
            for i in tok.encode(p)]
    path = place.tokenizer("llama3", change)
    assert place.ids(path, b"the. house.es") == want
    assert place.ids(path, b"xe.te.h") == [
        i for p in (b"x", b"e.", b"t", b"e.", b"h") for i in tok.encode(p)]


def test_what_a_pattern_leaves_out_is_left_out_where_the_file_says_so(place):
    def change(spec):
        pre(spec)["pretokenizers"][0].update(
            pattern={"Regex": "[a-z]+"}, behavior="Removed", invert=True)
    tok = trained("llama3")
    assert place.ids(place.tokenizer("llama3", change), b"ab 12 c!") == \
        tok.encode(b"ab") + tok.encode(b"c")


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


def test_added_tokens_that_are_not_special_are_always_found(place):
    tok = trained("qwen2")
    think = tok.special()["<think>"]
    assert place.ids(place.tokenizer("qwen2"), b"so <think> on") == [
        *tok.encode(b"so "), think, *tok.encode(b" on")]


def test_the_longest_added_token_wins(place):
    def change(spec):
        last = spec["added_tokens"][-1]
        spec["added_tokens"].append({**last, "id": last["id"] + 1,
                                     "content": "<think>!"})
    think = trained("qwen2").special()["<think>"]
    assert place.ids(place.tokenizer("qwen2", change),
                     b"<think>!<think>") == [think + 1, think]


# ---- documents and shards ----

def texts(n):
    rng = random.Random(n)
    lines = (HERE / "corpus.txt").read_text().splitlines()
    return [" ".join(rng.choices(lines, k=rng.randrange(1, 5)))
            for _ in range(n)]


def jsonl(records):
    return "".join(json.dumps(r) + "\n" for r in records).encode()


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_end_with_end_of_text(family, place):
    tok = trained(family)
    end = tok.special()[ENDS[family]]
    docs = texts(9)
    path = place.tokenizer(family)
    want = [x for d in docs for x in [*tok.encode(d.encode()), end]]
    out = place.encode(path, {"t.jsonl": jsonl({"text": d} for d in docs)})
    assert flat(shards(out)) == want
    assert not list(out.glob("*.mask"))
    out = place.encode(path, {"t.txt": "\n--\n".join(docs).encode()},
                       "--split-on", r"\n--\n")
    assert flat(shards(out)) == want
    out = place.encode(path, {"a.txt": docs[0].encode(),
                              "b.txt": docs[1].encode()},
                       "--begin", "<|endoftext|>" if family != "llama3"
                       else "<|begin_of_text|>")
    begin = end if family != "llama3" else tok.special()["<|begin_of_text|>"]
    assert flat(shards(out)) == [x for d in docs[:2] for x in
                                 [begin, *tok.encode(d.encode()), end]]


def test_the_output_is_the_same_with_any_number_of_processes(place):
    path = place.tokenizer("qwen2")
    data = jsonl({"text": d} for d in texts(4000))
    outs = [place.encode(path, {"t.jsonl": data}, "--threads", n,
                         "--shard-tokens", 50000, "--val-fraction", 0.05)
            for n in (1, 2, 3, 8)]
    names = sorted(p.name for p in outs[0].glob("out_*"))
    assert len(names) > 5 and any("val" in n for n in names)
    for out in outs[1:]:
        assert sorted(p.name for p in out.glob("out_*")) == names
        for n in names:
            assert (out / n).read_bytes() == (outs[0] / n).read_bytes()


@pytest.mark.parametrize("size", (1, 7, 100, 4096, 5000))
def test_shards_are_full_but_the_last(size, place):
    data = bytes(random.Random(size).randrange(1, 256)
                 for _ in range(min(3 * size + 1, 9999)))
    out = place.encode("bytes", {"t.txt": data}, "--shard-tokens", size,
                       "--end", "none")
    parts = shards(out)
    assert [len(p) for p in parts[:-1]] == [size] * (len(parts) - 1)
    assert 0 < len(parts[-1]) <= size
    assert flat(parts) == list(data)


def test_large_vocabularies_have_32_bits(place):
    def change(spec):
        last = spec["added_tokens"][-1]
        spec["added_tokens"].append({**last, "id": 70000, "content": "<far>"})
        spec["model"]["vocab"]["<far>"] = 70000
    path = place.tokenizer("gpt2", change)
    out = place.encode(path, {"t.txt": b"a<far>"}, "--end", "none", "--special")
    one = out / "out_train_000000.bin"
    assert ints(one, 2, 4) == [20240801, 7]
    assert read_shard(one)[-1] == 70000
    assert "at least 70001" in place.said


@pytest.mark.parametrize("fraction", (0.01, 0.1, 0.33, 0.5))
def test_validation_has_its_part_of_the_documents(fraction, place):
    n = 2000
    docs = [f"doc {i}." for i in range(n)]
    out = place.encode("bytes", {"t.jsonl": jsonl({"text": d} for d in docs)},
                       "--val-fraction", fraction)
    parts = {s: bytes(flat(shards(out, s))).decode().split("\0")[:-1]
             for s in ("train", "val")}
    assert abs(len(parts["val"]) - fraction * n) <= 1
    assert sorted(parts["train"] + parts["val"]) == sorted(docs)
    # Every tenth of the input has about its share, and no period is met.
    chosen = sorted(int(d[4:-1]) for d in parts["val"])
    for k in range(10):
        have = sum(k * n // 10 <= c < (k + 1) * n // 10 for c in chosen)
        assert abs(have - fraction * n / 10) <= 2
    if fraction < 0.3:
        assert len({b - a for a, b in zip(chosen, chosen[1:])}) > 3


def test_one_document_is_cut_at_the_end_of_a_line(place):
    lines = [f"line {i}\n" for i in range(100)]
    out = place.encode("bytes", {"t.txt": "".join(lines).encode()},
                       "--val-fraction", 0.2)
    train, val = (bytes(flat(shards(out, s))) for s in ("train", "val"))
    assert train[:-1] + val[:-1] == "".join(lines).encode()
    assert train.endswith(b"\n\0") and 0.19 < len(val) / 790 < 0.25


# ---- masks ----

def learnt(out):
    """Runs of tokens and whether they are to be learnt."""
    ids, mask = flat(shards(out)), flat(shards(out, "train", "mask",
                                               read_mask))
    assert len(ids) == len(mask)
    runs = []
    for i, m in zip(ids, mask):
        if runs and runs[-1][1] == m:
            runs[-1][0].append(i)
        else:
            runs.append(([i], m))
    return runs


@pytest.mark.parametrize("size", (3, 10000))
def test_a_prompt_is_masked_and_its_completion_not(size, place):
    tok = trained("gpt2")
    end = tok.special()["<|endoftext|>"]
    records = [{"prompt": f"Who {i}?", "completion": f" He {i}."}
               for i in range(5)]
    out = place.encode(place.tokenizer("gpt2"), {"t.jsonl": jsonl(records)},
                       "--shard-tokens", size)
    want = [run for r in records for run in
            ((tok.encode(r["prompt"].encode()), 0),
             (tok.encode(r["completion"].encode()) + [end], 1))]
    assert learnt(out) == want


CHAT = [{"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Who?\n"},
        {"role": "assistant", "content": "\nHe <|eot_id|><|im_end|> "},
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "Then."}]


def chat_parts(family):
    """(text or token, learnt) of CHAT as the three styles write it."""
    out = []
    for m in CHAT:
        answer = int(m["role"] == "assistant")
        if family == "qwen2":
            out += [("<|im_start|>", 0, 1), (m["role"], 0, 0), ("\n", 0, 0),
                    (m["content"], answer, 0), ("<|im_end|>", answer, 1),
                    ("\n", 0, 0)]
        elif family == "llama3":
            out += [("<|start_header_id|>", 0, 1), (m["role"], 0, 0),
                    ("<|end_header_id|>", 0, 1), ("\n\n", 0, 0),
                    (m["content"].strip(), answer, 0),
                    ("<|eot_id|>", answer, 1)]
        else:
            out += [(m["role"], 0, 0), (":\n", 0, 0), (m["content"], answer, 0)]
            out += [("<|endoftext|>", 1, 1)] if answer else []
            out += [("\n", 0, 0)]
    return out + [(ENDS[family], 0, 1)]


@pytest.mark.parametrize("family", FAMILIES)
def test_of_messages_the_answers_are_learnt(family, place):
    tok = trained(family)
    out = place.encode(place.tokenizer(family),
                       {"t.jsonl": jsonl([{"messages": CHAT}])})
    want = []
    for text, learn, special in chat_parts(family):
        ids = [tok.special()[text]] if special else tok.encode(text.encode())
        if want and want[-1][1] == learn:
            want[-1][0].extend(ids)
        else:
            want.append((list(ids), learn))
    assert learnt(out) == want


def test_a_chat_style_needs_its_tokens(place):
    path = place.tokenizer("gpt2")
    data = place.new() / "t.jsonl"
    data.write_bytes(jsonl([{"messages": CHAT}]))
    run("--tokenizer", path, "--out", place.new() / "out", "--chat", "chatml",
        data, status=1, words=["chatml", "<|im_start|>"])


# ---- what is refused ----

def pre(spec):
    return spec["pre_tokenizer"]


REFUSED = {
    "dropout": (lambda s: s["model"].update(dropout=0.1), "model.dropout"),
    "type": (lambda s: s["model"].update(type="Nope"), "line 1"),
    "merge": (lambda s: s["model"]["merges"].append(["a", "zz~zz"]), "zz~zz"),
    "no byte level": (lambda s: pre(s)["pretokenizers"].pop(), "not byte-level"),
    "byte": (lambda s: s["model"]["vocab"].pop("\u0107"), "0x07"),
    "id twice": (lambda s: s["model"]["vocab"].update(q=3), "twice"),
    "added id": (lambda s: s["added_tokens"][0].update(id=5), "has id 5"),
    "pattern": (lambda s: pre(s)["pretokenizers"][0]["pattern"].update(
        Regex="(a"), "parenthesis"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_with_a_file_is_named(name, place):
    change, word = REFUSED[name]
    path = place.tokenizer("llama3", change)
    data = place.new() / "t.txt"
    data.write_bytes(b"x")
    out = place.new()
    run("--tokenizer", path, "--out", out / "out", data, status=1,
        words=[word, str(path)])
    assert not list(out.iterdir())


def test_what_the_package_reads_is_read(place):
    """Words of a lower-case vocabulary; what is not UTF-8 is unknown."""
    words = {"[UNK]": 0, "the": 1, "end": 2}
    path = place.new() / "tokenizer.json"
    path.write_text(json.dumps({
        "version": "1.0", "truncation": {
            "direction": "Right", "max_length": 2, "strategy": "LongestFirst",
            "stride": 0}, "padding": None, "added_tokens": [],
        "normalizer": {"type": "Lowercase"}, "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"}}))
    pytest.importorskip("tokenizers")
    assert place.ids(path, b"The END \xff the x") == [1, 2, 0, 1, 0]
    p = run("--tokenizer", path, "--decode",
            place.encode(path, {"t.txt": b"The END"}, "--end", "none") /
            "out_train_000000.bin")
    assert p.stdout == b"the end"


@pytest.mark.parametrize("package, name", [("tokenizers", "t.json"),
                                           ("sentencepiece", "t.model")])
def test_a_missing_package_is_named_before_anything_is_written(package, name, place):
    folder, out = place.new(), place.new()
    (folder / f"{package}.py").write_text("raise ImportError('not here')")
    for file in (name, "t.txt"):
        (folder / file).write_bytes(b"x")
    run("--tokenizer", folder / name, "--out", out / "out", folder / "t.txt", status=1,
        words=[f"pip install {package}"],
        env={**os.environ, "PYTHONPATH": str(folder)})
    assert not list(out.iterdir())


BAD_LINES = [b"{", b"[1]", b'{"text": 5}', b'{"txt": "a"}', b"\xff",
             b'{"prompt": "a", "completion": "b"}', b'{"messages": []}',
             b'{"text": "a", "text": "b"}', b'{"text": "\\ud800"}',
             b'{"text": "a", "n": NaN}', pytest.param(b"[" * 20000, id="deep")]


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_record_is_named_or_left_out(bad, place):
    data = b'{"text": "a"}\n\n' + bad + b'\n{"text": "b"}\n'
    path = place.new() / "t.jsonl"
    path.write_bytes(data)
    out = place.new()
    run("--tokenizer", "bytes", "--out", out / "out", path, status=1,
        words=[f"{path}, line 3"])
    assert not list(out.iterdir())
    out = place.encode("bytes", {"t.jsonl": data}, "--skip-bad")
    assert bytes(flat(shards(out))) == b"a\0b\0"
    assert "1 faulty" in place.said


def test_text_among_conversations_is_named_or_left_out(place):
    files = {"a.jsonl": jsonl([{"prompt": "a", "completion": "b"}]), "b.txt": b"c"}
    out = place.encode("bytes", files, "--skip-bad")
    assert bytes(flat(shards(out))) == b"ab\0"
    run("--tokenizer", "bytes", "--out", out / "new", out / "a.jsonl", out / "b.txt",
        status=1, words=["b.txt", "conversation"])


@pytest.mark.parametrize("damage, word", [
    (lambda b: b[:1000], "header"), (lambda b: b[:-2], "3 tokens"),
    (lambda b: b"x" + b[1:], "magic"), (lambda b: b[:-2] + b"\0\1", "token 2 is 256")])
def test_a_damaged_shard_is_named(damage, word, place):
    out = place.encode("bytes", {"t.txt": b"abc"}, "--end", "none")
    path = out / "out_train_000000.bin"
    path.write_bytes(damage(path.read_bytes()))
    run("--tokenizer", "bytes", "--decode", path, status=1, words=[word, str(path)])


def test_shards_of_an_earlier_run_are_not_mixed_with_new_ones(place):
    out = place.encode("bytes", {"t.txt": b"abc"})
    run("--tokenizer", "bytes", "--out", out / "out", out / "t.txt", status=1,
        words=["out_train_000000.bin", "already"])


@pytest.mark.parametrize("args, word", [
    ([], "--tokenizer"), (["--tokenizer", "bytes"], "--out"),
    (["--tokenizer", "bytes", "--out", "x"], "no input"),
    (["--shard-tokens", "0"], "0"), (["--val-fraction", "0.6"], "0.6"),
    (["--threads", "x"], "x"), (["--chat", "yaml"], "yaml"), (["--no"], "no")])
def test_a_wrong_command_line_exits_2(args, word):
    run(*args, status=2, words=[word])


@pytest.mark.parametrize("args, word", [
    (["--tokenizer", "/none.json"], "No such file"),
    (["--tokenizer", "none"], "neither"),
    (["--tokenizer", "bytes", "--end", "<x>"], "<x>")])
def test_a_missing_thing_is_named(args, word, place):
    data = place.new() / "t.txt"
    data.write_bytes(b"x")
    run(*args, "--out", place.new() / "out", data, status=1, words=[word])


@pytest.mark.parametrize("content, word", [(b"", "empty"), (None, "regular")])
def test_what_is_no_text_is_named(content, word, place):
    path = place.new() / "t.txt"
    path.mkdir() if content is None else path.write_bytes(content)
    run("--tokenizer", "bytes", "--out", place.new() / "out", path, status=1,
        words=[word, str(path)])


# ---- processes, and what stops them ----

def test_batches_are_taken_in_order_and_few_are_on_their_way(place, monkeypatch):
    path = place.new() / "t.jsonl"
    path.write_bytes(jsonl({"text": str(i)} for i in range(500)))
    given, ahead, text = 0, [], b""
    batches = work.batches

    def counted(*args):
        nonlocal given
        for b in batches(*args):
            given += 1
            yield b

    def take(batch, done):
        nonlocal text
        ahead.append(given - len(ahead))
        text += bytes(batch.tokens[0].tolist())

    monkeypatch.setattr(work, "batches", counted)
    monkeypatch.setattr(work, "BATCH_PARTS", 1)
    one = tokens.Bytes()
    corpus = documents.Corpus([str(path)], None, 0)
    recipe = records.Recipe(one, None, 10, False, "auto")
    work.run_processes(corpus, one, 3, {"corpus": corpus, "recipe": recipe, "width": 2,
                                        "skip_bad": False}, take)
    assert text.decode().split() == [str(i) for i in range(500)]
    assert len(ahead) == 500 and max(ahead) <= 6


def test_a_shard_has_its_name_when_all_of_it_is_on_disk(place, monkeypatch):
    synced, named = [], []
    rename = os.rename

    def checked(old, new):
        assert synced[-1] == os.stat(old).st_ino
        assert ints(pathlib.Path(old), 3, 4)[2] == 5
        named.append(new.split("_")[-1])
        rename(old, new)

    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    monkeypatch.setattr(os, "rename", checked)
    out = files.Shards(str(place.new() / "out"), 256, 5, True)
    out.put(bytes(24), bytes(12))
    assert named == ["000000.mask", "000000.bin", "000001.mask", "000001.bin"]


def test_a_full_disk_leaves_nothing(place):
    folder = place.new()
    (folder / "t.txt").write_bytes(b"abc" * 50000)
    run("--tokenizer", "bytes", "--out", folder / "out", folder / "t.txt", status=1,
        words=["out_train_000000.bin", "File too large"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000)))
    assert not list(folder.glob("out*"))


# The program with a tokenizer of bytes that ends or waits where a text says so.
DRIVER = """
import os, pathlib, runpy, sys, time
tool, here = sys.argv[1:3]
sys.path.insert(0, os.path.dirname(tool))
from tokenizing import tokens

def ids(self, data):
    if b"die" in data:
        os._exit(9)
    if b"wait" in data:
        pathlib.Path(here).write_text(f"{os.getpid()}\\n")
        time.sleep(1000)
    return list(data)

tokens.Bytes.ids = ids
sys.argv = [tool, *sys.argv[3:]]
runpy.run_path(tool, run_name="__main__")
"""


def drive(folder, word):
    """Starts it on batches of a text, of which one of the last has the word."""
    (folder / "driver.py").write_text(DRIVER)
    lines = ["x" * 1000] * 1000
    lines[900] = word
    (folder / "t.jsonl").write_bytes(jsonl({"text": x} for x in lines))
    return subprocess.Popen(
        [sys.executable, folder / "driver.py", TOOLS / "tokenize", folder / "here",
         "--tokenizer", "bytes", "--out", folder / "out", "--threads", "1",
         "--shard-tokens", "10000", folder / "t.jsonl"], stderr=subprocess.PIPE)


def until(true):
    end = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_gone(pid):
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rsplit(")", 1)[1].split()[0] in "ZX"


def waiting(folder):
    """A run whose process waits and that has written a shard; that process's id."""
    p, here = drive(folder, "wait"), folder / "here"
    until(lambda: here.exists() and here.read_text().endswith("\n") and
          (folder / "out_train_000000.bin").exists())
    return p, int(here.read_text())


def complete(folder):
    names = sorted(folder.glob("out_train_*.bin"))
    assert names and all(len(read_shard(n)) == 10000 for n in names)


def test_a_process_that_ends_is_an_error(place):
    folder = place.new()
    p = drive(folder, "die")
    said = p.communicate(timeout=TIMEOUT_S)[1].decode()
    assert p.returncode == 1 and "a process ended" in said
    assert not list(folder.glob("out*.tmp"))


def test_an_interrupt_leaves_complete_shards_alone(place):
    folder = place.new()
    p, process = waiting(folder)
    p.send_signal(signal.SIGINT)
    p.communicate(timeout=TIMEOUT_S)
    assert p.returncode == -signal.SIGINT and is_gone(process)
    assert not list(folder.glob("out*.tmp"))
    complete(folder)


def test_the_processes_of_a_killed_run_end_and_no_half_shard_has_its_name(place):
    folder = place.new()
    p, process = waiting(folder)
    p.kill()
    p.communicate(timeout=TIMEOUT_S)
    until(lambda: is_gone(process))
    complete(folder)


# ---- SentencePiece ----

@pytest.fixture(scope="module", params=("bpe", "unigram"))
def sentencepiece_model(request, tmp_path_factory):
    package = pytest.importorskip("sentencepiece")
    prefix = tmp_path_factory.mktemp("sp") / "small"
    package.SentencePieceTrainer.train(
        input=str(HERE / "corpus.txt"), model_prefix=str(prefix), vocab_size=400,
        byte_fallback=True, model_type=request.param, minloglevel=2)
    return package.SentencePieceProcessor(model_file=f"{prefix}.model"), \
        f"{prefix}.model"


def test_a_sentencepiece_model_gives_the_ids_of_its_package(sentencepiece_model, place):
    package, path = sentencepiece_model
    lines = (HERE / "corpus.txt").read_text().splitlines()
    lines += ["x".join(lines * 10), strings.BAD["latin-1"].decode("latin-1")]
    out = place.encode(path, {"t.jsonl": jsonl({"text": x} for x in lines)})
    assert flat(shards(out)) == [i for x in lines for i in [*package.encode(x), 2]]
    p = run("--tokenizer", path, "--decode", out / "out_train_000000.bin")
    assert p.stdout.decode().replace(" ", "") == "".join(lines).replace(" ", "")
    bad = strings.BAD["latin-1"]
    assert place.ids(path, bad) == package.encode(bad)
