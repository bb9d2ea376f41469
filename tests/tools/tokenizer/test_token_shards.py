# SPDX-License-Identifier: Apache-2.0
"""Documents, shards and loss masks."""
import random

import pytest

from place import (ENDS, FAMILIES, LICENSE, flat, head, jsonl, read_mask, read_shard,
                   shards, trained)


def texts(n):
    rng = random.Random(n)
    lines = [x for x in LICENSE.read_text().splitlines() if x]
    return [" ".join(rng.choices(lines, k=rng.randrange(1, 5)))
            for _ in range(n)]


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_end_with_end_of_text(family, place):
    tok = trained(family)
    end = tok.special()[ENDS[family]]
    docs = texts(9)
    path = place.tokenizer(family)
    want = [x for d in docs for x in [*tok.encode(d.encode()), end]]
    out = place.encode(path, {"t.jsonl": jsonl({"text": d} for d in docs)})
    assert flat(shards(out)) == want
    assert not list(out.glob("*.mask"))
    out = place.encode(path, {"t.txt": "\n--\n".join(docs).encode()},
                       "--split-on", r"\n--\n")
    assert flat(shards(out)) == want
    first = "<|begin_of_text|>" if family == "llama3" else "<|endoftext|>"
    out = place.encode(path, {"a.txt": docs[0].encode(), "b.txt": docs[1].encode()},
                       "--begin", first)
    assert flat(shards(out)) == [x for d in docs[:2] for x in
                                 [tok.special()[first], *tok.encode(d.encode()), end]]


def test_the_output_is_the_same_with_any_number_of_processes(place):
    path = place.tokenizer("qwen2")
    data = jsonl({"text": d} for d in texts(4000))
    outs = [place.encode(path, {"t.jsonl": data}, "--threads", n,
                         "--shard-tokens", 25000, "--val-fraction", 0.05)
            for n in (1, 2, 3, 8)]
    names = sorted(p.name for p in outs[0].glob("out_*"))
    assert len(names) > 5 and any("val" in n for n in names)
    for out in outs[1:]:
        assert sorted(p.name for p in out.glob("out_*")) == names
        for n in names:
            assert (out / n).read_bytes() == (outs[0] / n).read_bytes()


@pytest.mark.parametrize("size", (1, 7, 100, 4096, 5000))
def test_shards_are_full_but_the_last(size, place):
    data = bytes(random.Random(size).randrange(1, 256)
                 for _ in range(min(3 * size + 1, 9999)))
    out = place.encode("bytes", {"t.txt": data}, "--shard-tokens", size,
                       "--end", "none")
    parts = shards(out)
    assert [len(p) for p in parts[:-1]] == [size] * (len(parts) - 1)
    assert 0 < len(parts[-1]) <= size
    assert flat(parts) == list(data)


def test_large_vocabularies_have_32_bits(place):
    def change(spec):
        last = spec["added_tokens"][-1]
        spec["added_tokens"].append({**last, "id": 70000, "content": "<far>"})
        spec["model"]["vocab"]["<far>"] = 70000
    path = place.tokenizer("gpt2", change)
    out = place.encode(path, {"t.txt": b"a<far>"}, "--end", "none", "--special")
    one = out / "out_train_000000.bin"
    assert head(one, 2) == [20240801, 7]
    assert read_shard(one)[-1] == 70000
    assert "at least 70001" in place.said


@pytest.mark.parametrize("fraction", (0.01, 0.1, 0.33, 0.5))
def test_validation_has_its_part_of_the_documents(fraction, place):
    n = 2000
    docs = [f"doc {i}." for i in range(n)]
    out = place.encode("bytes", {"t.jsonl": jsonl({"text": d} for d in docs)},
                       "--val-fraction", fraction)
    parts = {s: bytes(flat(shards(out, s))).decode().split("\0")[:-1]
             for s in ("train", "val")}
    assert abs(len(parts["val"]) - fraction * n) <= 1
    assert sorted(parts["train"] + parts["val"]) == sorted(docs)
    # Every tenth of the input has about its share, and no period is met.
    chosen = sorted(int(d[4:-1]) for d in parts["val"])
    for k in range(10):
        have = sum(k * n // 10 <= c < (k + 1) * n // 10 for c in chosen)
        assert abs(have - fraction * n / 10) <= 2
    if fraction < 0.3:
        assert len({b - a for a, b in zip(chosen, chosen[1:])}) > 3


def test_one_document_is_cut_at_the_end_of_a_line(place):
    lines = [f"line {i}\n" for i in range(100)]
    out = place.encode("bytes", {"t.txt": "".join(lines).encode()},
                       "--val-fraction", 0.2)
    train, val = (bytes(flat(shards(out, s))) for s in ("train", "val"))
    assert train[:-1] + val[:-1] == "".join(lines).encode()
    assert train.endswith(b"\n\0") and 0.19 < len(val) / 790 < 0.25
    place.refuse("bytes", b"Title\n" + b"a " * 1000, "--val-fraction", 0.02,
                 words=["{}: --val-fraction 0.02", "byte 6 of 2006"])


# ---- masks ----

def learnt(out):
    """Runs of tokens and whether they are to be learnt."""
    ids, mask = flat(shards(out)), flat(shards(out, "train", "mask",
                                               read_mask))
    assert len(ids) == len(mask)
    runs = []
    for i, m in zip(ids, mask):
        if runs and runs[-1][1] == m:
            runs[-1][0].append(i)
        else:
            runs.append(([i], m))
    return runs


@pytest.mark.parametrize("size", (3, 10000))
def test_a_prompt_is_masked_and_its_completion_not(size, place):
    tok = trained("gpt2")
    end = tok.special()["<|endoftext|>"]
    records = [{"prompt": f"Who {i}?", "completion": f" He {i}."}
               for i in range(5)]
    out = place.encode(place.tokenizer("gpt2"), {"t.jsonl": jsonl(records)},
                       "--shard-tokens", size)
    want = [run for r in records for run in
            ((tok.encode(r["prompt"].encode()), 0),
             (tok.encode(r["completion"].encode()) + [end], 1))]
    assert learnt(out) == want
