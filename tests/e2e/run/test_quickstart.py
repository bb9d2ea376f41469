# SPDX-License-Identifier: Apache-2.0
"""tools/quickstart in a tree of its own, with a small config and nothing to set up."""
import contextlib
import json
import os
import shutil
import signal

import pytest

import run

FOREVER = {"train_batch_size": 2, "run.save": True, "run.steps": 10**6,
           "run.inject_delay_us": 5000}


@pytest.fixture
def tree(place):
    to = place.folder / "tree"
    for folder in ("tools", "configs", "data", "build/models"):
        (to / folder).mkdir(parents=True)
    shutil.copy(run.ROOT / "tools/quickstart", to / "tools")
    (to / "tools/setup").write_text("#!/bin/sh\n")
    (to / "tools/setup").chmod(0o755)
    (to / "data/english.txt").symlink_to(place.data)
    (to / "build/models/gpt2").symlink_to(run.PROGRAM)
    return to


def test_the_newest_run_is_that_of_the_highest_number(tree, place):
    """Lower ones may be gone, and all lie elsewhere."""
    config = place.config({"train_batch_size": 2, "run.save": True, "run.steps": 2})
    text = json.loads(config.read_text())
    del text["run"]["output"]
    (tree / "configs/quickstart.json").write_text(json.dumps(text))
    (tree / "elsewhere").mkdir()
    (tree / "runs").symlink_to("elsewhere")
    for name in ("quickstart-9", "quickstart-10", "quickstart-x"):
        (tree / "runs" / name).mkdir()
    for options in ((), ("--resume", "--steps", "3")):
        r = run.call(tree / "tools/quickstart", *options)
        assert r.rc == 0 and "output runs/quickstart-11" in r.out, str(r)
    assert "\nresume: " in r.out or r.out.startswith("resume: ")


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGHUP))
def test_a_signal_reaches_the_ranks_and_they_save(number, tree, place):
    """As Ctrl-C does, which what runs in the background may be made to ignore."""
    output = place.folder / "out"
    config = place.config(FOREVER, output)
    shutil.copy(config, tree / "configs/quickstart.json")
    # a signal that those who start tests ignore, no shell can catch
    line = ["env", "--default-signal=HUP", str(tree / "tools/quickstart")]
    run_ = run.Run([*line, "--set", f"run.output={output}"], config)
    run_.until_step(1)
    launcher = run.children(run_.process.pid)
    run_.process.send_signal(number)
    try:
        r = run_.finish()
    finally:  # it has a session of its own
        for pid in launcher:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert r.rc == 0 and r.saved, str(r)
    assert r.summary["reason"] == "interrupted" and "run:  2 ranks" in r.out
