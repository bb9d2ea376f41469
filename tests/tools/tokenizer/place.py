# SPDX-License-Identifier: Apache-2.0
"""Runs tools/tokenize, and reads what it wrote by the documented layout."""
import functools
import json
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
TOOLS = HERE.parents[2] / "tools"
sys.path.insert(0, str(TOOLS))  # for the parts that tests call themselves
LICENSE = HERE.parents[2] / "LICENSE"  # a text in plain English
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

    def encode(self, *texts):
        """The ids of texts that are encoded one by one."""
        return [i for t in texts for i in self.package.encode(
            t.decode(), add_special_tokens=False).ids]

    def special(self):
        return {a["content"]: a["id"] for a in self.spec["added_tokens"]}


trained = functools.cache(Family)


def numbers(data, size):
    return [int.from_bytes(data[i:i + size], "little")
            for i in range(0, len(data), size)]


def head(path, count):
    """The first numbers of a header."""
    return numbers(path.read_bytes()[:4 * count], 4)


def read_shard(path):
    """Tokens, by the layout as it is documented."""
    magic, version, count = head(path, 3)
    size = {(20240520, 1): 2, (20240801, 7): 4}[magic, version]
    data = path.read_bytes()[1024:]
    assert len(data) == count * size
    return numbers(data, size)


def read_mask(path):
    data = path.read_bytes()
    assert data[:4] == b"mask" and head(path, 2)[1] == 1
    assert head(path, 3)[2] == len(data) - 1024
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

    def refuse(self, tokenizer, data, *options, words, name="t.txt", **more):
        """Runs it on a file with such data (None: a folder), which must say the
        words, {} being the file, and write nothing."""
        path, out = self.new() / name, self.new()
        path.mkdir() if data is None else path.write_bytes(data)
        run("--tokenizer", tokenizer, "--out", out / "out", *options, path, status=1,
            words=[w.replace("{}", str(path)) for w in words], **more)
        assert not list(out.iterdir())

    def again(self, tokenizer, data):
        """The bytes that decoding gives of such a file's tokens."""
        out = self.encode(tokenizer, {"t.txt": data}, "--end", "none")
        return run("--tokenizer", tokenizer, "--decode",
                   out / "out_train_000000.bin").stdout

    def ids(self, tokenizer, data, *options):
        return flat(shards(self.encode(tokenizer, {"t.txt": data}, "--end",
                                       "none", *options)))


def jsonl(records):
    return "".join(json.dumps(r) + "\n" for r in records).encode()
