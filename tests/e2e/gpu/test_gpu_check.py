# SPDX-License-Identifier: Apache-2.0
"""tools/gpu-check on the stand-in: both calls with a few cases, what it leaves where nothing
can run, without time and when it is ended, and a pack."""
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
from checking import machine, small  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("IZ_TEST_GPU") != "standin",
                                reason="needs the stand-in for a GPU")
SMALL = "gpt2 fp32,stage 0,gpt2 bf16,text of 256"


def check(folder, *more, env=None, at=run.ROOT, build=("--build", run.BUILD)):
    """Status, text and the results that it left, the last of each name."""
    p = subprocess.run([sys.executable, at / "tools/gpu-check", *build, "--tiny", "--limit",
                        "1800", "--out", "out", *map(str, more)], cwd=folder, text=True,
                       capture_output=True, env={**os.environ, **(env or {})}, timeout=1800)
    return p.returncode, p.stdout + p.stderr, results(folder / "out")


def results(out):
    path = out / "results.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return {x["name"]: x for x in map(json.loads, lines)}


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    path = tmp_path_factory.mktemp("losses") / "losses.json"
    status, text, _ = check(path.parent, "--call", "0", "--losses", path, "--only", SMALL)
    assert status == 0, text
    return path


@pytest.mark.parametrize("losses, want, words", [
    ([5.0] * 6, [5.0] * 6, "passed bound"), ([5.0] * 6, [5.0] * 5 + [5.1], "failed bound"),
    ([5.0] * 5 + ["nan"], [5.0] * 6, "failed bound"), ([5.0] * 6, [5.0] * 2, "failed L has no"),
    ([5.0] * 6, None, "failed L has no"), ([5.0] * 5, [5.0] * 6, "failed exit 0, 5 steps")])
def test_losses_are_judged(losses, want, words, tmp_path):
    (tmp_path / "gpt2-fp32").mkdir()
    (tmp_path / "gpt2-fp32/metrics.jsonl").write_text("".join(
        json.dumps({"step": i, "loss": x, "grad_norm": 1}) + "\n"
        for i, x in enumerate(losses)))
    c = types.SimpleNamespace(folder=tmp_path, o=types.SimpleNamespace(losses="L"))
    status, _, why = small.judged(c, small.TABLE["gpt2 fp32"], 0, "", want, {})
    assert f"{status} {why}".startswith(words)


def tools(folder):
    """The environment with scripts instead of NVIDIA's tools."""
    for name, text in (
            ("compute-sanitizer", 'while [ "${1#-}" != "$1" ]; do shift 2; done\nexec "$@"'),
            ("ncu", 'while [ "${1#-}" != "$1" ]; do [ "$1" != --csv ] || shift\n'
                    '[ "$1" != --log-file ] || echo "==ERROR== $NCU_SAYS" >"$2"\nshift\n'
                    '[ "${1#-}" != "$1" ] || [ -x "$1" ] || shift; done\nexec "$@"'),
            ("nvidia-smi", 'case "$*" in --id=1*-lms*) while sleep 0.05; do date +"%Y/%m/%d '
                           '%T.000, 1755 MHz, 640.5 W, 50, 0x0"; done;; '
                           '*) echo NVIDIA H100 80GB HBM3;; esac')):
        path = folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "1,0"}


def test_both_calls_with_a_few_cases(tmp_path, losses):
    first = f"{SMALL},facts,memory,quant,1.5B resident"
    env = tools(tmp_path)
    status, text, found = check(tmp_path, "--call", "1", "--losses", losses, "--only", first,
                                env=env)
    assert status == 0, text
    row = found["1.5B resident"]
    assert row["clock_mhz"] == 1755 and row["power_w"] == 640.5
    assert row["device_gib"] > 0 and "% MFU" in text and "limited by: " in text
    assert found["gpt2 stage 0"]["losses"] == found["gpt2 bf16"]["losses"]
    with gzip.open(tmp_path / "out/tasks-1-5B-resident.jsonl.gz", "rt") as f:
        assert json.loads(f.readline())
    assert "#### quant, exit 0" in (tmp_path / "out/log.txt").read_text()
    # the second goes on with the folder of the first
    status, text, more = check(tmp_path, "--call", "2", "--only",
                               "memcheck,kernels,Muon,2 ranks", env=env)
    assert status == 0, text
    assert set(more) - set(found) == {"memcheck", "kernels", "1.5B Muon",
                                      "124M, 2 ranks on one GPU"}
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
    status, text, found = check(tmp_path, "--call", "2", "--only", "more training,7b")
    assert status == 2 and "no case of this call has one of these words" in text
    status, text, found = check(tmp_path, "--call", "1", "--only", "1.5B resident",
                                env={"IZ_STANDIN_MEM_MB": "48"})
    assert status == 0 and re.search(r"resident +skipped .* izar: this run needs", text), text
    status, text, found = check(tmp_path, "--call", "2", "--limit", "0")
    assert status == 3 and "left out: training: 14B 128K" in text
    assert {x["status"] for x in found.values()} == {"passed", "skipped"}


