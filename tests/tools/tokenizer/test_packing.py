# SPDX-License-Identifier: Apache-2.0
"""Documents stay whole in samples of one length, and the report says what became of
them."""
import array
import json
import random

import pytest

from place import flat, head, jsonl, read_shard, shards

from tokenizing import packing

CONTEXT, LEARNT, BEGINS = 0, 1, 2


def samples(out, n):
    """Of each sample, the documents in it: tokens and their mask; a fill is none."""
    found = []
    for path in sorted(out.glob("out_train_*.bin")):
        ids, mask = read_shard(path), path.with_suffix(".mask")
        assert head(path, 5)[3:] == [0, n] and len(ids) % n == 0
        assert head(mask, 2)[1] == 2
        marks = mask.read_bytes()[1024:]
        for at in range(0, len(ids), n):
            assert marks[at] == BEGINS
            docs = []
            for t, m in zip(ids[at:at + n], marks[at:at + n]):
                if m == BEGINS:
                    docs.append(([], []))
                docs[-1][0].append(t)
                docs[-1][1].append(m)
            found.append([d for d in docs if d != ([0], [BEGINS])])
    return found


def best_fit_by_looking(lengths, room):
    """Every sample is looked at; of equal ones the youngest is taken."""
    found = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        left = [room - sum(lengths[k] for k in s) for s in found]
        fits = [(r, -k) for k, r in enumerate(left) if r >= lengths[i]]
        if fits:
            found[-min(fits)[1]].append(i)
        else:
            found.append([i])
    return found


@pytest.mark.parametrize("room", (1, 7, 64, 100))
def test_samples_are_filled_best(room):
    assert packing.best_fit([5, 2, 3, 4, 1, 6], 7) == [[5, 4], [0, 1], [3, 2]]
    rng = random.Random(room)
    lengths = [rng.randrange(1, room + 1) for _ in range(400)]
    found = packing.best_fit(lengths, room)
    want = best_fit_by_looking(lengths, room)
    assert sorted(flat(found)) == list(range(400)) and len(found) == len(want)
    assert all(sum(lengths[i] for i in s) <= room for s in found)
    fill = sorted(sum(lengths[i] for i in s) for s in found)
    assert fill == sorted(sum(lengths[i] for i in s) for s in want)


# A completion of k letters behind a prompt, for lengths from 4 to 33.
TALKS = [{"prompt": f"{i % 10}?", "completion": "a" * (i * 7 % 30 + 1)} for i in range(200)]


def document(talk):
    p, c = talk["prompt"].encode(), talk["completion"].encode() + b"\0"
    return list(p + c), [BEGINS] + [CONTEXT] * (len(p) - 1) + [LEARNT] * len(c)


@pytest.mark.parametrize("options", ((), ("--shard-tokens", 100, "--threads", 1)))
def test_conversations_stay_whole(options, place):
    out = place.encode("bytes", {"t.jsonl": jsonl(TALKS)}, "--pack", 40, *options)
    found = samples(out, 40)
    assert sorted(flat(found)) == sorted(map(document, TALKS))
    n = json.loads((out / "out_report.json").read_text())
    total = sum(len(document(t)[0]) for t in TALKS)
    assert n["fill"] == round(total / 40 / len(found), 4) > 0.98
    assert (n["documents"], n["tokens"]["train"], n["samples"], n["cut"], n["dropped"]) == \
        (200, total, len(found), 0, 0)
    assert n["learnt"] == sum(document(t)[1].count(LEARNT) for t in TALKS)
    assert n["lengths"]["50"] == sorted(len(document(t)[0]) for t in TALKS)[99]
    assert "model.seq 40" in place.said and "document_end" not in place.said
    sizes = [len(s) for s in shards(out)]
    assert sizes == [80] * (len(found) // 2) + [40] * (len(found) % 2) if options else \
        len(sizes) == 1


def test_only_what_is_longer_is_cut_and_nothing_is_dropped_but_context(place):
    """Of 20 tokens of context and 10 to be learnt, the first piece teaches nothing."""
    talks = [{"prompt": "p" * 20, "completion": "c" * 9}, {"prompt": "p", "completion": "c"}]
    out = place.encode("bytes", {"t.jsonl": jsonl(talks)}, "--pack", 16)
    found = sorted(flat(samples(out, 16)))
    rest = list(b"pppp" + b"c" * 9 + b"\0")
    assert found == [(list(b"pc\0"), [2, 1, 1]), (rest, [2, 0, 0, 0] + [1] * 10)]
    assert "1 longer ones cut, 0 with nothing" in place.said
    out = place.encode("bytes", {"t.txt": b"ab\nc\neeeeeeee\n" + b"d" * 20}, "--pack", 8, "--split-on",
                       "\\n", "--end", "none")
    assert sorted(map(len, (d for d, _ in flat(samples(out, 8))))) == [2, 4, 8, 8, 8]
    assert "1 longer ones cut, 1 with nothing" in place.said


def test_what_is_held_is_packed_from_time_to_time(place, monkeypatch):
    """A document of many parts is whole in the next one."""
    monkeypatch.setattr(packing, "HELD", 64)
    put = []

    class Sink:
        width = 2

        def put(self, tokens, mask):
            put.append((list(tokens.cast("H")), list(mask)))

    one = packing.Packer(Sink(), 50, 9)
    for i in range(40):
        one.take(array.array("H", [i] * 13), bytearray(b"\1" * 13), [(6, i % 3 == 0), (7, False)])
    assert len(put) > 5 and sum(t.count(i) for t, _ in put for i in range(40) if i != 9) >= 13 * 35
    for tokens, mask in put:
        begins = [k for k, m in enumerate(mask) if m == BEGINS]
        assert begins[0] == 0 and all(
            tokens[k] % 3 in (0, 1) or tokens[k] == 9 for k in begins)


def test_pairs_are_not_packed_and_longer_ones_not_counted(place):
    pair = jsonl([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    place.refuse("bytes", pair, "--preferences", 8, "--pack", 8, name="t.jsonl",
                 words=["--pack: preference pairs"])
    place.encode("bytes", {"t.jsonl": pair + pair.replace(b"a", b"a" * 9)},
                 "--preferences", 8, "--skip-bad")
    assert "1 faulty" in place.said and "the longest text has 3" in place.said
    place.refuse("bytes", b"abc", "--pack", 8, "--shard-tokens", 7, words=["a sample of 8"])


@pytest.mark.parametrize("name, pack", [("a", ("--pack", 40)), ("a.x", ())])
def test_a_picture_shows_the_lengths(name, pack, place):
    pytest.importorskip("matplotlib")
    out = place.new()
    place.encode("bytes", {"t.jsonl": jsonl(TALKS)}, *pack, "--png", out / name)
    assert (out / name).read_bytes()[1:4] == b"PNG"
