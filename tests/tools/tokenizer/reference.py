# SPDX-License-Identifier: Apache-2.0
"""A slow tokenizer to compare with: the pre-tokenizers of three families
written by hand from their published patterns, byte-pair encoding that searches
the whole word for each merge, and a trainer that makes small tokenizer.json
files.  It shares nothing with the program."""
import functools
import json
import pathlib
import sys
import unicodedata

HERE = pathlib.Path(__file__).resolve().parent

GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
        r"|\s+(?!\S)|\s+")
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# Unicode's White_Space, all of it.
SPACES = {*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B),
          0x2028, 0x2029, 0x202F, 0x205F, 0x3000}


def is_space(c):
    return ord(c) in SPACES


def is_letter(c):
    return unicodedata.category(c)[0] == "L"


def is_number(c):
    return unicodedata.category(c)[0] == "N"


def is_other(c):
    return not (is_space(c) or is_letter(c) or is_number(c))


def run_of(test, s, i, most=None):
    """End of the longest run from i of characters that pass."""
    j = i
    while j < len(s) and test(s[j]) and (most is None or j - i < most):
        j += 1
    return j


def fold(c):
    """U+017F is an s when case does not count."""
    return "s" if c == "\u017f" else c.lower() if c.isascii() else c


def contraction(s, i, any_case):
    """Length of the first of the endings that is at i."""
    for end in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"):
        have = s[i:i + len(end)]
        if any_case:
            have = "".join(map(fold, have))
        if have == end:
            return len(end)
    return 0


def blanks(s, i):
    """\\s+(?!\\S)|\\s+: all but the last before something, at least one."""
    j = run_of(is_space, s, i)
    return j if j == len(s) or j - i == 1 else j - 1


def gpt2_next(s, i):
    n = contraction(s, i, False)
    if n:
        return i + n
    k = i + 1 if s[i] == " " else i
    for test in (is_letter, is_number, is_other):
        j = run_of(test, s, k)
        if j > k:
            return j
    return blanks(s, i)


def modern_next(digits, s, i):
    """Llama 3 (runs of up to three digits) and Qwen 2 (single ones)."""
    n = contraction(s, i, True)
    if n:
        return i + n
    if s[i] not in "\r\n" and not is_letter(s[i]) and not is_number(s[i]):
        j = run_of(is_letter, s, i + 1)
        if j > i + 1:
            return j
    if is_letter(s[i]):
        return run_of(is_letter, s, i)
    if is_number(s[i]):
        return run_of(is_number, s, i, digits)
    k = i + 1 if s[i] == " " else i
    j = run_of(is_other, s, k)
    if j > k:
        return run_of(lambda c: c in "\r\n", s, j)
    end = run_of(is_space, s, i)
    lines = [j for j in range(i, end) if s[j] in "\r\n"]
    if lines:  # \s*[\r\n]+ goes as far as the last end of a line
        return lines[-1] + 1
    return blanks(s, i)


FAMILIES = {
    "gpt2": gpt2_next,
    "llama3": functools.partial(modern_next, 3),
    "qwen2": functools.partial(modern_next, 1),
}


def fragments(data):
    """(bytes, text or None) of valid and invalid UTF-8 in turn."""
    out, i, bad = [], 0, b""
    text = b""
    while i < len(data):
        for n in (1, 2, 3, 4):
            try:
                data[i:i + n].decode()
                break
            except UnicodeDecodeError:
                continue
        else:
            n = 0
        if n and i + n <= len(data):
            if bad:
                out.append((bad, None))
                bad = b""
            text += data[i:i + n]
            i += n
        else:
            if text:
                out.append((text, text.decode()))
                text = b""
            bad += data[i:i + 1]
            i += 1
    if text:
        out.append((text, text.decode()))
    if bad:
        out.append((bad, None))
    return out


def pieces(family, data, nfc=False):
    """The pieces of some bytes, as bytes."""
    out = []
    for raw, s in fragments(data):
        if s is None:
            out.append(raw)
            continue
        s = unicodedata.normalize("NFC", s) if nfc else s
        i = 0
        while i < len(s):
            j = FAMILIES[family](s, i)
            assert j > i
            out.append(s[i:j].encode())
            i = j
    return out


