# SPDX-License-Identifier: Apache-2.0
"""From files to shards: processes encode batches of documents, and this one writes
them in their order, so that the output does not depend on the number of processes."""
import array
import collections
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor

from tokenizing import records
from tokenizing.packing import Packer, Stream
from tokenizing.shards import TYPES, Refused, Shards

BATCH_BYTES = 1 << 18
BATCH_PARTS = 4096


def tell(notes, name, times, where):
    had = notes.get(name)
    notes[name] = (had[0] + times, had[1]) if had else (times, where)


class Batch:
    """What one turn made; by split: tokens, and a byte per token."""

    def __init__(self, width):
        self.tokens = [array.array(TYPES[width]) for _ in range(2)]
        self.masks = [bytearray() for _ in range(2)]
        self.parts = [], []  # tokens, and whether they are a document's last
        self.documents = self.skipped = 0
        self.longest = 0  # text of a pair so far, tokens
        self.notes = {}


# ---- in a process of its own ----

state = {}  # corpus, recipe, width, skip_bad; set before processes begin


def process_begin(given):
    """Ctrl-C is the first process's to answer; when that is gone, this one ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    state.update(given)
    first = multiprocessing.parent_process().sentinel

    def watch():
        multiprocessing.connection.wait([first])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def encode_batch(parts):
    corpus, batch = state["corpus"], Batch(state["width"])
    for p in parts:
        f = corpus.files[p.file]
        try:
            found = state["recipe"].encode(f.data[p.start:p.end], f.json, p.first, p.last)
        except records.BadRecord as e:
            if not state["skip_bad"]:
                raise Refused(f"{corpus.where(p)}: {e}") from e
            batch.skipped += p.first
            continue
        except Exception as e:
            raise Refused(f"{corpus.where(p)}: {e}") from e
        for name, times in state["recipe"].notes.items():
            tell(batch.notes, name, times, corpus.where(p))
        for ids, learn in found:
            batch.tokens[p.val].extend(ids)
            batch.masks[p.val] += learn
            batch.parts[p.val].append((len(ids), p.last))
            batch.documents += p.first
    batch.longest = state["recipe"].longest
    return batch


# ---- in the first process ----

def batches(corpus, tokenizer):
    """Lists of parts, and how many bytes of the input are behind each."""
    parts, held, done = [], 0, 0
    before = [0]
    for f in corpus.files:
        before.append(before[-1] + len(f.data))
    for p in corpus.parts(tokenizer):
        parts.append(p)
        held += p.end - p.start
        done = before[p.file] + p.end
        if held >= BATCH_BYTES or len(parts) == BATCH_PARTS:
            yield parts, done
            parts, held = [], 0
    if parts:
        yield parts, done


def form_of(corpus, skip_bad):
    """What the first document is; all are of its kind."""
    for d in corpus.documents():
        f = corpus.files[d.file]
        try:
            return records.parse(f.data[d.start:d.end])[1] if f.json else records.PROSE
        except records.BadRecord as e:
            if not skip_bad:
                raise Refused(f"{corpus.where(d)}: {e}") from e
    raise Refused("the input has no document")


def write(batch, sinks, counts):
    for split, one in enumerate(sinks):
        one.take(batch.tokens[split], batch.masks[split], batch.parts[split])
        for part in batch.parts[split]:
            counts.part(split, *part)
        counts.tokens[split] = one.tokens
    counts.documents += batch.documents
    counts.skipped += batch.skipped
    counts.longest = max(counts.longest, batch.longest)
    for name, (times, where) in batch.notes.items():
        tell(counts.notes, name, times, where)


def run_processes(corpus, tokenizer, processes, given, take):
    """Calls take(batch, done) in the order of the input.  Twice as many batches as
    processes are on their way at most.  After an error nothing waits for the pool:
    the thread that feeds it may be stuck in a pipe that nobody reads any more."""
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("fork"), process_begin, (given,))
    waiting = collections.deque()
    try:
        for parts, done in batches(corpus, tokenizer):
            waiting.append((pool.submit(encode_batch, parts), done))
            if len(waiting) == 2 * processes:
                future, behind = waiting.popleft()
                take(future.result(), behind)
        for future, behind in waiting:
            take(future.result(), behind)
    except BaseException as e:
        for process in multiprocessing.active_children():
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)
        if isinstance(e, BrokenProcessPool):
            raise Refused("a process ended before its time: too little memory?") from e
        raise
    pool.shutdown()


def run(job, corpus, recipe, counts, progress):
    """job: out, shard_tokens, val_fraction, threads, skip_bad, pack."""
    tokenizer = recipe.tokenizer
    splits = ("train", "val") if job.val_fraction > 0 else ("train",)
    masked = recipe.masked or job.pack > 0
    shards = [Shards(f"{job.out}_{split}", tokenizer.vocab, job.shard_tokens, masked,
                     recipe.text_tokens, job.pack) for split in splits]
    counts.sinks = [Packer(s, job.pack, recipe.end or 0) if job.pack else Stream(s, masked)
                    for s in shards]
    given = {"corpus": corpus, "recipe": recipe, "width": shards[0].width,
             "skip_bad": job.skip_bad}

    def take(batch, done):
        write(batch, counts.sinks, counts)
        counts.bytes = done
        progress(counts)

    try:
        run_processes(corpus, tokenizer, job.threads, given, take)
        for split, one in enumerate(counts.sinks):
            one.finish()
            counts.shards[split] = shards[split].count
    finally:
        for one in shards:
            one.drop()
    if job.val_fraction > 0 and not counts.tokens[1]:
        print(f"tokenize: warning: none of {counts.documents} documents fell to "
              "validation", file=sys.stderr)
    if not counts.tokens[0]:
        raise Refused("no token for training")
