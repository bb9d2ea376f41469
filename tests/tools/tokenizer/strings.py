# SPDX-License-Identifier: Apache-2.0
"""Strings that are hard to cut into tokens.  Of those that are no text golden.json has
the ids with the small tokenizers beside it, computed once by a slow tokenizer written
from the published patterns of the three families."""

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

ALL = {**{k: v.encode() for k, v in HARD.items()}, **BAD}
