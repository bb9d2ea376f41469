# SPDX-License-Identifier: Apache-2.0
"""What a GPU may be asked for depends on its compute capability, which the
stand-in and a machine file give: fp32 and fp16 from 7.0 on, bf16 and tf32 from
8.0 on.  What it cannot do is refused before the first step, in a plan too."""
import json
import os
import subprocess

import pytest

import rows
import run
from test_gpu import FAR, ROW

pytestmark = pytest.mark.skipif(run.GPU != "standin",
                                reason="needs the stand-in's description")
V100 = run.ROOT / "configs/machines/v100-32-dgx2.json"


@pytest.fixture
def launch(start):
    def launch(capability, dtype, changes=None, options=(), **more):
        return start({**ROW, **FAR, "dtype": dtype}, changes, options=options,
                     env={"IZ_STANDIN_CAPABILITY": str(capability)}, **more)
    return launch


def refused(r, *words):
    run.refused(r, *words)
    assert not r.steps, str(r)


WIDE = {"model.heads": 1, "model.width": 136}
NARROW = ("heads of 136 columns", "up to 128")


@pytest.mark.parametrize("capability, dtype, changes", (
    (70, "fp16", WIDE), (75, "fp32", {}), (80, "bf16", WIDE), (86, "fp32", WIDE)))
def test_older_gpus_train(capability, dtype, changes, launch):
    """Within the plan's bytes, which place.good checks, as every run's."""
    old = launch(capability, dtype, changes)
    cpu = launch(90, dtype, {**changes, "run.device": "cpu"})
    assert f"compute capability {capability / 10}" in old.out, str(old)
    assert len(old.steps) == 3 and old.numbers == cpu.numbers


AMPERE = "needs compute capability 8.0"


@pytest.mark.parametrize("capability, dtype, changes, words", [
    *[(c, "bf16", {}, (f"bf16.enabled: true: {AMPERE}", f"the GPU has {c / 10}",
                       "use fp16.enabled")) for c in (70, 75)],
    (75, "fp32", {"run.tf32": True}, (f"run.tf32: true: {AMPERE}", "the GPU has 7.5")),
    (75, "fp16", {"run.gpu_attention": "cudnn"},
     (f"run.gpu_attention: cudnn: {AMPERE}", "the GPU has 7.5")),
    (75, "fp16", {"run.gpu_attention_backward": "cudnn"},
     (f"run.gpu_attention_backward: cudnn: {AMPERE}", "the GPU has 7.5")),
    (75, "fp16", {"optimizer": {"type": "Muon", "params": {"ns_method": "standard"}}},
     ("optimizer.params.ns_method: standard", "needs compute capability 8.0", "has 7.5")),
    (61, "fp32", {}, ("run.device: cuda", "GPU 0 has compute capability 6.1",
                      "7.0 and later")),
    (61, "fp32", {"run.device": "auto"}, ("run.device: auto",)),
    *((75, dtype, WIDE, ("compute capability 7.5", *NARROW)) for dtype in ("fp16", "fp32"))])
def test_what_an_older_gpu_lacks_is_refused(capability, dtype, changes, words, launch):
    for options in ((), ["--plan"]) if dtype == "bf16" else ((),):
        refused(launch(capability, dtype, changes, options, good=False), *words)


def of_two(place, nvme, settings, row):
    """Two ranks, each with a variable of its own."""
    row = {**row, "ranks": 2}
    return place.apart([["env", *x.split()] for x in settings],
                       rows.config_of(row, nvme), env=rows.environment(place, row))


OLD, LIST = "IZ_STANDIN_CAPABILITY=61", "STARPU_WORKERS_CUDAID=7"


@pytest.mark.parametrize("settings, rank, words", [
    ((OLD, OLD), 0, "GPU 0 has compute capability 6.1"),
    (("", OLD), 1, "GPU 1 has compute capability 6.1"),
    ((LIST, LIST), 0, "STARPU_WORKERS_CUDAID: '7' is no list"),
    (("", LIST), 1, "STARPU_WORKERS_CUDAID: '7' is no list")])
def test_a_gpu_that_cannot_be_is_refused_once(settings, rank, words, place, nvme):
    r = of_two(place, nvme, settings, ROW)
    refused(r, f"izar: rank {rank}: ", words)
    assert r.err.count("izar: rank ") == 1, str(r)


@pytest.mark.parametrize("capabilities, words", [
    ((75, 75), None), ((80, 90), None),
    ((80, 75), "the GPU of rank 1 has compute capability 7.5, that of rank 0 8.0"),
    ((70, 75), "the GPU of rank 0 has compute capability 7.0, that of rank 1 7.5")])
def test_ranks_have_the_same_kernels(capabilities, words, place, nvme):
    r = of_two(place, nvme, [f"IZ_STANDIN_CAPABILITY={c}" for c in capabilities],
               {**ROW, "dtype": "fp16"})
    if words:
        refused(r, words)
    else:
        assert r.rc == 0 and len(r.steps) == 3, str(r)


@pytest.mark.parametrize("capability, words", [
    (70, ["bf16.enabled: true", "the GPU has 7.0"]),
    (61, ["gpu_capability: 61", "70 (7.0) and later"]),
    (86, ["attention in bf16", "compute capability 8.6", "up to 128"]),
    (80, None),
    (0, None)])  # not in the file: 8.0
def test_a_machine_file_says_what_its_gpus_can(capability, words, launch, tmp_path):
    machine = {**json.loads(V100.read_text()), "bf16_flops_per_s": 1}
    machine["gpu_capability"] = capability
    if not capability:
        del machine["gpu_capability"]
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(machine))
    r = launch(90, "bf16", WIDE, ["--plan", "--machine", path], good=False)
    if words:
        refused(r, *words)
    else:
        assert r.rc == 0, str(r)


@pytest.mark.parametrize("cuda, words", [
    ("12.0", "nvcc is of CUDA 12.0, 12.1 is needed"),
    ("12.1", "CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR not found")])  # came with cuDNN 9.8
def test_a_toolkit_that_is_too_old_is_refused(cuda, words, tmp_path):
    deps, nvcc = run.ROOT / ".deps", tmp_path / "nvcc"
    (tmp_path / "include").mkdir()
    (tmp_path / "include/cudnn_graph.h").touch()
    (tmp_path / "lib64").symlink_to(deps / "standin-toolkit/lib")
    nvcc.write_text(f"#!/bin/sh\necho \"#$ TOP={tmp_path}\" >&2\n"
                    f"echo Cuda compilation tools, release {cuda}, V{cuda}.1\n")
    nvcc.chmod(0o755)
    p = subprocess.run(
        ["meson", "setup", tmp_path / "build", run.ROOT, "-Dcuda=enabled", "-Dcudnn=enabled",
         "--pkg-config-path", deps / "starpu-standin/lib/pkgconfig"], capture_output=True,
        text=True, env={**os.environ, "NVCC": str(nvcc)}, timeout=300)
    assert p.returncode == 1 and words in p.stdout, p.stdout + p.stderr
