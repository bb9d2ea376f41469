# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: plain bytes, a tokenizer.json through the package tokenizers, a .model
through the package sentencepiece.  Each has `vocab`, the largest id + 1; `end`, the id
of its end of text or None, and end_text; `special`, what finds special tokens in a
text; `forged`, names by id of those that it takes for words; find(name), the id of a token or None; ids(bytes, behind another text: without the
blank that some add in front of a text) and its opposite text(ids); chat(text, spans) with special tokens, and a byte for each: whether it is in a span;
and `alone`: the text of tokens is that of each in turn."""
import copy
import importlib
import itertools
import json
import re

from tokenizing.shards import Refused, map_file

ENDS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>",
        "<eos>")


NOTHING = re.compile("(?!)")


def package(name, what="this tokenizer"):
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise Refused(f"{what} needs the Python package {name}: pip install {name} "
                      f"({e})") from e


def open_tokenizer(name, special):
    """`special`: special tokens that are written in a text become them."""
    if name == "bytes":
        return Bytes()
    if name.endswith(".json"):
        return Json(name, special)
    if name.endswith(".model"):
        return Model(name)
    raise Refused(f"{name} is neither bytes, NAME.json nor NAME.model")


class Bytes:
    vocab, end, alone = 256, 0, True  # no text has the byte 0
    end_text, special, forged = "\0", NOTHING, {}

    def find(self, name):
        byte = name.encode("utf-8", "surrogateescape")
        return byte[0] if len(byte) == 1 else None

    def ids(self, data, behind=False):
        return list(data)

    def chat(self, text, spans):
        learn = bytearray(len(text.encode()))
        for start, end in spans:
            at = len(text[:start].encode())
            to = at + len(text[start:end].encode())
            learn[at:to] = b"\1" * (to - at)
        return list(text.encode()), learn

    def text(self, ids):
        return bytes(list(ids))


# Read behind a model's bytes as normalizer_spec { add_dummy_prefix: false }.
NO_PREFIX = b"\x1a\x02\x18\0"


class Model:
    """Of SentencePiece.  What is not UTF-8 becomes U+FFFD."""
    alone, end_text, special, forged = False, None, NOTHING, {}

    def __init__(self, name):
        data = bytes(map_file(name))
        kind = package("sentencepiece").SentencePieceProcessor
        try:
            self.model = kind(model_proto=data)
            self.rest = kind(model_proto=data + NO_PREFIX)
        except RuntimeError as e:
            raise Refused(f"{name}: {e}") from e
        self.vocab = self.model.get_piece_size()
        self.end = self.model.eos_id() if self.model.eos_id() >= 0 else None
        self.strips = self.model.normalize(" a") == self.model.normalize("a")

    def find(self, name):
        i = self.model.piece_to_id(name)
        return i if self.model.id_to_piece(i) == name else None

    def ids(self, data, behind=False):
        # The prefix stands for blanks in front that the model would leave out.
        blank = self.strips and data.decode("utf-8", "replace")[:1].isspace()
        one = self.rest if behind and not blank else self.model
        return one.encode(data, out_type=int)

    def chat(self, text, spans):
        raise Refused("a chat template needs a tokenizer.json: SentencePiece takes "
                      "special tokens in a text for text")

    def text(self, ids):
        return self.model.decode(list(ids)).encode()


# ---- tokenizer.json ----

def alphabet():
    """Byte -> the printable character that byte-level tokens are written with."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return {b: b for b in plain} | {
        b: 256 + i for i, b in enumerate(b for b in range(256) if b not in plain)}


ALPHABET = alphabet()
BYTE_OF = {chr(c): b for b, c in ALPHABET.items()}
NO_BLANK = {"ByteLevel": {"add_prefix_space": False},
            "Metaspace": {"add_prefix_space": False, "prepend_scheme": "never"}}
NOT_UTF8 = re.compile("([\udc80-\udcff]+)")


def written(data):
    """Bytes as byte-level tokens are written."""
    return data.decode("latin-1").translate(ALPHABET)


def read(word):
    """The opposite of `written`; of other words their UTF-8."""
    try:
        return bytes(BYTE_OF[c] for c in word)
    except KeyError:
        return word.encode()


def without_blank(spec):
    """A tokenizer that adds no blank in front of a text.  Where words are cut first, each
    gets one, and keeps it."""
    normal, cut = copy.deepcopy((spec.get("normalizer") or {}, spec.get("pre_tokenizer") or {}))
    steps = normal.get("normalizers", [normal] if normal else [])
    first = (cut.get("pretokenizers") or [cut])[0]
    first.update(NO_BLANK.get(first.get("type"), {}))
    return {**spec, "pre_tokenizer": cut or None, "normalizer": {
        "type": "Sequence", "normalizers": [s for s in steps if s["type"] != "Prepend"]}}


