# SPDX-License-Identifier: Apache-2.0
"""What is the user's stays: files beside ours, lines of a log; and what ends a run says
so."""
import fcntl
import json
import os
import shutil
import signal

import pytest

import run

SAVE = {"run.save": True, "run.save_interval": 1, "run.keep_last": 1}


def somebodys(folder, name="precious"):
    folder.mkdir(parents=True)
    (folder / name).write_text("mine")
    return folder / name


# ---- folders ----

@pytest.mark.sanitized
@pytest.mark.parametrize("folder, name, said", (
    ("x", "precious", "x exists"),
    ("x.tmp", "precious", "x.tmp exists and is no unfinished export"),
    ("x.tmp", "config.json", "x.tmp exists and is no unfinished export"),
    ("elsewhere", "izar-unfinished", "is not ours to remove")))
def test_an_export_removes_no_folder_that_it_did_not_make(folder, name, said, place):
    """Not even one that looks like an export: it may be one, moved away.  And it follows
    no link."""
    file = somebodys(place.folder / folder, name)
    if folder == "elsewhere":
        (place.folder / "x.tmp").symlink_to(file.parent)
    r = place.launch(1, {"run.export": str(place.folder / "x")})
    run.refused(r, str(place.folder / "x"), said)
    assert file.read_text() == "mine" and not r.steps


def test_a_file_beside_a_checkpoints_stays(place):
    """In one that is to be pruned, and behind a link."""
    out = place.folder / "run"
    place.good(1, {**SAVE, "run.steps": 1}, output=out)
    note = out / "checkpoints/step-00000001/note\x1b.txt"
    note.write_text("mine")
    link = out / "checkpoints/step-00000077.tmp"
    link.symlink_to(somebodys(place.folder / "other", "index.json").parent)
    r = place.good(1, {**SAVE, "run.steps": 3}, ["--resume"], output=out)
    assert note.read_text() == "mine" and r.saved == [1, 3], str(r)
    assert "note?.txt in it is not of this program" in r.err
    assert (link / "index.json").read_text() == "mine"


def test_a_checkpoint_of_nobody_knows_whom_stays(place):
    """Its index cannot be read."""
    other, out = (place.good(1, {**SAVE, "run.steps": n}).output / "checkpoints"
                  for n in (1, 2))
    folder = shutil.copytree(other / "step-00000001", out / "step-00000001")
    index = folder / "index.json"
    index.write_text(index.read_text().replace('"', "'", 1))
    r = place.good(1, {**SAVE, "run.steps": 3}, ["--resume"], output=out.parent)
    assert r.saved == [1, 3] and index.exists(), str(r)


# ---- two runs, one folder ----

@pytest.mark.sanitized
def test_a_second_run_in_the_same_folder_is_refused(place):
    c = {**SAVE, "run.inject_delay_us": 5000}
    first = place.start(1, {**c, "run.steps": 10**6}, output=place.folder / "one")
    first.until(lambda: run.saved(first.output), "a checkpoint")
    r = place.launch(1, {**c, "run.steps": 9}, ["--resume"], output=first.output)
    run.refused(r, "run.output", "another run writes into", str(first.output), "goes on")
    first.signal(signal.SIGTERM)
    assert first.finish().rc == 0
    assert "nothing left" in place.good(1, {**c, "run.steps": 1}, ["--resume"],
                                        output=first.output).out


def test_a_run_that_is_about_to_end_is_waited_for(place):
    """As one that was killed while it writes to a disk."""
    out = place.good(1, {**SAVE, "run.steps": 1}).output
    with open(out / "metrics.jsonl") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        r = place.start(1, {**SAVE, "run.steps": 2}, ["--resume"], output=out)
        r.until(lambda: "waiting a few seconds" in r.text(1), "the message")
    assert r.finish().rc == 0 and run.saved(out) == [2]


