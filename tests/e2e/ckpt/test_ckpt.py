# SPDX-License-Identifier: Apache-2.0
"""The checkpoint tool, and saves that are killed at any time."""
import random
import re
import time

import pytest

import run
from run import ckpt, hf


@pytest.fixture(scope="module")
def two(shared):
    """Two ranks' checkpoints of steps 2 and 3 in bf16, and the export of the
    run itself."""
    exported = shared.folder / "hf"
    r = shared.good(2, {**run.offload(3, "cpu", "none", None), "bf16.enabled": True,
                        "run.save": True, "run.save_interval": 2,
                        "run.export": str(exported)})
    return exported, r.output


def test_list_tells_the_checkpoints(two):
    _, out = two
    lines = ckpt("list", out).out.splitlines()
    assert [x.split()[:4] for x in lines] == [["step", "3", "2", "files"],
                                              ["step", "2", "2", "files"]]
    assert all('"layers":5' in x and " MiB  adam: master, m, v  " in x
               for x in lines)


def flip(file, at):
    """One bit; returns what the file was."""
    data = file.read_bytes()
    bad = bytearray(data)
    bad[at] ^= 1
    file.write_bytes(bad)
    return data


def test_verify_reads_every_byte(two):
    _, out = two
    whole = "step 3 intact step 2 intact".split()
    assert ckpt("verify", out).out.split() == whole
    for file in sorted((out / "checkpoints/step-00000002").iterdir()):
        for at in (9, file.stat().st_size // 2, -40):
            data = flip(file, at)
            r = ckpt("verify", out, rc=1)
            assert file.name in r.err and r.out.split() == [*whole[:-1], "damaged"], str(r)
            file.write_bytes(data)
        file.write_bytes(data[:-1])
        ckpt("verify", out, "--step", 3)
        assert file.name in ckpt("list", out, rc=1).err
        file.write_bytes(data)
    ckpt("verify", out, "--step", 2)


def test_export_of_a_checkpoint_is_that_of_the_run(two, tmp_path):
    exported, out = two
    assert "step 3 is in" in ckpt("export", out, "--out", tmp_path / "a").out
    assert hf.read(tmp_path / "a") == hf.read(exported)
    assert (tmp_path / "a/config.json").read_text() == \
        (exported / "config.json").read_text()
    ckpt("export", out, "--out", tmp_path / "b", "--step", 2, "--dtype", "fp32",
         "--shard-bytes", 30000)
    b = hf.read(tmp_path / "b")
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 3
    assert {t[0] for t in b.values()} == {"F32"}
    assert {k: t[1] for k, t in b.items()} == hf.gpt2_shapes(run.MODEL)


def test_a_loss_that_is_no_number_is_none(place, tmp_path):
    out = place.good(1, {"run.save": True, "run.eval_batches": 2}).output
    any_name = tmp_path / 'a"\\\n'
    assert "export: loss " in ckpt("export", out, "--out", any_name).out
    lines = (out / "metrics.jsonl").read_text()
    (out / "metrics.jsonl").write_text(
        re.sub(r'("validation_loss": )[\d.]+', r'\1"nan"', lines))
    assert "no loss: the run told none" in ckpt("export", out, "--out", tmp_path / "b").out


@pytest.mark.parametrize("args, status, words", [
    ((), 2, ("usage",)), (("list",), 2, ("usage",)),
    (("shred", "OUT"), 2, ("usage",)), (("export", "OUT"), 2, ("usage",)),
    (("verify", "OUT", "--step", "x"), 2, ("--step", "not understood")),
    (("list", "/nowhere"), 1, ("no checkpoint", "/nowhere")),
    (("verify", "/nowhere"), 1, ("no checkpoint", "/nowhere")),
    (("verify", "OUT", "--step", "9"), 1, ("no checkpoint of step 9",)),
    (("export", "OUT", "--out", "OUT"), 1, ("exists",)),
    (("export", "OUT", "--out", "NEW", "--step", "9"), 1, ("step 9",)),
    (("export", "OUT", "--out", "NEW", "--adapter"), 1, ("no adapters",)),
    (("export", "OUT", "--out", "/proc/x/y"), 1, ("/proc/x",))])
def test_what_cannot_be_is_refused(args, status, words, two, tmp_path):
    _, out = two
    places = {"OUT": out, "NEW": tmp_path / "new"}
    r = ckpt(*(places.get(a, a) for a in args), rc=status)
    assert all(w in r.err for w in words), str(r)
    assert not (tmp_path / "new").exists()


def test_a_list_that_is_lost_is_no_success(two):
    r = run.call("sh", "-c", 'exec "$0" list "$1" > /dev/full', run.built("tools/ckpt"),
                 two[1])
    assert r.rc == 1 and "standard output: cannot write: No space" in r.err, str(r)


def test_a_damaged_checkpoint_is_not_exported(two, tmp_path):
    _, out = two
    file = next((out / "checkpoints/step-00000003").glob("rank-00001*"))
    data = flip(file, file.stat().st_size // 2)
    r = ckpt("export", out, "--out", tmp_path / "hf", rc=1)
    file.write_bytes(data)
    assert file.name in r.err and not list(tmp_path.iterdir()), str(r)


# ---- kill -9 ----

def half_written(out):
    return any(p.name.endswith((".tmp", ".old")) for p in (out / "checkpoints").glob("*"))


@pytest.mark.parametrize("ranks, kills", [(1, 12), (2, 6)])
def test_killed_saves_lose_nothing_but_the_steps_since(ranks, kills, place):
    """A run is killed soon after its second save has begun, and goes on.  After each kill
    the newest checkpoint is no older than before, and the run resumes from it; all that is
    complete is intact; the end has the bits of a run that nobody killed."""
    rng, half = random.Random(20), 0
    out, c = place.folder / "killed", {
        "run.save": True, "run.save_interval": 1, "run.steps": 10**6,
        "run.keep_last": 3, "run.eval_batches": 0,
        "zero_optimization.stage": 3 if ranks > 1 else 0}
    for i in range(25 * kills):  # beside other work most come too late
        if i >= kills and half > kills // 10:
            break
        before = run.saved(out)
        run_ = place.start(ranks, c, ["--resume"] if before else [], output=out)
        run_.until(lambda: run.saved(out) > before, "a save")
        run_.until(lambda: half_written(out), "the next save")
        time.sleep(rng.random() * 0.004)
        run_.kill()
        r = run_.finish()
        assert r.rc != 0 and "izar: checkpoint" not in r.err, str(r)
        half += half_written(out)
        assert not before or run.saved(out)[-1] >= before[-1]
        if i % 6 == 5:  # the newest is checked by each resuming
            assert "damaged" not in ckpt("verify", out).out
    assert half > kills // 10, "the kills did hit saves"
    more = {**c, "run.steps": run.saved(out)[-1] + 2, "run.save_interval": 0}
    want = place.good(ranks, more)
    got = place.good(ranks, more, ["--resume"], output=out)
    assert got.hash == want.hash
    losses = {x["step"]: x["loss"] for x in got.steps}
    assert [losses[s] for s in sorted(losses)] == want.losses[:len(losses)]
