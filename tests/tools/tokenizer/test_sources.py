# SPDX-License-Identifier: Apache-2.0
"""What a file of the input is taken for, and what its records are."""
import bz2
import gzip
import json
import lzma
import os
import tarfile

import pytest

from place import flat, jsonl, read_mask, run, shards
from test_chat import CALL, SAYS, SYSTEM, TOOL, TURNS

from tokenizing import documents, records, tokens

MESSAGES = [{"messages": TURNS[:2]}, {"messages": [TURNS[0], CALL], "tools": [TOOL]},
            {"messages": [{**TURNS[0], "content": "a\u2028b\r\n \u00e9"}, TURNS[1]]}]
LINES = jsonl(MESSAGES)
LONG = b"{" + b" " * (1 << 20)
TEXTS = [{"text": "a b\u2028c\n"}, {"text": " d"}]


def read(place, name, data):
    """The records of a file of such a name, and what is told of it."""
    path = place.new() / name
    path.write_bytes(data) if isinstance(data, bytes) else data(path)
    corpus = documents.Corpus([str(path)], None, 0, str(place.folder))
    return [records.parse(f.data[d.start:d.end])[0] for d in corpus.documents()
            for f in [corpus.files[d.file]] if f.json], corpus.told()


# Name and bytes of the same records.
FILES = {
    "lines": ("t.jsonl", LINES), "upper case": ("T.JSONL", LINES), "ndjson": ("t.ndjson", LINES),
    "no name": ("t.txt", LINES), "lines called json": ("t.json", LINES),
    "an array": ("t.json", json.dumps(MESSAGES, indent=1).encode()),
    "an array in a line": ("t.data", json.dumps(MESSAGES).encode()),
    "a long line": ("t.txt", LONG + LINES[1:]),
    "an array of long ones": ("t.data", b"[\n" + json.dumps(MESSAGES).encode()[1:].replace(
        b"{", LONG, 1)),
    "values": ("t.json", b"\n".join(json.dumps(m, indent=2).encode() for m in MESSAGES)),
    "mark": ("t.jsonl", b"\xef\xbb\xbf" + LINES),
    "mark and array": ("t.json", b"\xef\xbb\xbf" + json.dumps(MESSAGES).encode()),
    "Windows": ("t.jsonl", LINES.replace(b"\n", b"\r\n") + b"\r\n"),
    "U+2028": ("t.jsonl", "\n".join(json.dumps(m, ensure_ascii=False)
                                    for m in MESSAGES).encode()),
    "gzip": ("t.jsonl.gz", gzip.compress(LINES)), "bzip2": ("t.bz2", bz2.compress(LINES)),
    "xz": ("t.json.xz", lzma.compress(json.dumps(MESSAGES).encode())),
    "lzma": ("t.lzma", lzma.compress(LINES, lzma.FORMAT_ALONE)),
}


@pytest.mark.parametrize("name", FILES)
def test_records_are_found_in(name, place):
    assert read(place, *FILES[name])[0] == MESSAGES