class Json:
    """Of Hugging Face.  A byte-level one loses nothing: bytes that are not UTF-8 are a
    piece of their own, to which the model's merges apply.  Of others they become
    U+FFFD."""

    def __init__(self, name, special):
        data = bytes(map_file(name))
        kind = package("tokenizers").Tokenizer
        try:
            self.spec = json.loads(data.decode())
            self.whole = self.rest = kind.from_str(data.decode())
            cut = json.dumps([self.spec.get("normalizer"), self.spec.get("pre_tokenizer")])
            if any(x in cut for x in ('"add_prefix_space": true', '"Metaspace"', '"Prepend"')):
                self.rest = kind.from_str(json.dumps(without_blank(self.spec)))
        except Exception as e:
            raise Refused(f"{name}: {e}") from e
        self.plain = not special
        for one in (self.whole, self.rest):
            one.no_truncation()
            one.no_padding()
            one.encode_special_tokens = self.plain
        self.byte_level = self.alone = '"ByteLevel"' in cut
        self.added = {a["content"]: a["id"]
                      for a in self.spec.get("added_tokens") or ()}
        self.words = self.whole.get_vocab()
        self.vocab = max(self.words.values()) + 1
        usual = {a["id"] for a in self.spec.get("added_tokens") or () if not a.get("special")}
        self.marks = set(self.added.values()) if special else usual
        self.end_text = next((e for e in ENDS if e in self.added), None)
        self.end = self.added.get(self.end_text)
        names = [name for name, i in self.added.items() if i not in usual]
        self.special = re.compile("|".join(map(re.escape, sorted(
            names, key=len, reverse=True))) or "(?!)")
        self.forged = {} if special else {
            self.added[name]: name for name in names if name != self.unknown()}
        self.bytes = None
        fault = self.fault()
        if fault:
            raise Refused(f"{name}: {fault}")

    def fault(self):
        """What the library reads without a word but would not keep."""
        model = self.spec["model"]
        if model.get("dropout"):
            return f"model.dropout = {model['dropout']}: the tokens would be random"
        if self.byte_level:
            lost = [b for b, c in ALPHABET.items() if chr(c) not in self.words]
            if lost:
                return f"model.vocab has no token for the byte 0x{min(lost):02x}"
        elif "merges" in model and not model.get("unk_token") and not (
                model.get("byte_fallback") and
                all(f"<0x{b:02X}>" in self.words for b in range(256))):
            return ("the model is not byte-level and has neither unk_token nor "
                    "byte_fallback: characters that model.vocab lacks would be lost")
        for text, i in self.added.items():
            if self.words.get(text) != i:
                return (f'added_tokens: "{text}" has id {i}, but the library makes it '
                        f"{self.words.get(text)}")
        if len(set(self.words.values())) < len(self.words):
            return "model.vocab: an id is there twice"
        return None

    def unknown(self):
        model = self.spec["model"]
        if model.get("unk_id") is not None:  # of Unigram
            return model["vocab"][model["unk_id"]][0]
        return model.get("unk_token")

    def find(self, name):
        word = name
        if self.byte_level:
            word = written(name.encode("utf-8", "surrogateescape"))
        return self.added.get(name, self.words.get(word))

    def ids(self, data, behind=False):
        if not self.byte_level:
            return self.valid(data.decode("utf-8", "replace"), behind)
        out = []
        text = data.decode("utf-8", "surrogateescape")
        for i, piece in enumerate(NOT_UTF8.split(text)):
            if i % 2:
                word = written(piece.encode("utf-8", "surrogateescape"))
                out += [token.id for token in self.whole.model.tokenize(word)]
            elif piece:
                out += self.valid(piece, behind or i > 0)
        return out

    def chat(self, text, spans):
        self.whole.encode_special_tokens = False
        found = self.whole.encode(text, add_special_tokens=False)
        self.whole.encode_special_tokens = self.plain
        learn = bytearray(len(found.ids))
        for start, end in spans:
            inside = [i for i, (a, b) in enumerate(found.offsets) if a < end and b > start]
            if inside:
                n = inside[-1] + 1 - inside[0]
                learn[inside[0]:inside[-1] + 1] = b"\1" * n
        return found.ids, learn

    def valid(self, text, behind):
        def ids(one):
            return one.encode_batch_fast([text], add_special_tokens=False)[0].ids

        def mark(found):
            return next((i for i, t in enumerate(found) if t in self.marks), len(found))
        if not behind or self.rest is self.whole:
            return ids(self.whole)
        found = ids(self.rest)
        if mark(found) < len(found):  # behind an added token a blank is added again
            whole = ids(self.whole)
            found = found[:mark(found)] + whole[mark(whole):]
        return found

    def text(self, ids):
        if not self.byte_level:
            return self.whole.decode(list(ids), skip_special_tokens=False).encode()
        if not self.bytes:
            self.bytes = {i: word.encode() if word in self.added else read(word)
                          for word, i in self.words.items()}
        return b"".join(self.bytes.get(i, b"") for i in ids)


# ---- long texts ----

PART = 1 << 16  # the libraries need some 200 bytes per byte of a text
AROUND = 512
TRIES = 8
# Before a blank behind something else, or before something at the beginning of a line.
BORDER = re.compile(rb"(?<=[^ \t\r\n])(?=[ \n])|(?<=\n)(?=[^ \t\r\n])")


def part_end(tokenizer, data, at, end):
    """Where a part of data[at:end] may end, so that its tokens and those of the rest
    are those of the whole: where its surroundings give the same tokens at once and
    in two."""
    for aim in range(at + PART, end - PART, PART):
        for border in itertools.islice(BORDER.finditer(data, aim, aim + PART), TRIES):
            i = border.start()
            two = data[max(at, i - AROUND):i], data[i:min(i + AROUND, end)]
            if tokenizer.ids(b"".join(two)) == [*tokenizer.ids(two[0]),
                                                *tokenizer.ids(two[1], True)]:
                return i
    return end


def encode(tokenizer, data, behind=False):
    """The ids of a text of any length."""
    ids, at = [], 0
    while at < len(data):
        end = part_end(tokenizer, data, at, len(data))
        ids += tokenizer.ids(data[at:end], behind or at > 0)
        at = end
    return ids
