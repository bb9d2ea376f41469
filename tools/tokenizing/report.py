# SPDX-License-Identifier: Apache-2.0
"""What became of the input: lines, the same as JSON beside the shards, and a picture."""
import array
import json

from tokenizing.records import NOTES, PAIR, TEXT
from tokenizing.shards import Refused
from tokenizing.tokens import package

PERCENTILES = (5, 25, 50, 75, 95, 100)
BARS = 60


class Counts:
    """What is done so far; by split: training, validation."""

    def __init__(self, total):
        self.bytes, self.bytes_total = 0, total
        self.documents = self.skipped = self.longest = 0
        self.tokens, self.shards = [0, 0], [0, 0]
        self.lengths = array.array("I")  # of each document, in its split's order
        self.open = [0, 0]  # tokens of a document that is not whole yet
        self.notes = {}  # what is told: how often, and where first
        self.sinks = []

    def part(self, split, n, last):
        self.open[split] += n
        if last:
            self.lengths.append(self.open[split])
            self.open[split] = 0

    def all(self, name):
        return sum(getattr(s, name) for s in self.sinks)


def percentiles(lengths):
    found = sorted(lengths)
    return {p: found[-(-len(found) * p // 100) - 1] for p in PERCENTILES} if found else {}


def numbers(c, recipe, vocab, pack):
    """All of it, by name."""
    samples = c.all("samples")
    return {
        "documents": c.documents, "skipped": c.skipped,
        "tokens": dict(zip(("train", "val"), c.tokens)), "learnt": c.all("learnt"),
        "lengths": {str(p): n for p, n in percentiles(c.lengths).items()},
        "vocab": vocab, "kind": recipe.kind,
        "told": {name: {"times": n, "first": where} for name, (n, where) in c.notes.items()},
        **({"sample": pack, "samples": samples, "cut": c.all("cut"),
            "dropped": c.all("dropped"),
            "fill": round(sum(c.tokens) / max(samples * pack, 1), 4)} if pack else {})}


def lines(out, c, recipe, n, s):
    pairs, pack = recipe.kind == PAIR, n.get("sample")
    # In a conversation its token may close messages too.
    ends = recipe.end is not None and recipe.kind == TEXT and not pack
    for split, tokens, shards in zip(("train", "val"), c.tokens, c.shards):
        if shards:
            yield f"{out}_{split}_*.bin: {tokens} tokens in {shards} shard" + "s" * (shards > 1)
    mib = c.bytes / 1048576
    yield (f"{c.documents} {'pairs' if pairs else 'documents'}, {mib:.1f} MiB in {s:.1f} s "
           f"({mib / s:.1f} MiB/s)" +
           f", {c.skipped} faulty records left out" * (c.skipped > 0) +
           f", {n['learnt']} tokens to be learnt" * (recipe.masked or pack is not None) +
           f", the longest text has {c.longest}" * pairs +
           f"; model.vocab must be at least {n['vocab']}" +
           f", model.seq {recipe.text_tokens if pairs else pack}" * bool(pairs or pack) +
           f", data.document_end may be {recipe.end}" * ends)
    if not pairs:
        yield "tokens of a document: " + ", ".join(
            f"{p} % have at most {length}" for p, length in n["lengths"].items())
    if pack:
        yield (f"{n['samples']} samples of {pack}, {100 * n['fill']:.1f} % full; documents: "
               f"{n['cut']} longer ones cut, {n['dropped']} with nothing to be learnt dropped")
    elif recipe.kind not in (PAIR, TEXT):
        yield ("conversations run on from one sample into the next: --pack N keeps each "
               "whole in a sample of N tokens")


def write(out, c, recipe, vocab, pack, s, png):
    """Returns what is told as a warning."""
    n = numbers(c, recipe, vocab, pack)
    for line in lines(out, c, recipe, n, s):
        print(line)
    with open(f"{out}_report.json", "w") as f:
        json.dump(n, f, indent=1)
        f.write("\n")
    if png:
        try:
            draw(png, c.lengths, n)
        except OSError as e:
            raise Refused(f"{png}: {e.strerror}") from e
    return [f"{times} times, first {where}: {NOTES[name]}"
            for name, (times, where) in c.notes.items()]


def library():
    return package("matplotlib.figure", "--png")


def draw(path, lengths, n):
    """How many documents have how many tokens."""
    whole = library().Figure(figsize=(7, 3.2), layout="constrained")
    axes, most = whole.add_subplot(), max(lengths, default=1)
    edges = sorted({round((most + 1) ** (i / BARS)) for i in range(BARS + 1)})
    axes.hist(lengths, bins=edges if len(edges) > 1 else 1)
    axes.set_xscale("log")
    marks = [(length, f"{p} %") for p, length in n["lengths"].items()]
    if n.get("sample"):
        marks.append((n["sample"], "sample"))
    for at, name in marks:
        axes.axvline(at, lw=1, color="#444444", ls="-" if name == "sample" else ":")
        axes.annotate(name, (at, 1), xycoords=("data", "axes fraction"), fontsize=7,
                      rotation=90, va="top", ha="right")
    axes.set_title(f"{n['documents']} {n['kind']}" + (
        f", {n['samples']} samples {100 * n['fill']:.1f} % full" if "sample" in n else ""),
        loc="left", fontsize=10)
    axes.set_xlabel("tokens", fontsize=9)
    axes.set_ylabel("documents", fontsize=9)
    axes.set_axisbelow(True)
    axes.grid(True, lw=0.5, color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    whole.savefig(path, dpi=150, format="png")