def tables():
    """Writers of the records as tables, of which one has a column more."""
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet
    table = arrow.Table.from_pylist([{"tools": None, **m, "score": 1.5} for m in MESSAGES])

    def ipc(new):
        def write(path):
            with new(str(path), table.schema) as f:
                f.write_table(table, 2)
        return write

    def saved(path):
        path.mkdir()
        ipc(arrow.ipc.new_stream)(path / "data-00000-of-00001.arrow")
        (path / "state.json").write_text(json.dumps(
            {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    return {"parquet": lambda path: pyarrow.parquet.write_table(table, path),
            "arrow's file": ipc(arrow.ipc.new_file), "arrow's stream": ipc(arrow.ipc.new_stream),
            "a saved data set": saved}


def test_records_are_found_in_tables(place):
    for name, write in tables().items():
        assert read(place, "t", write)[0] == MESSAGES, name


TAR = tarfile.TarInfo("t.txt").tobuf() + bytes(1024)


def test_what_is_wrong_with_a_table_is_named(place):
    """Bytes, which are no text, and damage."""
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet
    path = place.new() / "t"
    pyarrow.parquet.write_table(arrow.table({"text": [b"a"]}), path)
    place.refuse("bytes", path.read_bytes(), words=["{}: ", "has bytes"])
    tables()["arrow's stream"](path)
    place.refuse("bytes", path.read_bytes()[:-60], words=["{}: ", "to be able to read"])


@pytest.mark.parametrize("name, data, words", [
    ("t.zip", b"PK\3\4....", ["zip"]), ("t.zst", b"\x28\xb5\x2f\xfd..", ["zstd"]),
    ("t.7z", b"7z\xbc\xaf\x27\x1c\0\4", ["7z"]), ("t.rar", b"Rar!\x1a\7\1\0", ["RAR"]),
    ("t.lz4", b"\4\x22\x4d\x18..", ["lz4"]), ("t.lz", b"LZIP\1..", ["lzip"]),
    ("t.Z", b"\x1f\x9d\x90..", ["compress"]), ("t.npy", b"\x93NUMPY..", ["NumPy"]),
    ("t.avro", b"Obj\1..", ["Avro"]), ("t.txt", "text".encode("utf-16"), ["UTF-16"]), ("t.csv", b"a,b\n", ["table of text"]),
    ("t.jsonl.gz", gzip.compress(LINES)[:-30], ["{}"]),
    ("t.txt.gz", gzip.compress(LINES)[:10] + b"\xff" * 30, ["{}: Error -3"]),
    ("t.parquet.gz", gzip.compress(b"PAR1"), ["parquet packed by gzip"]),
    ("t.gz.gz", gzip.compress(gzip.compress(LINES)), ["gzip packed by gzip"]),
    ("t.tar", TAR, ["a tar archive"]), ("t.tgz", gzip.compress(TAR), ["a tar archive"]),
    ("t.json", b'[{"text": "a"}', ["not JSON"]), ("t.json", b'[{"text": "a"}] x', ["not JSON"]),
    ("t.json", b'[{"text": "a"}] [{"text": "b"}]', ["record 2", "no object"]),
    ("t.parquet", b"PAR1....", ["{}"]), ("t.json", b'[{"text": "a"}, {]', ["not JSON"]),
    ("t.json", b'{"name": "a"}', ["record 1", "has the keys name"]),
    ("t.jsonl", jsonl([{"question": "a", "answer": "b"}]), ["line 1", "question, answer"]),
    ("t.jsonl", jsonl([{"\u4f60": "a"}]), ["has the keys \u4f60", ", or text\n"]),
    ("t.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", ["Git LFS"])],
    ids=lambda x: x if isinstance(x, str) else "")  # packed bytes have a time in them
def test_what_is_no_text_is_refused_by_name(name, data, words, place):
    if "PAR1" in str(data) and "gz" not in name:
        pytest.importorskip("pyarrow")
    place.refuse("bytes", data, name=name, words=words,
                 env={**os.environ, "PYTHONIOENCODING": "latin-1"})


def test_a_data_set_of_several_splits_is_refused(place):
    folder = place.new()
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    run("--tokenizer", "bytes", "--out", place.new() / "out", folder, status=1,
        words=[f"train, test: name one of them, {folder}/train"])


def test_a_pointer_in_place_of_a_tokenizer_is_refused(place):
    path = place.new() / "tokenizer.json"
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    place.refuse(path, b"a", words=["tokenizer.json is a Git LFS pointer"])


@pytest.mark.parametrize("package, tokenizer, name, data", [
    ("pyarrow", "bytes", "t.parquet", b"PAR1"), ("jinja2", "bytes", "t.jsonl", LINES),
    ("tokenizers", "t.json", "t", b"x"), ("sentencepiece", "t.model", "t", b"x")])
def test_a_package_is_named_where_it_is_needed(package, tokenizer, name, data, place):
    folder = place.new()
    (folder / f"{package}.py").write_text("raise ImportError('not here')")
    (folder / "own.jinja").write_text(SAYS)
    if tokenizer != "bytes":
        tokenizer = folder / tokenizer
        tokenizer.write_bytes(b"x")
    place.refuse(tokenizer, data, "--chat", folder / "own.jinja", name=name,
                 words=[f"pip install {package}"],
                 env={**os.environ, "PYTHONPATH": str(folder)})


# ---- forms ----

ASKED = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "He."}]
MORE = {"role": "user", "content": "When?"}
FORMS = [
    ({"messages": ASKED, "text": "x", "prompt": "y"}, "messages", ASKED, 0),
    ({"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "He."}],
      "system": "Be brief."}, "ShareGPT", SYSTEM + ASKED, 0),
    ({"conversations": ASKED}, "ShareGPT", ASKED, 0),
    ({"messages": [{**CALL, "content": None, "name": None}]}, "messages",
     [{k: v for k, v in CALL.items() if k != "content"}], 0),
    ({"instruction": "Who?", "input": "", "output": "He."}, "Alpaca", ASKED, 0),
    ({"instruction": "When", "input": "?", "output": "He.", "history": [["Who?", "He."]]},
     "Alpaca", [*ASKED, {**MORE, "content": "When\n?"}, ASKED[1]], 0),
    ({"prompt": [*ASKED, MORE], "completion": [ASKED[1]]}, "prompt and completion",
     [*ASKED, MORE, ASKED[1]], 3),
]


@pytest.mark.parametrize("record, name, messages, learnt_from", FORMS)
def test_a_conversation_is_found_in(record, name, messages, learnt_from):
    value, form = records.parse(json.dumps(record).encode())
    assert form.name == name
    assert records.conversation_of(value, form) == (messages, learnt_from)


@pytest.mark.parametrize("messages, words", [
    ([{"from": "function_call", "value": "x"}], "from function_call"), ([5], "no object"),
    ([{"content": "x"}], "role"), ([{"role": "user"}], "neither content"), ([], "something")])
def test_a_bad_message_is_named(messages, words):
    with pytest.raises(records.BadRecord, match=words):
        records.conversation_of(*records.parse(json.dumps({"messages": messages}).encode()))


@pytest.mark.parametrize("more, words", [
    ({"input": 5}, "input"), ({"history": 5}, "history"), ({"history": [["a"]]}, "history"),
    ({"history": [["a", 5]]}, "neither content"), ({"system": 5}, "neither content"),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs")])
def test_what_is_bad_beside_a_conversation_is_named(more, words):
    """As a record that can be left out."""
    recipe = records.Recipe(tokens.Bytes(), None, None, records.CONVERSATION, object(), 0, True)
    with pytest.raises(records.BadRecord, match=words):
        recipe.record(json.dumps({"instruction": "a", "output": "b", **more}).encode())


OTHER = {"role": "assistant", "content": "Nobody."}


@pytest.mark.parametrize("prompt, before, same", [
    ({}, [], 1), ({"prompt": None}, [], 1), ({"prompt": "Who?"}, [], 1),
    ({"prompt": SYSTEM}, SYSTEM, 2), ({"prompt": "What?"}, None, 0), ({"prompt": 5}, None, 0)])
def test_a_prompt_beside_messages_is_one_or_their_first(prompt, before, same, monkeypatch):
    """As a string it says what they begin with."""
    monkeypatch.setattr(records.Recipe, "conversation", lambda self, *args: [args])
    recipe = records.Recipe(tokens.Bytes(), None, None, records.PAIR, object(), 9, True)
    value = {**prompt, "chosen": ASKED, "rejected": [ASKED[0], OTHER]}
    if before is None:
        with pytest.raises(records.BadRecord, match="prompt is no array"):
            recipe.pair(value)
    else:
        assert recipe.pair(value) == [(before + value[k], same, value)
                                      for k in ("chosen", "rejected")]


# ---- once and only once ----

def test_blank_and_marked_texts_are_right(place):
    """Blank ones are left out, a mark and ends of lines of Windows are no text."""
    out = place.encode("bytes", {"a.jsonl": jsonl([{"text": ""}, {"text": " \n"}, *TEXTS])})
    assert bytes(flat(shards(out))).decode() == "a b\u2028c\n\0 d\0"
    assert "2 times, first" in place.said and "line 1: a document is blank" in place.said
    out = place.encode("bytes", {"a.txt": b"\xef\xbb\xbfa\r\n\r\nb\r\n"}, "--split-on", "\\n")
    assert bytes(flat(shards(out))) == b"a\0b\0"


def test_a_text_that_brings_its_ends_gets_no_others(place):
    path = place.tokenizer("llama3")
    begin, end = "<|begin_of_text|>", "<|end_of_text|>"
    marked = {"t.jsonl": jsonl([{"text": "a"}, {"text": begin + "a" + end}])}
    out = place.encode(path, marked, "--special", "--begin", begin)
    ids = flat(shards(out))
    assert len(ids) == 6 and ids[:3] == ids[3:]
    assert "1 times, first" in place.said and "line 2: a document brings" in place.said
    place.encode(path, marked, "--begin", begin)
    assert "line 2: a document begins or ends with the name" in place.said
    out = place.encode(path, {"t.jsonl": jsonl([{"prompt": begin + "a", "completion": end}])},
                       "--special", "--begin", begin)
    assert flat(shards(out)) == ids[:3]
    assert flat(shards(out, ending="mask", read=read_mask)) == [0, 0, 1]
