# SPDX-License-Identifier: Apache-2.0
"""From documents to shards: one behind the other, or whole in samples of one length."""
import array

from tokenizing.shards import TYPES

HELD = 1 << 26  # tokens that are packed at once
LEARNT, BEGINS = 1, 2  # bytes of a mask, with 0 for context


def best_fit(lengths, room):
    """Of pieces of such lengths, those of each sample: the longest first, each in the
    sample that it fills best."""
    samples, left, rooms = [], {}, 0  # room that is left: samples; its bit
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        n, at = lengths[i], room
        fit = rooms >> n
        if fit:
            at = n + (fit & -fit).bit_length() - 1
            s = left[at].pop()
            rooms ^= (not left[at]) << at
            samples[s].append(i)
        else:
            s = len(samples)
            samples.append([i])
        if at > n:
            left.setdefault(at - n, []).append(s)
            rooms |= 1 << at - n
    return samples


class Stream:
    """One behind the other."""

    def __init__(self, shards, masked):
        self.shards, self.masked = shards, masked
        self.tokens = self.learnt = self.cut = self.dropped = self.samples = 0

    def take(self, tokens, mask, parts):
        """parts: (tokens, whether it is the last of its document)."""
        self.put(tokens, mask)
        self.tokens += len(tokens)

    def put(self, tokens, mask):
        self.shards.put(memoryview(tokens).cast("B"), *[mask] * self.masked)
        self.learnt += mask.count(LEARNT)

    def finish(self):
        self.shards.finish()


class Packer(Stream):
    """Samples of `room` tokens that begin with documents; what is left of one is `fill`.
    A document is cut where it is longer.  Pieces in which nothing is to be learnt are
    dropped."""

    def __init__(self, shards, room, fill):
        super().__init__(shards, True)
        self.room, self.fill = room, fill
        self.held, self.mask = array.array(TYPES[shards.width]), bytearray()
        self.begin = 0  # of the document that is open, or of its rest
        self.pieces, self.learns, self.is_cut = [], False, False

    def take(self, tokens, mask, parts):
        at = 0
        for n, last in parts:
            self.held += tokens[at:at + n]
            self.mask += mask[at:at + n]
            at += n
            while len(self.held) - self.begin > self.room:
                self.close(self.begin + self.room)
                self.is_cut = True
            if last:
                self.close(len(self.held))
                self.cut += self.is_cut
                self.dropped += not self.learns
                self.learns = self.is_cut = False
        if len(self.held) >= HELD:
            self.flush()

    def close(self, end):
        """A piece; its first token is no target: it has no context here."""
        if end > self.begin:
            self.mask[self.begin] = BEGINS
        if self.mask.find(LEARNT, self.begin, end) >= 0:
            self.pieces.append((self.begin, end))
            self.tokens += end - self.begin
            self.learns = True
        self.begin = end

    def flush(self):
        for sample in best_fit([b - a for a, b in self.pieces], self.room):
            tokens, mask = array.array(self.held.typecode), bytearray()
            for a, b in (self.pieces[i] for i in sample):
                tokens += self.held[a:b]
                mask += self.mask[a:b]
            lacks = self.room - len(tokens)
            tokens.extend([self.fill] * lacks)
            # Each fill is a document: none looks at another.
            self.put(tokens, mask + bytes([BEGINS]) * lacks)
            self.samples += 1
        del self.held[:self.begin], self.mask[:self.begin]
        self.begin, self.pieces = 0, []

    def finish(self):
        self.flush()
        super().finish()
