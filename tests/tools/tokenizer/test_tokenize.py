# SPDX-License-Identifier: Apache-2.0
"""The program tokenize against the slow tokenizer of reference.py: ids of hard
strings, shards, masks, and what is refused."""
import json
import os
import pathlib
import random
import subprocess

import pytest

import reference
from reference import FAMILIES, HARD, hard_strings, trained

ROOT = pathlib.Path(__file__).resolve().parents[3]
PROGRAM = os.environ.get("IZ_TOKENIZE",
                         str(ROOT / "build" / "tools" / "tokenize"))
TIMEOUT_S = 120


def run(*args, status=0, words=()):
    p = subprocess.run([PROGRAM, *map(str, args)], capture_output=True,
                       timeout=TIMEOUT_S)
    assert p.returncode == status, p.stderr.decode()
    for w in words:
        assert w in p.stderr.decode(), p.stderr.decode()
    return p


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
        spec = trained(family).file()
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

def test_golden_ids_are_those_of_the_reference():
    have = json.loads((reference.HERE / "golden.json").read_text())
    assert have == reference.golden()


@pytest.mark.parametrize("family", FAMILIES)
def test_hard_strings_give_the_golden_ids(family, place):
    want = json.loads((reference.HERE / "golden.json").read_text())[family]
    path = place.tokenizer(family)
    for name, data in hard_strings().items():
        if not data.strip():
            continue  # a document of blanks alone is left out
        assert place.ids(path, data) == want[name], name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_text_gives_the_ids_of_the_reference(family, place):
    rng = random.Random(5)
    words = [w for w in hard_strings().values() if len(w) < 500]
    words += [w.encode() for w in "the and of in a I you's  12 (x) \n".split(" ")]
    data = b"".join(rng.choice(words) + b" " * rng.choice((0, 0, 1, 1, 2))
                    for _ in range(800))
    data += (reference.HERE / "corpus.txt").read_bytes()
    assert place.ids(place.tokenizer(family), data) == \
        trained(family).encode(data)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_characters_give_the_ids_of_the_reference(family, place):
    """Every plane and class of character that this Python knows."""
    rng = random.Random(11)
    known = [chr(c) for c in range(1, 0x20000) if reference.unicodedata
             .category(chr(c)) not in ("Cn", "Cs", "Co")]
    s = "".join(rng.choice(known) + rng.choice(("", "", " ", "  ", "a", "1"))
                for _ in range(8000))
    data = s.encode()
    got = place.ids(place.tokenizer(family), data)
    want = trained(family).encode(data)
    if got != want:
        i = next(i for i, (a, b) in enumerate(zip(got, want)) if a != b)
        at = len(trained(family).decode(want[:i]))
        pytest.fail(f"token {i}: {data[at - 12:at + 20]!r}")


@pytest.mark.parametrize("family", ("gpt2", "llama3"))
def test_decoding_gives_the_bytes_back(family, place):
    rng = random.Random(3)
    path = place.tokenizer(family)
    for data in (bytes(rng.randrange(256) for _ in range(30000)),
                 b"".join(hard_strings().values())):
        out = place.encode(path, {"t.txt": data}, "--end", "none")
        p = run("--tokenizer", path, "--decode", out / "out_train_000000.bin")
        assert p.stdout == data


def test_decoding_gives_form_c_with_nfc(place):
    path = place.tokenizer("qwen2")
    data = "\n".join(HARD.values())
    out = place.encode(path, {"t.txt": data.encode()}, "--end", "none")
    p = run("--tokenizer", path, "--decode", out / "out_train_000000.bin")
    assert p.stdout.decode() == reference.unicodedata.normalize("NFC", data)


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


@pytest.mark.parametrize("each", (True, False))
def test_digits_before_byte_level(each, place):
    def change(spec):
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": each},
            {"type": "ByteLevel", "add_prefix_space": False}]}
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
    think = max(tok.special().values()) + 1
    assert place.ids(place.tokenizer("qwen2"), b"so <think> on") == [
        *tok.encode(b"so "), think, *tok.encode(b" on")]


def test_the_longest_added_token_wins(place):
    def change(spec):
        last = spec["added_tokens"][-1]
        spec["added_tokens"].append({**last, "id": last["id"] + 1,
                                     "content": "<think>!"})
    tok = trained("qwen2")
    think = max(tok.special().values()) + 1
    assert place.ids(place.tokenizer("qwen2", change),
                     b"<think>!<think>") == [think + 1, think]


# ---- documents and shards ----

def texts(n):
    rng = random.Random(n)
    lines = (reference.HERE / "corpus.txt").read_text().splitlines()
    return [" ".join(rng.choices(lines, k=rng.randrange(1, 5)))
            for _ in range(n)]


def jsonl(records):
    return "".join(json.dumps(r) + "\n" for r in records).encode()


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_end_with_end_of_text(family, place):
    tok = trained(family)
    end = tok.special()["<|end_of_text|>" if family == "llama3"
                        else "<|endoftext|>"]
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