def alphabet():
    """Byte -> the printable character it is written as."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in keep]
    return {**{b: chr(b) for b in keep},
            **{b: chr(256 + i) for i, b in enumerate(rest)}}


ALPHABET = alphabet()


def written(data):
    return "".join(ALPHABET[b] for b in data)


class Tokenizer:
    """merges: pairs of byte strings, the first most important."""

    def __init__(self, family, merges):
        self.family, self.merges = family, merges
        self.nfc = family == "qwen2"
        self.ignore_merges = family == "llama3"
        order = [bytes([b]) for b in sorted(range(256),
                                            key=lambda b: ALPHABET[b])]
        order += [a + b for a, b in merges]
        self.id = {word: i for i, word in enumerate(order)}
        self.word = order
        self.rank = {pair: i for i, pair in enumerate(merges)}

    def word_ids(self, piece):
        if self.ignore_merges and piece in self.id:
            return [self.id[piece]]
        parts = [piece[i:i + 1] for i in range(len(piece))]
        while True:
            best = min(((self.rank[a, b], i) for i, (a, b)
                        in enumerate(zip(parts, parts[1:]))
                        if (a, b) in self.rank), default=None)
            if best is None:
                return [self.id[p] for p in parts]
            i = best[1]
            parts[i:i + 2] = [parts[i] + parts[i + 1]]

    def encode(self, data):
        return [i for p in pieces(self.family, data, self.nfc)
                for i in self.word_ids(p)]

    def decode(self, ids):
        return b"".join(self.word[i] for i in ids if i < len(self.word))

    def special(self):
        """Names and ids of the special tokens, behind the others."""
        names = {"gpt2": ["<|endoftext|>"],
                 "qwen2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
                 "llama3": ["<|begin_of_text|>", "<|end_of_text|>",
                            "<|start_header_id|>", "<|end_header_id|>",
                            "<|eot_id|>"]}[self.family]
        return {n: len(self.word) + i for i, n in enumerate(names)}

    def pre_tokenizer(self):
        if self.family == "gpt2":
            return {"type": "ByteLevel", "add_prefix_space": False,
                    "trim_offsets": True}
        pattern = LLAMA3 if self.family == "llama3" else QWEN2
        return {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern},
             "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False,
             "trim_offsets": True, "use_regex": False}]}

    def added(self):
        tokens = [{"id": i, "content": name, "single_word": False,
                   "lstrip": False, "rstrip": False, "normalized": False,
                   "special": True} for name, i in self.special().items()]
        if self.family == "qwen2":  # as Qwen 3 has: added, but not special
            tokens.append({**tokens[-1], "id": tokens[-1]["id"] + 1,
                           "content": "<think>", "special": False})
        return tokens

    def file(self):
        """As a tokenizer.json; merges as the family writes them."""
        pairs = [(written(a), written(b)) for a, b in self.merges]
        vocab = {written(w): i for i, w in enumerate(self.word)}
        if self.family == "gpt2":  # has its special token in both places
            vocab.update(self.special())
        model = {"type": "BPE", "dropout": None, "unk_token": None,
                 "continuing_subword_prefix": None, "end_of_word_suffix": None,
                 "fuse_unk": False, "byte_fallback": False,
                 "ignore_merges": self.ignore_merges, "vocab": vocab,
                 "merges": [list(p) if self.family == "llama3"
                            else " ".join(p) for p in pairs]}
        if self.family == "gpt2":  # keys that older files lack
            for key in ("type", "byte_fallback", "ignore_merges"):
                del model[key]
        return {"version": "1.0", "truncation": None, "padding": None,
                "added_tokens": self.added(),
                "normalizer": {"type": "NFC"} if self.nfc else None,
                "pre_tokenizer": self.pre_tokenizer(),
                "post_processor": {"type": "ByteLevel"},
                "decoder": {"type": "ByteLevel"}, "model": model}


def train(family, data, count):
    """Merges of the most frequent pairs, of equal ones the smaller bytes."""
    words = {}
    for p in pieces(family, data):
        key = tuple(p[i:i + 1] for i in range(len(p)))
        words[key] = words.get(key, 0) + 1
    merges = []
    for _ in range(count):
        pairs = {}
        for word, n in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] = pairs.get(pair, 0) + n
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(best)
        words = {joined(w, best): n for w, n in words.items()}
    return merges


def joined(word, pair):
    out, i = [], 0
    while i < len(word):
        if word[i:i + 2] == pair:
            out.append(word[i] + word[i + 1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return tuple(out)


MERGES = 400


@functools.lru_cache(maxsize=None)
def trained(family):
    """Trained on the text beside this file and on the hard strings, so that
    merges of every alphabet occur."""
    text = (HERE / "corpus.txt").read_bytes()
    hard = "\n".join(HARD.values()).encode() * 4
    merges = train(family, text + hard, MERGES)
    if family == "llama3":
        # A token that no merges lead to: only ignore_merges finds it.
        assert b" the" in {a + b for a, b in merges}
        gone, kept = set(), []
        for a, b in merges:
            if a + b == b" the" or a in gone or b in gone:
                gone.add(a + b)
            else:
                kept.append((a, b))
        tok = Tokenizer(family, kept)
        tok.id[b" the"] = len(tok.word)
        tok.word.append(b" the")
        return tok
    return Tokenizer(family, merges)


HARD = {
    "empty line": "\n",
    "contractions": "I'm you're he's we've they'd I'll don't DON'T I'LL it'\u017f 'S",
    "apostrophes": "''s 'tis o'clock rock'n'roll \u2019s '' ' s",
    "digits": "0 12 123 1234 1234567 3.14159 1,000,000 x2y33 \u0663\u0664 \u00bd \u2168 \u4e94",
    "spaces": "a b  c   d          e" + " " * 70 + "f",
    "tabs and lines": "a\t\tb\n\n\nc\r\nd \r\n \n  e\n  \n\tf   \n",
    "trailing": "end   ",
    "only blanks": "   \n\t  \n  ",
    "other blanks": "a\u00a0b\u2003\u2003c\u3000d\u202fe\u180ef\u200bg\u0085h\u2028i\ufeffj",
    "emoji": "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 \u2764\ufe0f \U0001f44d\U0001f3fd!",
    "chinese": "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u4eca\u5929\u662f2024\u5e745\u670820\u65e5\u3002",
    "japanese": "\u3053\u3093\u306b\u3061\u306f\u3001\u30c6\u30b9\u30c8 \u304b\u3099",
    "korean": "\uc548\ub155\ud558\uc138\uc694 \u1100\u1161\u11a8",
    "combining": "cafe\u0301 e\u0323\u0302 n\u0303 A\u030a \u1e9b\u0323 q\u0307\u0323 \u0301x",
    "composed": "caf\u00e9 \u1ec7 \u00f1 \u00c5 \u212b \u2126 \u1e69 \uf900",
    "arabic and hindi": "\u0645\u0631\u062d\u0628\u0627 \u0628\u0643\u0645 \u0928\u092e\u0938\u094d\u0924\u0947",
    "thai and hebrew": "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd",
    "cyrillic": "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0438\u0306",
    "code": "for (i = 0; i < n; i++) {\n\t\tx[i] += *p->q;  // ok?\n    }\n#!$%^&*()_+\n\n",
    "url": "https://example.org/a_b?c=d&e=%20#f foo@bar.com",
    "control": "\x01\x02\x7f\x1f a\x0bb\x0cc\x1cd",
    "special look-alikes": "<|endoftext|><|im_start|>user<|im_end|> <|eot_id|>",
    "mixed": "Hello\U0001f600World123\u4f60\u597d!!!\n\n  \u00e9t\u00e9",
    "private": "\ue000\U0010ffff\U000e0001\ufffd",
    "long word": "a" * 1000 + "the" * 300,
    "old letters": "\U00010330\U00010331 \U0001d400\U0001d7d8 \u16a0",
}
BAD = {
    "lone continuation": b"a\x80b\xbf\xbf c",
    "truncated": b"caf\xc3 \xe4\xbd x\xf0\x9f\x98",
    "overlong": b"\xc0\xaf \xe0\x80\xaf \xf0\x80\x80\x80",
    "surrogate": b"\xed\xa0\x80\xed\xb0\x80 it's",
    "too large": b"\xf4\x90\x80\x80 \xf5\xff\xfe 12",
    "latin-1": "déjà vu".encode("latin-1"),
    "nul": b"a\x00b\x00\x00",
    "bad within blanks": b"  \xff  x \xff\n\n",
}


def hard_strings():
    return {**{k: v.encode() for k, v in HARD.items()}, **BAD}


def golden():
    return {f: {name: trained(f).encode(s)
                for name, s in hard_strings().items()} for f in FAMILIES}


if __name__ == "__main__":  # writes the golden ids
    lines = [f' "{f}": {{\n' + ",\n".join(
        f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in cases.items())
        + "\n }" for f, cases in golden().items()]
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")
