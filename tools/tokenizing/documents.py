# SPDX-License-Identifier: Apache-2.0
"""Documents of the input, in order, and which of them are for validation."""
import math
import re
import typing

from tokenizing.shards import Refused
from tokenizing.sources import open_all
from tokenizing.tokens import part_end

SOMETHING = re.compile(rb"[^ \t\r\n]")


class Part(typing.NamedTuple):
    """What is encoded at once: bytes [start, end) of a file, a document or a part of
    a long one."""
    file: int
    start: int
    end: int
    line: int  # or record, from 1; the document's number where a text is split
    val: bool
    first: bool  # of its document
    last: bool


def find_cut(path, data, fraction):
    """Behind the last end of a line before the last part of the file; 0: there is none."""
    want = len(data) - int(fraction * len(data))
    cut = data.rfind(b"\n", 0, want) + 1
    if 0 < cut < want / 2:
        raise Refused(f"{path}: --val-fraction {fraction}: the last line before that part "
                      f"begins at byte {cut} of {len(data)}, and all from there on would be "
                      "for validation: cut the file, or name --split-on")
    return cut


def mix(z):
    """iz_mix of codelets/base/mix.h, of the next number."""
    most = (1 << 64) - 1
    z = z + 0x9e3779b97f4a7c15 & most
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9 & most
    z = (z ^ z >> 27) * 0x94d049bb133111eb & most
    return z ^ z >> 31


def is_chosen(i, fraction):
    """Whether document i is for validation: each stretch of 1/fraction documents has
    one, at a random place of it, so that no period of the input is met."""
    j = math.floor(i * fraction)
    first, behind = math.ceil(j / fraction), math.ceil((j + 1) / fraction)
    return first + math.floor((behind - first) * (mix(j) >> 11) * 2.0 ** -53) == i


class Corpus:
    """A line of JSON is a document; any other file is one, or those between
    occurrences of `split_on`.  With val_fraction, a file that is one document is cut at
    the end of a line; of others that part of the documents is for validation.
    folder: where files are unpacked."""

    def __init__(self, paths, split_on, val_fraction, folder):
        self.split_on, self.val_fraction = split_on, val_fraction
        self.files = open_all(paths, folder)
        self.bytes = sum(len(f.data) for f in self.files)

    def where(self, part):
        f = self.files[part.file]
        return f"{f.path}, {f.unit} {part.line}" if part.line else f.path

    def told(self):
        """What the files are."""
        some = [f"{f.path} ({f.how})" for f in self.files[:3]]
        more = len(self.files) - len(some)
        return ", ".join(some) + f" and {more} more" * (more > 0)

    def extents(self, f):
        """(start, end, line, whether it is cut off for validation) of a file's
        documents, empty ones too."""
        separator = b"\n" if f.json else self.split_on
        if not separator:
            whole = self.val_fraction > 0
            cut = find_cut(f.path, f.data, self.val_fraction) if whole else 0
            ends = [cut, len(f.data)] if cut else [len(f.data)]
            for start, end in zip([f.start, cut], ends):
                yield start, end, 0, cut > 0 and start >= cut
            return
        at, line = f.start, 0
        while at < len(f.data):
            end = f.data.find(separator, at)
            end = len(f.data) if end < 0 else end
            line += 1
            # A line of Windows ends with two characters.
            blank = separator == b"\n" and f.data[end - 1:end] == b"\r"
            yield at, end - blank, line, False
            at = end + len(separator)

    def documents(self):
        """Those that are not blank, each as one Part."""
        n = 0
        for i, f in enumerate(self.files):
            for start, end, line, val in self.extents(f):
                if not SOMETHING.search(f.data, start, end):
                    continue
                if line and self.val_fraction > 0:
                    val = is_chosen(n, self.val_fraction)
                n += 1
                yield Part(i, start, end, line, val, True, True)

    def parts(self, tokenizer):
        """Documents, long texts in parts that can be encoded one by one."""
        for d in self.documents():
            f, at = self.files[d.file], d.start
            while at < d.end:
                end = d.end if f.json else part_end(tokenizer, f.data, at, d.end)
                yield d._replace(start=at, end=end, first=at == d.start,
                                 last=end == d.end)
                at = end
