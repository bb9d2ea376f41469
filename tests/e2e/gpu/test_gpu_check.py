# SPDX-License-Identifier: Apache-2.0
"""tools/gpu-check on the stand-in: both calls with a few cases, what it leaves where nothing
can run, without time and when it is ended, and a pack."""
import collections
import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import pytest

import run

sys.path.insert(0, str(run.ROOT / "tools"))
from checking import machine, small, training  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("IZ_TEST_GPU") != "standin",
                                reason="needs the stand-in for a GPU")
SMALL = "gpt2 fp32,stage 0,gpt2 bf16,text of 256,on nvme,resumed,4 ranks fp32,gpt2 pairs"


def check(folder, *more, env=None, at=run.ROOT, build=("--build", run.BUILD), until=None):
    """Status, text and the results that it left, the last of each name.  It is ended when
    there is what `until` looks for."""
    p = subprocess.Popen([sys.executable, at / "tools/gpu-check", *build, "--tiny", "--limit",
                          "1800", "--out", "out", *map(str, more)], cwd=folder, text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                         env={**os.environ, **(env or {})})
    if until:
        while not until() and p.poll() is None:
            time.sleep(0.02)
        p.send_signal(signal.SIGTERM)
    text = p.communicate(timeout=1800)[0]
    return p.returncode, text, results(folder)


def results(folder):
    """A last line may be half written."""
    path = folder / "out/results.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.is_file() else []
    return {x["name"]: x for x in map(json.loads, lines)}


def tool(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def ahead(folder, **more):
    """With a folder's tools in place of others."""
    return {"PATH": f"{folder}:{os.environ['PATH']}", **more}


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    path = tmp_path_factory.mktemp("losses") / "losses.json"
    status, text, _ = check(path.parent, "--call", "0", "--losses", path, "--only", SMALL)
    assert status == 0, text
    return path


@pytest.mark.parametrize("row, losses, want, words", [
    ("gpt2 fp32", [5.0] * 6, [5.0] * 6, "passed bound"),
    ("gpt2 fp32", [5.0] * 6, [5.0] * 5 + [5.1], "failed bound"),
    ("gpt2 fp32", [5.0] * 5 + ["nan"], [5.0] * 6, "failed bound"),
    ("gpt2 fp32", [5.0] * 6, [5.0] * 2, "failed L has no"),
    ("gpt2 fp32", [5.0] * 6, None, "failed L has no"),
    ("gpt2 fp32", [5.0] * 5, [5.0] * 6, "failed exit 0, 5 steps"),
    ("moe fp32", [5.0] * 6, [5.00001] * 6, "failed bound 1e-06"),
    ("moe fp16", [5.0] * 6, [5.001] * 6, "passed bound 2e-03")])
def test_losses_are_judged(row, losses, want, words, tmp_path):
    folder = tmp_path / row.replace(" ", "-")
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(
        json.dumps({"step": i, "loss": x, "grad_norm": 1}) + "\n"
        for i, x in enumerate(losses)))
    c = types.SimpleNamespace(folder=tmp_path, o=types.SimpleNamespace(losses="L"))
    status, _, why = small.judged(c, small.TABLE[row], 0, "", want, {})
    assert f"{status} {why}".startswith(words)


def tools(folder, **more):
    """The environment with scripts instead of NVIDIA's tools."""
    for name, text in (
            ("compute-sanitizer", 'while [ "${1#-}" != "$1" ]; do shift 2; done\nexec "$@"'),
            ("ncu", 'while [ "${1#-}" != "$1" ]; do [ "$1" != --csv ] || shift\n'
                    '[ "$1" != --log-file ] || echo "==ERROR== $NCU_SAYS" >"$2"\nshift\n'
                    '[ "${1#-}" != "$1" ] || [ -x "$1" ] || shift; done\nexec "$@"'),
            ("nvidia-smi", 'case "$*" in --id=1*-lms*) while sleep 0.05; do date +"%Y/%m/%d '
                           '%T.000, 1755 MHz, 640.5 W, 50, 0x0"; done;; '
                           '*) echo NVIDIA H100 80GB HBM3;; esac')):
        tool(folder / name, text)
    return ahead(folder, CUDA_VISIBLE_DEVICES="1,0", **more)


