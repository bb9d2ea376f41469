# SPDX-License-Identifier: Apache-2.0
"""What a mask excludes is not learnt, however a batch is cut, and validation takes each
sample once.  Where tokens come from: tests/runtime/data."""
import random

import pytest

import rows
import run
from inputs import TOKENS, masked, pair_texts, pairs_shard, shard, some_pairs


def tokens(place, name, ids, learn=None):
    """A shard, and the loss mask beside it."""
    path = shard(place.folder / name, ids)
    return path if learn is None else masked(path, learn)


def data(path, **more):
    return {"data": {"path": str(path), "bytes": False, **more},
            "run.eval_batches": 2}


def uneven(place):
    """Windows with many answers, few and none."""
    rng = random.Random(11)
    learn = []
    while len(learn) < 5000:
        part = rng.choice([0, 0, 0.1, 0.3, 1])
        learn += [int(rng.random() < part) for _ in range(16)]
    return data(tokens(place, "uneven.bin", TOKENS, learn[:5000]))


# Ways to cut a batch of 12: ranks, samples of a micro-batch, slices.
CUTS = [(1, 12, 1), (1, 1, 1), (1, 6, 3), (3, 2, 1), (2, 3, 3)]


def test_a_step_is_the_mean_over_its_targets(place):
    """However the batch is cut: one task for all of it divides by their number
    itself.  Validation too."""
    c = {**uneven(place), "train_batch_size": 12, "gradient_clipping": 0.5}
    runs = []
    for ranks, micro, slices in CUTS:
        r = place.good(ranks, {
            **c, "train_micro_batch_size_per_gpu": micro, "run.workers": 1,
            "gradient_accumulation_steps": 12 // micro // ranks,
            "run.slices": slices})
        runs.append([(x["loss"], x["grad_norm"]) for x in r.steps] +
                    [(r.last("validation_loss"), 0)])
    for got in runs[1:]:
        assert got == [pytest.approx(want, rel=2e-5) for want in runs[0]]
    assert len({x[0] for x in runs[0]}) == len(runs[0]) == 4


# Of validation: ranks, samples of a step, of a micro-batch, slices; steps' samples
# that it may have.  Tasks of one sample, of two, of five.
EVALS = [(1, 1, 1, 1, 9), (3, 3, 1, 1, 9), (1, 12, 6, 3, 9), (2, 12, 6, 3, 9),
         (3, 6, 2, 1, 9), (1, 12, 12, 1, 9), (2, 4, 1, 1, 1)]


@pytest.mark.parametrize("kind", ("tokens", "masked", "pairs", "vit", "sparse"))
def test_validation_takes_each_sample_once(kind, place):
    """Of five, or as many as run.eval_batches leaves: for any cut the mean over their
    targets, of which a run of the first ones tells each sample's part."""
    if kind in rows.RECORD:
        rows.use(place, kind)
    size = 2 if kind == "pairs" else 1
    c = {"run.steps": 0, "zero_optimization.stage": 3, "data.val_fraction": 0.05}
    if kind == "pairs":
        seq = run.MODEL["seq"]
        c.update({"data": {"path": str(pairs_shard(
            place.folder / "p.bin", *pair_texts(some_pairs(100), seq), seq)),
            "bytes": False}, "loss.type": "dpo", "loss.sft": 0.5})
    elif kind == "tokens" or kind == "masked":
        learn = [int(i % 16 < i // 16 % 5) for i in range(-1, 1600)]
        c.update(data(tokens(place, "t.bin", TOKENS[:1601],
                             learn if kind == "masked" else None)))

    def evaluate(ranks, batch, micro, slices, steps):
        r = place.good(ranks, {**c, "train_batch_size": size * batch,
                               "train_micro_batch_size_per_gpu": size * micro,
                               "run.slices": slices, "run.eval_batches": steps})
        line, = (x for x in r.lines if "validation_loss" in x)
        n = min(5, batch * steps)
        told = f"{n} of 5 " if n < 5 else f"({n} "
        assert line["samples"] == size * n and told in r.out, str(r)
        return line, micro // slices
    first = [evaluate(1, 1, 1, 1, k)[0] for k in range(1, 6)]
    assert (kind == "masked") == (first[4]["targets"] == 10)
    if kind == "masked":  # a window without a target
        assert first[0]["validation_loss"] is None and not first[0]["targets"]
    found = {}
    for row in EVALS if kind == "tokens" else EVALS[1::2]:
        line, each = evaluate(*row)
        want = first[min(5, row[1] * row[4]) - 1]
        assert line["targets"] == want["targets"]
        assert line["validation_loss"] == pytest.approx(want["validation_loss"], rel=2e-7)
        assert found.setdefault((each, line["samples"]), line["validation_loss"]) == \
            line["validation_loss"], row


def test_ranks_with_fewer_samples_of_a_long_validation_go_on(place):
    """Whether to end early is asked every 4096 tasks: here the second rank has one
    fewer of them, in the last of 455 rounds."""
    path = run.text_file(place.folder / "long", 1818 * run.MODEL["seq"] + 1)
    r = place.good(2, {"run.steps": 0, "run.eval_batches": 1000,
                       "data.val_path": str(path)})
    assert r.last("samples") == 1818


EARLY = {"gradient_clipping": 0}  # updates do not wait for the end of the backward
WARM = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6}}}


@pytest.mark.parametrize("ranks, homes, more", [
    (1, (0, "none", "none"), WARM), (1, (3, "nvme", "nvme"), EARLY),
    (2, (1, "cpu", "none"), {**WARM, **EARLY}), (2, (3, "cpu", "nvme"), WARM),
    (2, (2, "none", "none"), {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}}),
    (1, (1, "none", "none"), {**WARM, "fp16.enabled": True,
                              "fp16.loss_scale_window": 2})], ids=str)
def test_a_step_without_targets_is_skipped_whole(ranks, homes, more, place, nvme):
    """All windows are alike, and of four a mask leaves one: what is not skipped has the
    bits of a run that has no mask and as many steps less."""
    ids = [i % 16 * 7 for i in range(41 * 16 + 1)]
    learn = [int((i - 1) // 16 % 4 == 1) for i in range(len(ids))]
    c = {"train_batch_size": ranks, "run.steps": 12, "run.save": True,
         **run.offload(*homes, nvme), **more}
    part = {**c, **data(tokens(place, "part.bin", ids, learn), val_fraction=0),
            "run.eval_batches": 0, "run.empty_steps": "skip", "run.log_interval": 1}
    some = place.halves(ranks, {**part, "run.steps": 7}, part)
    done = [x for x in some.steps if x["targets"]]
    empty = [x for x in some.steps if not x["targets"]]
    assert len(some.steps) == 12 and len(done) > 2 < len(empty), str(some)
    assert all(x["loss"] is None and x["skipped"] for x in empty)
    assert "no targets" in some.out and "loss 0.0000" not in some.out
    want = place.good(ranks, {**c, **data(tokens(place, "all.bin", ids), val_fraction=0),
                              "run.eval_batches": 0, "run.steps": len(done)})
    for key in ("loss", "grad_norm", "lr", "loss_scale", "skipped"):
        assert [x[key] for x in done] == [x[key] for x in want.steps], key
    assert some.hash == want.hash
    as_any = place.good(ranks, {**part, "run.empty_steps": "update"})
    assert as_any.hash != some.hash and not any(
        x["skipped"] for x in as_any.steps if not x["targets"])
