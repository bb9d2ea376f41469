# SPDX-License-Identifier: Apache-2.0
"""tools/gpu-check on the stand-in: what it leaves where nothing can run, where a folder
is no disk, and when it is ended in the middle."""
import json
import os
import signal
import subprocess
import time

import pytest

import run
from conftest import takes_direct_io

pytestmark = pytest.mark.skipif(os.environ.get("IZ_TEST_GPU") != "standin",
                                reason="needs the stand-in for a GPU")


def line_of(*more):
    return [run.ROOT / "tools/gpu-check", "--build", run.BUILD, "--tiny", "--quick",
            "--out", "gpu.json", *map(str, more)]


def check(folder, *more, env=None):
    """Status, text and the JSON."""
    p = subprocess.run(line_of(*more), cwd=folder, capture_output=True, text=True,
                       env={**os.environ, **(env or {})}, timeout=600)
    return p.returncode, p.stdout + p.stderr, json.loads(
        (folder / "gpu.json").read_text())


def test_without_a_gpu_it_says_so_at_once(tmp_path):
    status, text, found = check(tmp_path, env={"IZ_STANDIN_DEVICES": "0"})
    assert status == 2 and "no GPU to run on: " in text, text
    assert found["phases"] == {} and "no GPU to run on" in found["why"]


def test_a_folder_named_for_nvme_that_is_none_is_refused(tmp_path):
    status, text, _ = check(tmp_path, "--phases", "equal", "--nvme", tmp_path / "none")
    assert status == 2 and "/none: No such file or directory" in text, text


def placements(found):
    rows = found["phases"]["equal"]["placements"]
    return {name: x for row in rows.values() for name, x in row.items()}


@pytest.fixture
def memory(tmp_path):
    """A folder without O_DIRECT: tmpfs has it on newer kernels."""
    folder = tmp_path / "memory"
    folder.mkdir()
    p = subprocess.run(["mount", "-t", "ramfs", "ramfs", folder], capture_output=True)
    if p.returncode:
        pytest.skip("needs the right to mount")
    try:
        assert not takes_direct_io(folder)
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def all_placements(folder, *more, env=None):
    """Without --quick, of which the rows on nvme are no part."""
    line = [x for x in line_of("--phases", "equal", *more) if x != "--quick"]
    p = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=900,
                       env={**os.environ, **(env or {})})
    return p, json.loads((folder / "gpu.json").read_text())


def test_placements_on_nvme_are_skipped_where_there_is_no_disk(memory, workplace):
    p, found = all_placements(memory, env={"TMPDIR": str(memory)})
    assert p.returncode == 0, p.stdout + p.stderr
    equal = found["phases"]["equal"]
    rows = placements(found)
    on_disk = {n: x for n, x in rows.items() if "nvme" in n}
    assert len(on_disk) == 2
    # the program looks for space first, and the file system tells of none
    assert all(x.startswith(f"skipped: {memory}") for x in on_disk.values()), on_disk
    assert {x for n, x in rows.items() if n not in on_disk} == {"same"}
    assert "2 placements on nvme skipped" in equal["why"]
    assert p.stdout.count(f"skipped: {memory}") == 2
    # and run in a folder that is named
    p, found = all_placements(memory, "--nvme", workplace, env={"TMPDIR": str(memory)})
    assert p.returncode == 0, p.stdout + p.stderr
    assert set(placements(found).values()) == {"same"}


def test_what_there_is_stays_when_it_is_ended(tmp_path):
    p = subprocess.Popen(line_of("--phases", "near,train"), cwd=tmp_path,
                         stdout=subprocess.PIPE, text=True)
    rows = tmp_path / "gpu-train.json"
    end = time.monotonic() + 300
    while not rows.is_file() and p.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    p.send_signal(signal.SIGTERM)
    text, _ = p.communicate(timeout=60)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert p.returncode == 1 and "stopped by SIGTERM" in text
    assert found["phases"]["near"]["status"] == "passed"
    assert found["phases"]["train"]["status"] == "stopped"
    assert json.loads(rows.read_text())["rows"][0]["result"] == "ok"
    assert "1.5b" in text, "rows are shown as they come"
    assert "#### train" in (tmp_path / "gpu.log").read_text()


def test_a_debugger_is_given_a_small_yardstick(tmp_path):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\nwhile [ "${1#--}" != "$1" ]; do shift 2; done\n'
                    'exec "$@"\n')
    tool.chmod(0o755)
    _, text, found = check(tmp_path, "--phases", "sanitize", "--limit", "60",
                           env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    sanitize = found["phases"]["sanitize"]
    assert sanitize["racecheck of a run"]["status"] == "passed", text
    log = (tmp_path / "gpu.log").read_text()
    assert log.count("in GEMM of 256 cubed") >= 2