def test_both_calls_with_a_few_cases(tmp_path, losses):
    first = f"{SMALL},facts,memory,quant,1.5B resident"
    env = tools(tmp_path)
    status, text, found = check(tmp_path, "--call", "1", "--losses", losses, "--only", first,
                                env=env)
    assert status == 0, text
    row = found["1.5B resident"]
    assert row["clock_mhz"] == 1755 and row["power_w"] == 640.5
    assert row["device_gib"] > 0 and "% MFU" in text and "limited by: " in text
    for name in ("stage 0", "full, boundaries on nvme", "resumed"):
        assert found[f"gpt2 {name}"]["losses"] == found["gpt2 bf16"]["losses"]
    log = (tmp_path / "out/log.txt").read_text()
    assert all(x in log for x in ("exported step 6", "4 ranks;", "dpo")), log
    with gzip.open(tmp_path / "out/tasks-1-5B-resident.jsonl.gz", "rt") as f:
        assert json.loads(f.readline())
    assert "#### quant, exit 0" in log
    # the second goes on with the folder of the first
    status, text, more = check(tmp_path, "--call", "2", "--only",
                               "memcheck,kernels,Muon,2 ranks", env=env)
    assert status == 0, text
    assert set(more) - set(found) == {"memcheck", "memcheck of experts", "kernels",
                                      "1.5B Muon", "124M, 2 ranks on one GPU"}
    assert {x["status"] for x in more.values()} == {"passed"}
    # wrong losses and texts are seen; what passed is not run again
    wrong = tmp_path / "wrong.json"
    wrong.write_text(losses.read_text().replace("5.", "5.1").replace("said", "sang"))
    (tmp_path / "out/results.jsonl").write_text(
        json.dumps(found["facts"]) + '\n{"part": "sm')  # a kill cut it
    status, text, found = check(tmp_path, "--call", "1", "--losses", wrong, "--only",
                                "gpt2 fp32,text of 256,facts")
    assert status == 1 and found["gpt2 fp32"]["status"] == "failed", text
    assert re.search(r"text of 256 +failed .*generated \[.* said .*CPU \[.* sang ", text), text
    assert text.count("facts") == 0


@pytest.mark.parametrize("line, skipped", [
    ("run.gpu_attention: cudnn: libcudnn.so.9: cannot open shared object file; use own", True),
    ("nvme: /tmp/x: the file system has no O_DIRECT (tmpfs?)", True),
    ("bf16.enabled: true: needs compute capability 8.0, the GPU has 7.5", True),
    ("attention: cuDNN 9.19.0: CUDNN_STATUS_EXECUTION_FAILED", False)])
def test_what_a_machine_lacks_is_skipped_and_what_breaks_is_not(line, skipped):
    assert bool(small.refused(f"step 1\nizar: {line}\n")) is skipped


def test_without_a_gpu_memory_or_time_it_says_so(tmp_path):
    status, text, found = check(tmp_path, "--call", "1", env={"IZ_STANDIN_DEVICES": "0"})
    assert status == 2 and "no GPU: " in text and not found
    for call in "20":
        status, text, found = check(tmp_path, "--call", call, "--only", "more training,7b")
        assert status == 2 and "no case of this call has one of these words" in text
    status, text, found = check(tmp_path, "--call", "1", "--only", "1.5B resident",
                                env={"IZ_STANDIN_MEM_MB": "48"})
    assert status == 0 and re.search(r"resident +skipped .* izar: this run needs", text), text
    status, text, found = check(tmp_path, "--call", "2", "--limit", "0")
    assert status == 3 and re.search(  # in this order: what no GPU has run, what ran
        "out: training: 14B 128K\n(.*\n)*.*training: 1.5B Muon\n(.*\n)*.*peers", text), text
    assert {x["status"] for x in found.values()} == {"passed", "skipped"}


