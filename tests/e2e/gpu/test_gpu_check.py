# SPDX-License-Identifier: Apache-2.0
"""tools/gpu-check on the stand-in: what it leaves where nothing can run, where a folder
is no disk, where there is no time, and when it is ended or killed in the middle."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

import run
from conftest import takes_direct_io

pytestmark = pytest.mark.skipif(os.environ.get("IZ_TEST_GPU") != "standin",
                                reason="needs the stand-in for a GPU")


def line_of(*more):
    return [sys.executable, run.ROOT / "tools/gpu-check", "--build", run.BUILD, "--tiny",
            "--quick", "--limit", "1800", "--out", "gpu.json", *map(str, more)]


def check(folder, *more, env=None):
    """Status, text and the JSON."""
    p = subprocess.run(line_of(*more), cwd=folder, capture_output=True, text=True,
                       env={**os.environ, **(env or {})}, timeout=1800)
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
        subprocess.run(["umount", "--lazy", folder], check=True)


def all_placements(folder, *more, env=None):
    """Without --quick, of which the rows on nvme are no part."""
    line = [x for x in line_of("--phases", "equal", *more) if x != "--quick"]
    p = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=1800,
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
    end = time.monotonic() + 600
    while not rows.is_file() and p.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    p.send_signal(signal.SIGTERM)
    text, _ = p.communicate(timeout=300)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert p.returncode == 1 and "stopped by SIGTERM" in text
    assert found["phases"]["near"]["status"] == "passed"
    assert found["phases"]["train"]["status"] == "stopped"
    assert json.loads(rows.read_text())["rows"][0]["result"] == "ok"
    assert "1.5b" in text, "rows are shown as they come"
    assert "#### train" in (tmp_path / "gpu.log").read_text()


def tool(folder, name, text):
    """The environment with a script instead of a tool."""
    path = folder / name
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def sanitizer(folder):
    return tool(folder, "compute-sanitizer",
                'while [ "${1#--}" != "$1" ]; do shift 2; done\nexec "$@"\n')


def test_a_debugger_is_given_a_small_yardstick(tmp_path):
    _, text, found = check(tmp_path, "--phases", "sanitize", env=sanitizer(tmp_path))
    sanitize = found["phases"]["sanitize"]["parts"]
    assert sanitize["racecheck of a run"]["status"] == "passed", text
    log = (tmp_path / "gpu.log").read_text()
    assert log.count("in GEMM of 256 cubed, cool") >= 2


PHASES = ("ops", "bench", "equal", "near", "train", "matrix", "sanitize")


def test_no_phase_fails_for_lack_of_time(tmp_path):
    status, text, found = check(tmp_path, "--limit", "0", env=sanitizer(tmp_path))
    assert status == 3, text
    assert tuple(found["phases"]) == PHASES
    assert {r["status"] for r in found["phases"].values()} == {"not finished"}
    assert text.count("left out: ") == len(PHASES)
    assert "go on with: --resume gpu.json" in text


def gpu(folder, name):
    return tool(folder, "nvidia-smi", "echo " + ", ".join((
        name, "580.1", "143771 MiB", "0 MiB", "1", "5", "16", "00000000:FE:1F.7")) + "\n")


def test_results_of_another_gpu_are_not_gone_on_with(tmp_path):
    status, text, found = check(tmp_path, "--limit", "0", "--phases", "ops",
                                env=gpu(tmp_path, "GPU A"))
    assert status == 3, text
    assert "pcie.link.gen.max 5" in text and "NUMA node unknown" in text
    assert found["machine"]["card"]["name"] == "GPU A"
    assert all(x in text for x in ("MemTotal ", "MemAvailable ", "Model name:"))
    status, text, _ = check(tmp_path, "--resume", "gpu.json", "--limit", "0",
                            env=gpu(tmp_path, "GPU B"))
    assert status == 2 and "it is of 'GPU A', this GPU is 'GPU B'" in text, text


def test_only_results_of_a_check_are_gone_on_with(tmp_path):
    (tmp_path / "gpu.json").write_text('{"tiny": false, "phases": {}}')
    for name, why in (("gpu.json", "it is not of --tiny"), ("none.json", "no results: ")):
        p = subprocess.run([*line_of(), "--resume", name], cwd=tmp_path, text=True,
                           capture_output=True, timeout=300)
        assert p.returncode == 2 and f"--resume {name}: {why}" in p.stderr, p.stderr


def test_rows_are_kept_where_only_the_one_file_is_carried(tmp_path):
    row = {"name": "1.5b ZeRO-3 offload, 16 samples", "model": "1.5b", "mode": "m",
           "more": {}, "layers": 1, "of_layers": 1, "tokens": 1, "result": "failed",
           "tail": "as it was"}
    (tmp_path / "old.json").write_text(json.dumps({"tiny": True, "phases": {"train": {
        "status": "not finished", "left_out": ["x"], "seconds": 1,
        "result": {"rows": [row]}}}}))
    status, text, found = check(tmp_path, "--resume", "old.json", "--phases", "train")
    train = found["phases"]["train"]
    rows = train["result"]["rows"]
    assert status == 1 and train["status"] == "failed", text
    assert rows[0] == row and {r["result"] for r in rows[1:]} == {"ok"}
    assert len({r["name"] for r in rows}) == len(rows) > 3


def parts(out):
    """{(phase, part): result} of all that has one."""
    known, phases = {}, json.loads(out.read_text())["phases"]
    for name, key in (("ops", "groups"), ("near", "parts"), ("sanitize", "parts")):
        known.update({(name, n): x for n, x in phases.get(name, {}).get(key, {}).items()})
    for dtype, row in phases.get("equal", {}).get("placements", {}).items():
        known.update({("equal", f"{dtype} {n}"): x for n, x in row.items()})
    known.update({("matrix", n): x
                  for n, x in phases.get("matrix", {}).get("tests", {}).items()})
    for name, key, what in (("bench", "ops", ("model", "tokens", "op")),
                            ("train", "rows", ("name",))):
        path = out.with_name(f"{out.stem}-{name}.json")
        rows = json.loads(path.read_text())[key] if path.is_file() else []
        new = {(name, *(r[w] for w in what)): r for r in rows}
        assert len(new) == len(rows), "a row is there twice"
        known.update(new)
    return known


def kill_in(phase, p, out):
    """Kills the tool once the phase has a result.  Returns all that it left."""
    end = time.monotonic() + 600
    while p.poll() is None and time.monotonic() < end:
        if out.is_file() and any(k[0] == phase for k in parts(out)):
            break
        time.sleep(0.02)
    p.kill()
    text = p.communicate(timeout=300)[0]
    assert p.returncode == -signal.SIGKILL or phase == PHASES[-1], f"{phase}:\n{text}"
    return parts(out)


def test_killed_in_every_phase_it_loses_and_repeats_nothing(tmp_path):
    env = {**os.environ, **sanitizer(tmp_path)}
    out, known, more = tmp_path / "gpu.json", {}, []
    line = [x for x in line_of() if x != "--quick"]
    for phase in PHASES:
        with subprocess.Popen([*line, *more], cwd=tmp_path, env=env, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as p:
            left = kill_in(phase, p, out)
        assert {k: left.get(k) for k in known} == known, f"lost in {phase}"
        known, more = left, ["--resume", "gpu.json"]
    # the rest elsewhere, with the files carried there
    there = tmp_path / "there"
    there.mkdir()
    p = subprocess.run([*line, "--resume", "../gpu.json"], cwd=there, env=env, text=True,
                       capture_output=True, timeout=1800)
    assert p.returncode == 0, p.stdout + p.stderr
    end = parts(there / "gpu.json")
    assert {k: end.get(k) for k in known} == known
    phases = json.loads((there / "gpu.json").read_text())["phases"]
    assert {r["status"] for r in phases.values()} == {"passed"}
    log = out.with_suffix(".log").read_text() + (there / "gpu.log").read_text()
    for phase, name in (k[:2] for k in known if k[0] in ("ops", "equal")):
        assert log.count(f"\n#### {phase} {name}, exit 0") == 1, name


def test_a_pack_runs_where_there_is_no_xz(tmp_path):
    if not shutil.which("patchelf"):
        pytest.skip("needs patchelf")
    p = subprocess.run([run.ROOT / "tools/gpu-check", "--pack", tmp_path / "pack",
                        "--build", run.BUILD], capture_output=True, text=True,
                       timeout=600)
    assert p.returncode == 0, p.stdout + p.stderr
    shutil.rmtree(tmp_path / "pack")
    libraries = subprocess.run(["ldd", run.PROGRAM], capture_output=True, text=True)
    cuda = ":".join({os.path.dirname(x) for x in re.findall(
        r"lib(?:cu|nccl)\S* => (\S+)", libraries.stdout)})  # those of the machine
    there = tmp_path / "there"
    there.mkdir()
    subprocess.run([sys.executable, "-m", "tarfile", "-e", "../pack.tar.gz"], cwd=there,
                   check=True, timeout=600)
    p = subprocess.run([sys.executable, there / "pack/tools/gpu-check", "--tiny", "--quick",
                        "--limit", "1800", "--phases",
                        "ops,bench,train"], cwd=there, capture_output=True, text=True,
                       timeout=1800, env={**os.environ, "LD_LIBRARY_PATH": cuda})
    assert p.returncode == 0, p.stdout + p.stderr
    found = json.loads((there / "gpu-check.json").read_text())["phases"]
    assert {r["status"] for r in found.values()} == {"passed"}