def test_counters_that_it_may_not_read_are_skipped(tmp_path):
    env = {**tools(tmp_path), "NCU_SAYS": "ERR_NVGPUCTRPERM - The user does not have it"}
    status, text, found = check(tmp_path, "--call", "2", "--only", "kernels", env=env)
    assert status == 0 and found["kernels"]["status"] == "skipped", text
    assert "ERR_NVGPUCTRPERM" in text


def test_libraries_of_the_cuda_that_programs_have_are_looked_for(tmp_path, monkeypatch):
    for name, text in (("ldd", "#!/bin/sh\necho libcudart.so.12 '=>' /somewhere\n"),
                       ("libcublasLt.so.12", ""), ("libcublasLt.so.13", "")):
        path = tmp_path / name[-1] / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'd'}:{os.environ['PATH']}")
    monkeypatch.setattr(machine, "CUDA_DIRS", [str(tmp_path / x) for x in "23"])
    path = machine.environment(["gpt2"], tmp_path)["LD_LIBRARY_PATH"].split(":")
    assert str(tmp_path / "2") in path and str(tmp_path / "3") not in path


def test_what_there_is_stays_when_it_is_ended(tmp_path):
    p = subprocess.Popen([sys.executable, run.ROOT / "tools/gpu-check", "--build", run.BUILD,
                          "--tiny", "--call", "1", "--only", "facts,gpt2"], cwd=tmp_path,
                         stdout=subprocess.PIPE, text=True)
    out, end = tmp_path / "gpu-check", time.monotonic() + 300
    while len(results(out)) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    p.send_signal(signal.SIGTERM)
    text = p.communicate(timeout=300)[0]
    assert p.returncode == 1 and "stopped by SIGTERM" in text
    assert results(out)["facts"]["status"] == "passed"
    assert "left out: small: gpt2" in text


def test_a_signal_before_the_first_case_is_told(tmp_path):
    asked, tool = tmp_path / "asked", tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ntouch {asked}\nexec sleep 100\n")
    tool.chmod(0o755)
    p = subprocess.Popen([sys.executable, run.ROOT / "tools/gpu-check", "--build", run.BUILD,
                          "--tiny", "--call", "1", "--only", "facts"], cwd=tmp_path,
                         stdout=subprocess.PIPE, text=True,
                         env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    while not asked.is_file() and p.poll() is None:
        time.sleep(0.02)
    p.send_signal(signal.SIGTERM)
    text = p.communicate(timeout=300)[0]
    assert p.returncode == 1 and "stopped by SIGTERM" in text


def test_a_checkout_is_no_pack(tmp_path):
    """A pack of before is replaced, and what is none stays."""
    script = tmp_path / "tools/gpu-check"
    script.parent.mkdir()
    for x in (script, tmp_path / "patchelf"):
        x.write_text("#!/bin/sh\n")
        x.chmod(0o755)
    p = subprocess.run([run.ROOT / "tools/gpu-check", "--pack", ".", "--build", run.BUILD],
                       cwd=tmp_path, capture_output=True, text=True, timeout=600,
                       env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert p.returncode == 2 and "is no pack" in p.stdout and script.is_file()


def test_a_pack_runs_alone(tmp_path):
    if not shutil.which("patchelf"):
        pytest.skip("needs patchelf")
    p = subprocess.run([run.ROOT / "tools/gpu-check", "--pack", tmp_path / "pack", "--build",
                        run.BUILD, "--only", "gpt2 fp32"], capture_output=True, text=True,
                       timeout=600)
    assert p.returncode == 0, p.stdout + p.stderr
    shutil.rmtree(tmp_path / "pack")
    libraries = subprocess.run(["ldd", run.PROGRAM], capture_output=True, text=True)
    cuda = ":".join({os.path.dirname(x) for x in re.findall(
        r"lib(?:cu|nccl)\S* => (\S+)", libraries.stdout)})  # those of the machine
    subprocess.run([sys.executable, "-m", "tarfile", "-e", "pack.tar.gz"], cwd=tmp_path,
                   check=True, timeout=600)
    status, text, found = check(
        tmp_path, "--call", "1", "--only", "gpt2 fp32,quant,1.5B as shipped",
        env={"LD_LIBRARY_PATH": cuda}, at=tmp_path / "pack", build=())
    assert status == 0, text
    assert len(found) == 3 and "1.5B as shipped" in found
    log = (tmp_path / "out/log.txt").read_text()
    assert "pmix" not in log and "does not exist" not in log