def test_what_another_run_saves_meanwhile_is_not_written_over(place):
    saved = place.good(1, {**SAVE, "run.steps": 1}).output / "checkpoints"
    out = place.folder / "late"
    out.mkdir()
    with open(out / "metrics.jsonl", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        r = place.start(1, {**SAVE, "run.steps": 2}, output=out)
        r.until(lambda: "waiting a few seconds" in r.text(1), "the message")
        shutil.copytree(saved, out / "checkpoints")
    run.refused(r.finish(), "run.output", str(out), "holds a checkpoint of step 1")


# ---- lines ----

@pytest.mark.sanitized
def test_a_torn_line_swallows_no_other(place):
    out = place.good(1, {**SAVE, "run.steps": 1}).output
    with open(out / "metrics.jsonl", "a") as f:
        f.write('{"step": 4, "lo')
    place.count -= 1
    path = place.config({**SAVE, "run.steps": 2}, out)
    r = run.call(place.program, path, "--resume")
    assert r.rc == 0, str(r)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert lines.count('{"step": 4, "lo') == 1
    lines.remove('{"step": 4, "lo')
    assert [x["step"] for x in map(json.loads, lines) if "loss" in x] == [1, 2]


@pytest.mark.parametrize("reader", ("full", "gone"))
def test_a_standard_output_that_takes_nothing_costs_no_step(reader, place):
    path = place.config({**SAVE, "run.inject_delay_us": 5000})
    line = f'"{place.program}" "{path}"' + (
        " >/dev/full" if reader == "full" else " | true")
    r = run.call("bash", "-o", "pipefail", "-c", line)
    assert r.rc == 0 and "standard output were lost" in r.err, str(r)
    assert run.saved(place.folder / "out1") == [3]


@pytest.mark.parametrize("steps", (1, 20))  # tasks wait in a buffer until the end
def test_each_file_that_loses_lines_is_named_once(steps, place):
    path = place.config({"run.task_log": True, "run.steps": steps, "model.layers": 1})
    out = place.folder / "out1"
    out.mkdir()
    for name in ("metrics", "tasks"):
        (out / f"{name}.jsonl").symlink_to("/dev/full")
    r = run.call(place.program, path)
    assert r.rc == 0, str(r)
    for name in ("metrics", "tasks"):
        words = f"out1/{name}.jsonl: No space left on device: lines are being lost"
        assert r.err.count(words) == 1, str(r)


def test_metrics_that_are_removed_are_missed(place):
    r = place.start(1, {"run.steps": 10**6, "run.inject_delay_us": 5000})
    r.until_step(1)
    (r.output / "metrics.jsonl").unlink()
    r.signal(signal.SIGTERM)
    assert "metrics.jsonl was removed during the run" in r.finish().err


# ---- ends ----

def test_a_start_that_was_killed_is_in_no_ones_way(place):
    """What the ranks look for to see whether they share the folder."""
    c = {**SAVE, "train_batch_size": 2}
    out = place.good(2, {**c, "run.steps": 1}).output
    run_id, = (json.loads(p.read_text())["run"]
               for p in (out / "checkpoints").glob("*/index.json"))
    (out / f"shared-{run_id}").touch()
    assert place.good(2, {**c, "run.steps": 2}, ["--resume"], output=out).saved == [2]
    assert not list(out.glob("shared-*"))


@pytest.mark.sanitized
def test_resume_of_what_was_exported_says_so(place):
    c = {**SAVE, "run.export": str(place.folder / "x")}
    out = place.good(1, c).output
    before = (place.folder / "x/model.safetensors").stat().st_mtime_ns
    r = place.good(1, c, ["--resume"], output=out)
    assert "x is there already, and stays as it is" in r.out
    assert before == (place.folder / "x/model.safetensors").stat().st_mtime_ns


@pytest.mark.sanitized
def test_a_data_file_that_is_cut_ends_the_run_with_a_message(place):
    data = place.folder / "cut"
    data.write_bytes(place.data.read_bytes())
    run_ = place.start(1, {"run.steps": 10**6, "run.inject_delay_us": 5000,
                           "data.path": str(data)})
    run_.until_step(1)
    os.truncate(data, 0)
    r = run_.finish()
    run.refused(r, "data.path", "was cut")


def test_a_checkpoint_beyond_the_limit_of_files_is_a_message(place):
    path = place.config({**SAVE, "model.width": 192})
    r = run.call("bash", "-c", f'ulimit -f 8000; exec "{place.program}" "{path}"')
    assert r.rc == 1 and "File too large" in r.err, str(r)
    assert not run.DUMPS.search(r.err)


def test_a_signal_ends_a_text_that_is_generated(place):
    run_ = place.start(1, {"run.sample_tokens": 10**8, "run.sample_prompt": "a"})
    run_.until_step(3)
    run_.signal(signal.SIGTERM)
    r = run_.finish()
    assert r.rc == 0 and run.sampled(r).startswith("a"), str(r)
