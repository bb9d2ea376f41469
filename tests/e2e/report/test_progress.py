# SPDX-License-Identifier: Apache-2.0
"""Work on many bytes says how far it is: a line from time to time, or on a terminal
one that changes and is gone at the end."""
import os
import re

import run
from inputs import shard

LINE = re.compile(r"^(.+): (\d+) of (\d+) MiB  (\d+) %  \d+ MiB/s  \d+ s left$",
                  re.M)
# 4.8 million parameters: several pieces of each job.
LARGE = {"model.width": 256, "model.heads": 4, "model.layers": 6,
         "run.steps": 1, "run.save": True, "run.hash": False}


def jobs(text):
    """{job: its percentages}"""
    found = {}
    for what, done, total, percent in LINE.findall(text):
        assert int(done) <= int(total)
        found.setdefault(what, []).append(int(percent))
    for what, percents in found.items():
        assert percents == sorted(percents), what
        assert percents[-1] == 100, what
    return found


def test_set_up_save_load_import_export(place):
    often = {"IZ_PROGRESS": "0"}
    folder = str(place.folder / "hf")
    r = place.good(2, {**LARGE, "run.export": folder}, env=often)
    assert set(jobs(r.err)) == {"initial weights", "saving", "exporting"}
    output = r.output
    r = place.good(2, {**LARGE, "run.steps": 2}, ["--resume"], output=output,
                   env=often)
    assert set(jobs(r.err)) == {"checking the checkpoint",
                                "loading the checkpoint", "saving"}
    r = place.good(1, {**LARGE, "model": {"import": folder, "seq": 16}}, env=often)
    assert set(jobs(r.err)) == {"importing", "saving"}
    r = run.ckpt("verify", output, "--step", 2, env=often)
    assert "intact" in r.out
    assert set(jobs(r.err)) == {"checking the checkpoint"}, "all is read once"
    assert not LINE.search(r.out), "results stay clean"


def test_tokens_that_are_checked_and_memory_that_is_locked(place):
    path = shard(place.folder / "tokens.bin", [t % 256 for t in range(300000)])
    r = place.good(1, {"run.steps": 1, "run.save": False, "data.bytes": False,
                       "data.path": str(path), "zero_optimization": {
                           "stage": 3, "offload_optimizer": {
                               "device": "cpu", "pin_memory": True}}},
                   env={"IZ_PROGRESS": "0"})
    assert {"checking the tokens", "locking memory"} <= set(jobs(r.err))


def test_short_work_says_nothing(place):
    """On a terminal or not."""
    for terminal in (False, True):
        line = place.command(1, place.config({"run.steps": 1, "run.save": True}))
        r = run.call(*(["script", "-qec", " ".join(line), os.devnull] if terminal else line),
                     env={"IZ_PLAIN": None})
        assert r.rc == 0 and "MiB/s" not in r.out + r.err, str(r)
