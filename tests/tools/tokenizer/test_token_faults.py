# SPDX-License-Identifier: Apache-2.0
"""What is refused, and what is left of a run that is stopped."""
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import time

import pytest

from place import TIMEOUT_S, TOOLS, flat, head, jsonl, read_shard, run, shards

from tokenizing import documents, records, tokens, work
from tokenizing import shards as files


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
        Regex="(a"), "line 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_with_a_file_is_named(name, place):
    change, word = REFUSED[name]
    path = place.tokenizer("llama3", change)
    place.refuse(path, b"x", words=[word, str(path)])


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
    assert place.again(path, b"The END") == b"the end"


BAD_LINES = [b"{", b"[1]", b'{"text": 5}', b'{"txt": "a"}', b"\xff",
             b'{"prompt": "a", "completion": "b"}', b'{"messages": []}',
             b'{"text": "a", "text": "b"}', b'{"text": "\\ud800"}',
             b'{"text": "a", "n": NaN}', pytest.param(b"[" * 20000, id="deep")]


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_record_is_named_or_left_out(bad, place):
    data = b'{"text": "a"}\n\n' + bad + b'\n{"text": "b"}\n'
    place.refuse("bytes", data, name="t.jsonl", words=["{}, line 3"])
    out = place.encode("bytes", {"t.jsonl": data}, "--skip-bad")
    assert bytes(flat(shards(out))) == b"a\0b\0"
    assert "1 faulty" in place.said


def test_text_among_conversations_is_named_or_left_out(place):
    files = {"a.jsonl": jsonl([{"prompt": "a", "completion": "b"}]), "b.txt": b"c"}
    out = place.encode("bytes", files, "--skip-bad")
    assert bytes(flat(shards(out))) == b"ab\0"
    run("--tokenizer", "bytes", "--out", out / "new", out / "a.jsonl", out / "b.txt",
        status=1, words=["b.txt", "conversations"])


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
    (["--threads", "x"], "x"), (["--tokenizer", "bytes", "--out", "x", "a", "--no"], "--no")])
def test_a_wrong_command_line_exits_2(args, word):
    run(*args, status=2, words=[word])


@pytest.mark.parametrize("tokenizer, data, options, words", [
    ("/none.json", b"x", (), ["No such file"]), ("none", b"x", (), ["neither"]),
    ("bytes", b"x", ("--end", "<x>"), ["<x>"]), ("bytes", b"", (), ["empty", "{}"]),
    ("bytes", None, (), ["state.json", "{}"])])
def test_what_is_missing_or_no_text_is_named(tokenizer, data, options, words, place):
    place.refuse(tokenizer, data, *options, words=words)


@pytest.mark.parametrize("at, words", [("full", "full: No space left"),
                                       ("none/x", "none/x: No such file")])
def test_a_picture_that_cannot_be_is_named(at, words, place):
    pytest.importorskip("matplotlib")
    folder = place.new()
    (folder / "full").symlink_to("/dev/full")
    (folder / "t").write_bytes(b"abc")
    run("--tokenizer", "bytes", "--out", folder / "out", "--png", folder / at, folder / "t",
        status=1, words=[f"tokenize: {folder}/{words}"])


def test_a_shard_that_cannot_be_printed_is_told(place):
    shard = place.encode("bytes", {"t": b"abc"}) / "out_train_000000.bin"
    with open("/dev/full", "w") as full:
        p = subprocess.run([sys.executable, TOOLS / "tokenize", "--tokenizer", "bytes",
                            "--decode", shard], stdout=full, stderr=subprocess.PIPE)
    assert p.returncode == 1
    assert p.stderr == b"tokenize: standard output: No space left on device\n"


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
    corpus = documents.Corpus([str(path)], None, 0, None)
    recipe = records.Recipe(one, None, 10, records.TEXT, None, 0, False)
    work.run_processes(corpus, one, 3, {"corpus": corpus, "recipe": recipe, "width": 2,
                                        "skip_bad": False}, take)
    assert text.decode().split() == [str(i) for i in range(500)]
    assert len(ahead) == 500 and max(ahead) <= 6


def test_a_shard_has_its_name_when_all_of_it_is_on_disk(place, monkeypatch):
    synced, named = [], []
    rename = os.rename

    def checked(old, new):
        assert synced[-1] == os.stat(old).st_ino
        assert head(pathlib.Path(old), 3)[2] == 5
        named.append(new.split("_")[-1])
        rename(old, new)

    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    monkeypatch.setattr(os, "rename", checked)
    out = files.Shards(str(place.new() / "out"), 256, 5, True)
    out.put(bytes(24), bytes(12))
    assert named == ["000000.mask", "000000.bin", "000001.mask", "000001.bin"]


def test_a_full_disk_leaves_nothing(place):
    place.refuse(
        "bytes", b"abc" * 50000, words=["out_train_000000.bin", "File too large"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000)))


# The program with a tokenizer of bytes that ends or waits where a text says so.
DRIVER = """
import os, pathlib, runpy, sys, time
tool, here = sys.argv[1:3]
sys.path.insert(0, os.path.dirname(tool))
from tokenizing import tokens

def ids(self, data, behind=False):
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
         "--tokenizer", "bytes", "--out", folder / "out", "--threads", "2",
         "--shard-tokens", "10000", folder / "t.jsonl"], stderr=subprocess.PIPE,
        # what starts the tests may have turned Ctrl-C off
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        start_new_session=True)


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


def test_a_process_that_ends_is_an_error(place):
    folder = place.new()
    p = drive(folder, "die")
    said = p.communicate(timeout=TIMEOUT_S)[1].decode()
    assert p.returncode == 1 and "a process ended" in said
    assert not list(folder.glob("out*.tmp"))


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGKILL))
def test_the_processes_of_a_stopped_run_end_and_its_shards_are_complete(number, place):
    """While one waits, and behind a first shard."""
    folder = place.new()
    p, here = drive(folder, "wait"), folder / "here"
    until(lambda: here.exists() and here.read_text().endswith("\n") and
          (folder / "out_train_000000.bin").exists())
    if number == signal.SIGINT:
        os.killpg(p.pid, number)  # as Ctrl-C does: to all its processes
    else:
        p.kill()
    said = p.communicate(timeout=TIMEOUT_S)[1]
    assert p.returncode == -number
    until(lambda: is_gone(int(here.read_text())))
    names = list(folder.glob("out_train_*.bin"))
    assert names and all(len(read_shard(n)) == 10000 for n in names)
    if number == signal.SIGINT:
        assert not said and not list(folder.glob("out*.tmp"))
