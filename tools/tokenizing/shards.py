# SPDX-License-Identifier: Apache-2.0
"""Files: input that is mapped, and token shards with their loss masks in the layouts
that runtime/data/shard.c reads (docs/data.md)."""
import array
import contextlib
import glob
import mmap
import os
import stat
import struct

HEADER_BYTES = 1024
KINDS = {2: (20240520, 1), 4: (20240801, 7)}  # bytes of a token: magic and version
TYPES = {2: "H", 4: "I"}  # as the module array calls them
MASK = int.from_bytes(b"mask", "little")  # version 1; 2 of packed samples
SHARDS_MAX = 1000000


class Refused(Exception):
    """What ends the program with status 1; its text says why."""


def map_file(path):
    """A file's bytes, mapped; nothing but a regular file with something in it."""
    try:
        # Not blocking: a named pipe is refused, not waited for.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise Refused(f"{path} is not a regular file")
            if found.st_size == 0:
                raise Refused(f"{path} is empty")
            data = mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
            if data[:40].startswith(b"version https://git-lfs.github.com/spec/"):
                raise Refused(f"{path} is a Git LFS pointer and not the file")
            return data
        finally:
            os.close(fd)
    except OSError as e:
        raise Refused(f"{path}: {e.strerror}") from e


class Output:
    """A file under a temporary name until its header has its length: what has the right
    name is complete."""

    def __init__(self, path, kind, *more):
        self.path, self.kind, self.more = path, kind, more
        self.file = open(path + ".tmp", "wb")
        self.file.write(bytes(HEADER_BYTES))

    def finish(self, count):
        self.file.seek(0)
        self.file.write(struct.pack("<5i", *self.kind, count, *self.more))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.rename(self.path + ".tmp", self.path)


class Shards:
    """PREFIX_000000.bin, PREFIX_000001.bin, ... of at most `most` tokens each; with
    `mask` PREFIX_000000.mask too.  Tokens have 16 bits if `vocab` allows it.  text:
    tokens of each text of pairs, which stay together; sample: of a packed sample; 0: no
    such."""

    def __init__(self, prefix, vocab, most, mask, text=0, sample=0):
        if set(prefix) & set("*?[,\\"):
            raise Refused(f"{prefix}: data.path could not name it: no * ? [ , or "
                          "backslash")
        # A pattern that ends as shards do would take those of an earlier run in.
        there = [name for ending in ("bin", "mask")
                 for name in sorted(glob.glob(f"{prefix}_[0-9]*.{ending}"))]
        if there:
            raise Refused(f"{there[0]} is there already: remove it or choose another "
                          "name")
        whole = 2 * text or sample or 1
        if most < whole:
            raise Refused(f"--shard-tokens: {most} has no room for " + (
                f"a pair of texts of {text} tokens" if text else
                f"a sample of {sample} tokens"))
        self.prefix, self.more = prefix, (text, sample)
        self.most = most // whole * whole
        self.width = 4 if vocab > 65536 else 2
        self.endings = [("bin", KINDS[self.width], self.width)]
        self.endings += [("mask", (MASK, 1 + (sample > 0)), 1)] * mask
        self.open = []  # outputs of the shard that is being written: tokens, mask
        self.here = self.count = 0  # tokens of that shard; complete shards

    def put(self, *data):
        """Appends tokens as bytes of the right width, and the mask of a byte each."""
        total = len(data[0]) // self.width
        at = 0
        while at < total:
            n = min(total - at, self.most - self.here)
            self.attempt(self.write, data, at, n)
            at += n
            if self.here == self.most:
                self.finish()

    def finish(self):
        """Completes the open shard."""
        if self.open:
            self.attempt(self.complete)

    def attempt(self, do, *args):
        try:
            do(*args)
        except OSError as e:
            raise Refused(f"{self.name('bin')}: {e.strerror}") from e

    def name(self, ending):
        return f"{self.prefix}_{self.count:06d}.{ending}"

    def write(self, data, at, n):
        if not self.open and self.count == SHARDS_MAX:
            raise Refused(f"{self.prefix}: more than a million shards")
        for ending, kind, _ in self.endings[len(self.open):]:
            self.open.append(Output(self.name(ending), kind, *self.more))
        for output, one, (_, _, size) in zip(self.open, data, self.endings):
            output.file.write(memoryview(one)[at * size:(at + n) * size])
        self.here += n

    def complete(self):
        for output in reversed(self.open):  # the mask first: no shard is without it
            output.finish(self.here)
        self.open, self.here = [], 0
        self.count += 1

    def drop(self):
        """Removes the open shard; an interrupt may have come before self.open had
        what it has."""
        for ending, _, _ in self.endings:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.name(ending) + ".tmp")


def read_shard(path, vocab):
    """The tokens of a shard as an array; every length and token is checked."""
    data = map_file(path)
    if len(data) < HEADER_BYTES:
        raise Refused(f"{path} has {len(data)} bytes, fewer than the header of a shard")
    *kind, count = struct.unpack("<3i", data[:12])
    width = next((w for w, k in KINDS.items() if k == tuple(kind)), None)
    if not width:
        raise Refused(f"{path} begins with magic {kind[0]} version {kind[1]}; a token "
                      "shard has 20240520 version 1 or 20240801 version 7")
    if count <= 0 or HEADER_BYTES + count * width != len(data):
        raise Refused(f"{path}: the header says {count} tokens, but the file has "
                      f"{len(data)} bytes")
    ids = array.array(TYPES[width])
    ids.frombytes(memoryview(data)[HEADER_BYTES:])
    if max(ids) >= vocab:
        bad = next(i for i, token in enumerate(ids) if token >= vocab)
        raise Refused(f"{path}: token {bad} is {ids[bad]}, outside the vocabulary of "
                      f"{vocab}")
    return ids