def test_what_would_be_cut_off_is_not_begun(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(training, "python_with", lambda *_: sys.executable)
    c = types.SimpleNamespace(
        o=types.SimpleNamespace(tiny=False), out=tmp_path, folder=tmp_path, env={},
        programs=collections.defaultdict(str), left=lambda: 25, todo=lambda _, names: names,
        run=lambda jobs, *_: begun.extend(j.name for j in jobs) or ())
    machine.calibrate(c)
    c.run(training.adam_job(c))
    training.peers(c)
    training.second(c)
    assert begun == ["1.5B Muon"]


def test_a_peer_that_cannot_be_imported_says_why(tmp_path):
    tool(tmp_path / "torch/__init__.py", "").write_text("raise ImportError('no libcudart')")
    status, text, found = check(tmp_path, "--call", "2", "--only", "compile",
                                env={"PYTHONPATH": str(tmp_path)})
    assert status == 1 and "ImportError: no libcudart" in text


def test_counters_that_it_may_not_read_are_skipped(tmp_path):
    env = tools(tmp_path, NCU_SAYS="ERR_NVGPUCTRPERM - The user does not have it")
    status, text, found = check(tmp_path, "--call", "2", "--only", "kernels", env=env)
    assert status == 0 and found["kernels"]["status"] == "skipped", text
    assert "ERR_NVGPUCTRPERM" in text


def test_libraries_of_the_cuda_that_programs_have_are_looked_for(tmp_path, monkeypatch):
    tool(tmp_path / "ldd", "echo libcudart.so.12 '=>' /somewhere")
    for version in "23":
        tool(tmp_path / version / f"libcublasLt.so.1{version}", "")
    monkeypatch.setenv("PATH", ahead(tmp_path)["PATH"])
    monkeypatch.setattr(machine, "CUDA_DIRS", [str(tmp_path / x) for x in "23"])
    path = machine.environment(["gpt2"], tmp_path)["LD_LIBRARY_PATH"].split(":")
    assert str(tmp_path / "2") in path and str(tmp_path / "3") not in path


def test_what_there_is_stays_when_it_is_ended(tmp_path):
    status, text, found = check(tmp_path, "--call", "1", "--only", "facts,gpt2",
                                until=lambda: len(results(tmp_path)) > 1)
    assert status == 1 and "stopped by SIGTERM" in text
    assert found["facts"]["status"] == "passed" and "left out: small: gpt2" in text


def test_a_signal_before_the_first_case_is_told(tmp_path):
    asked = tmp_path / "asked"
    tool(tmp_path / "nvidia-smi", f"touch {asked}\nexec sleep 100")
    status, text, _ = check(tmp_path, "--call", "1", "--only", "facts", env=ahead(tmp_path),
                            until=asked.is_file)
    assert status == 1 and "stopped by SIGTERM" in text


def pack(tmp_path, where, *more):
    p = subprocess.run([run.ROOT / "tools/gpu-check", "--pack", where, "--build", run.BUILD,
                        *more], cwd=tmp_path, capture_output=True, text=True, timeout=600,
                       env={**os.environ, **ahead(tmp_path)})
    return p.returncode, p.stdout + p.stderr


def test_a_checkout_is_no_pack(tmp_path):
    """A pack of before is replaced, and what is none stays."""
    script = tool(tmp_path / "tools/gpu-check", "")
    tool(tmp_path / "patchelf", "")
    status, text = pack(tmp_path, ".")
    assert status == 2 and "is no pack" in text and script.is_file()


def test_a_pack_runs_alone(tmp_path):
    if not (shutil.which("patchelf") and shutil.which("xz")):
        pytest.skip("needs patchelf and xz")
    as_it_is = tool(tmp_path / "xz", "exec cat")
    status, text = pack(tmp_path, "pack", "--only", "gpt2 fp32")
    assert status == 2 and "too large: " in text, text
    as_it_is.unlink()
    status, text = pack(tmp_path, "pack", "--only", "gpt2 fp32")
    assert status == 0, text
    shutil.rmtree(tmp_path / "pack")
    libraries = subprocess.run(["ldd", run.PROGRAM], capture_output=True, text=True)
    cuda = ":".join({os.path.dirname(x) for x in re.findall(
        r"lib(?:cu|nccl)\S* => (\S+)", libraries.stdout)})  # those of the machine
    subprocess.run([sys.executable, "-m", "tarfile", "-e", "pack.tar.xz"], cwd=tmp_path,
                   check=True, timeout=600)
    status, text, found = check(
        tmp_path, "--call", "1", "--only", "gpt2 fp32,quant,1.5B as shipped",
        env={"LD_LIBRARY_PATH": cuda}, at=tmp_path / "pack", build=())
    assert status == 0, text
    assert len(found) == 3 and "1.5B as shipped" in found
    log = (tmp_path / "out/log.txt").read_text()
    assert "pmix" not in log and "does not exist" not in log