def test_the_output_is_the_same_with_any_number_of_threads(place):
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
    path = place.tokenizer("qwen2", change)
    out = place.encode(path, {"t.txt": b"a<far>"}, "--end", "none")
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
    last = "<|end_of_text|>" if family == "llama3" else "<|endoftext|>"
    return out + [(last, 0, 1)]


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
    "byte_fallback": (lambda s: s["model"].update(byte_fallback=True),
                      "model.byte_fallback"),
    "prefix": (lambda s: s["model"].update(continuing_subword_prefix="##"),
               "continuing_subword_prefix"),
    "type": (lambda s: s["model"].update(type="WordPiece"), "WordPiece"),
    "unknown key": (lambda s: s["model"].update(news=1), "model.news"),
    "root key": (lambda s: s.update(news=1), "tokenizer.news"),
    "normalizer": (lambda s: s.update(normalizer={"type": "Lowercase"}),
                   "Lowercase"),
    "no pre-tokenizer": (lambda s: s.update(pre_tokenizer=None), "missing"),
    "metaspace": (lambda s: s.update(pre_tokenizer={"type": "Metaspace"}),
                  "Metaspace"),
    "no byte level": (lambda s: pre(s)["pretokenizers"].pop(), "ByteLevel"),
    "behavior": (lambda s: pre(s)["pretokenizers"][0].update(
        behavior="MergedWithNext"), "MergedWithNext"),
    "removed": (lambda s: pre(s)["pretokenizers"][0].update(
        behavior="Removed"), "Removed"),
    "lstrip": (lambda s: s["added_tokens"][0].update(lstrip=True), "lstrip"),
    "merge": (lambda s: s["model"]["merges"].append(["a", "zz~zz"]),
              "merge 3"),
    "result": (lambda s: s["model"]["merges"].append(["Ġthe", "Ġthe"]),
               "no token"),
    "twice": (lambda s: s["model"]["merges"].append(s["model"]["merges"][0]),
              "before"),
    "byte": (lambda s: s["model"]["vocab"].pop("x"), "0x78"),
    "id": (lambda s: s["model"]["vocab"].update(q=-1), "\"q\""),
    "id twice": (lambda s: s["model"]["vocab"].update(q=3), "twice"),
    "large id": (lambda s: s["model"]["vocab"].update(q=1 << 22), "\"q\""),
    "added id": (lambda s: s["added_tokens"][0].update(id=5), "another"),
}
PATTERNS = ["\\w+", "\\bx", "a{2}+", "a{,2}", "[a[b]]", "[a&&b]", "^a", "a$",
            "x*", "\\h+", "(?<n>a)", "(?s:a)", "(a", "\\p{Nope}", "\\pL",
            "\\", "[]a]", "(*FAIL)", "\\K", "\\x{41}", "a|"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_file_has_beyond_is_named(name, place):
    change, word = REFUSED[name]
    path = place.tokenizer("llama3", change)
    data = place.new() / "t.txt"
    data.write_bytes(b"x")
    run("--tokenizer", path, "--out", place.new() / "out", data, status=1,
        words=[word, str(path)])


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_that_means_something_else_is_named(pattern, place):
    def change(spec):
        pre(spec)["pretokenizers"][0]["pattern"]["Regex"] = pattern
    data = place.new() / "t.txt"
    data.write_bytes(b"x")
    run("--tokenizer", place.tokenizer("llama3", change), "--out",
        place.new() / "out", data, status=1, words=["pre_tokenizer", pattern])


BAD_LINES = [b"{", b"[1]", b'{"text": 5}', b'{"txt": "a"}', b"\xff",
             b'{"prompt": "a", "completion": "b"}', b'{"messages": []}',
             b'{"text": "a", "text": "b"}']


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
    (["--tokenizer", "none.json"], "No such file"),
    (["--tokenizer", "none"], "neither"),
    (["--tokenizer", "bytes", "--end", "<x>"], "<x>")])
def test_a_missing_thing_is_named(args, word, place):
    data = place.new() / "t.txt"
    data.write_bytes(b"x")
    run(*args, "--out", place.new() / "out", data, status=1, words=[word])


# ---- SentencePiece ----

@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sp")
    try:
        subprocess.run(["spm_train", f"--input={reference.HERE}/corpus.txt",
                        f"--model_prefix={folder}/small", "--vocab_size=400",
                        "--byte_fallback=true", "--model_type=bpe"],
                       check=True, capture_output=True, timeout=TIMEOUT_S)
    except FileNotFoundError:
        pytest.skip("spm_train is missing")
    return folder / "small.model"


def test_a_sentencepiece_model_gives_the_ids_of_its_own_program(
        sentencepiece_model, place):
    lines = (reference.HERE / "corpus.txt").read_text().splitlines()
    p = subprocess.run(["spm_encode", f"--model={sentencepiece_model}",
                        "--output_format=id"], input="\n".join(lines),
                       text=True, capture_output=True, check=True)
    want = [[*map(int, x.split())] for x in p.stdout.splitlines()]
    data = place.new() / "t.jsonl"
    data.write_bytes(jsonl({"text": x} for x in lines))
    out = place.new()
    p = subprocess.run([PROGRAM, "--tokenizer", sentencepiece_model, "--out",
                        out / "out", data], capture_output=True, text=True)
    if "has no SentencePiece" in p.stderr:
        pytest.skip("built without SentencePiece")
    assert p.returncode == 0, p.stderr
    assert flat(shards(out)) == [i for ids in want for i in [*ids, 2]]
    p = run("--tokenizer", sentencepiece_model, "--decode",
            out / "out_train_000000.bin")
    assert p.stdout.decode().replace(" ", "") == "".join(lines).replace(" ", "")
