# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of runs on a GPU, and m and v in fewer bytes there: the files and the
bits do not know where the states were."""
import pytest

import run
from test_gpu import KIND, PLAIN, ROW, config_of, environment, standin, start

pytestmark = pytest.mark.skipif(KIND not in ("standin", "real"),
                                reason="needs a GPU or its stand-in")


@standin
def test_resume_on_the_gpu_and_on_the_cpu(place, nvme):
    """A checkpoint has no trace of where it was written."""
    row = {**ROW, "dtype": "fp32", "stage": 3, "optimizer": "cpu",
           "param": "cpu"}
    save = {"run.save": True}
    whole = start(place, row, nvme, {**save, "run.steps": 5})
    out = place.folder / "resumed"
    place.good(None, {**config_of(row, nvme), **save, "run.steps": 2},
               output=out, env=environment(place, row))
    r = place.good(None, {**config_of(row, nvme), **save, "run.steps": 5,
                          "run.device": "cpu"}, ("--resume",), out,
                   env=environment(place, row))
    assert r.bits[-3:] == whole.bits[-3:] and r.hash == whole.hash


def files(r):
    return {p.relative_to(r.output): p.read_bytes()
            for p in (r.output / "checkpoints").rglob("*.*") if p.is_file()}


@pytest.mark.parametrize("stage,optimizer,param,ratio,dtype", [
    (0, "none", "none", 1, "bf16"), (2, "cpu", "none", 1, "bf16"),
    (3, "none", "none", 1, "bf16"), (3, "nvme", "nvme", 1, "bf16"),
    (2, "cpu", "none", 0.4, "bf16"), (3, "cpu", "cpu", 0.4, "fp32"),
    (3, "cpu", "none", 0.4, "fp32")])
def test_a_checkpoint_beside_training_is_that_of_one_for_which_it_waits(
        stage, optimizer, param, ratio, dtype, place, nvme):
    """States on the GPU come down through a lane of their own."""
    row = {**PLAIN, "ranks": 2, "dtype": dtype, "micro": 2, "clip": 0.5,
           "tuned": "all", "stage": stage, "optimizer": optimizer,
           "param": param, "ratio": ratio, "delay_us": 300, "jitter_us": 500}
    c = {"run.save_interval": 1, "run.save": False, "run.keep_last": 9,
         "zero_optimization.sub_group_size": 2048}

    wait = start(place, row, nvme, {**c, "run.save_mode": "sync"})
    free = start(place, row, nvme, {**c, "run.save_mode": "async"})
    assert wait.bits == free.bits and wait.hash == free.hash
    assert len(files(wait)) == 2 * 3 and files(wait) == files(free)


@standin
@pytest.mark.parametrize("dtype,param", [("fp32", "cpu"), ("fp32", "none"),
                                         ("bf16", "cpu")])
def test_a_checkpoint_does_not_know_the_ratio(dtype, param, place, nvme):
    """Its files are those of any other ratio, and any other one goes on."""
    row = {**ROW, "dtype": dtype, "stage": 3, "optimizer": "cpu",
           "param": param}
    c = {"run.save": True, "zero_optimization.sub_group_size": 2048,
         "run.steps": 2}
    whole = start(place, row, nvme, {**c, "run.steps": 5})
    want = files(start(place, row, nvme, c))
    out = place.folder / "resumed"
    r = place.good(None, {**config_of({**row, "ratio": 0.3}, nvme), **c},
                   output=out, env=environment(place, row))
    assert len(want) >= 2 and files(r) == want
    r = place.good(None, {**config_of({**row, "ratio": 0.7}, nvme), **c,
                          "run.steps": 4}, ("--resume",), out,
                   env=environment(place, row))
    r = place.good(None, {**config_of(row, nvme), **c, "run.device": "cpu",
                          "run.steps": 5}, ("--resume",), out,
                   env=environment(place, row))
    assert r.bits[-3:] == whole.bits[-3:] and r.hash == whole.hash


# ---- m and v in fewer bytes ----

# stage, optimizer, param, ratio, type of the parameters
NARROW = [(0, "none", "none", 1, "fp32"), (1, "none", "none", 1, "fp16"),
          (3, "none", "none", 1, "bf16"), (2, "cpu", "none", 0.5, "bf16"),
          (3, "cpu", "none", 0, "fp32"), (3, "cpu", "cpu", 1, "fp32"),
          (3, "cpu", "cpu", 0.5, "bf16"), (3, "cpu", "cpu", 0.5, "fp32"),
          (3, "cpu", "cpu", 0, "bf16"), (3, "nvme", "cpu", 1, "fp32")]


def narrow_row(stage, optimizer, param, ratio, dtype, ranks=1, **more):
    return {**ROW, "stage": stage, "optimizer": optimizer, "param": param,
            "ratio": ratio, "dtype": dtype, "ranks": ranks, **more}


@standin
@pytest.mark.parametrize("kind", ("bf16", "fp8"))
@pytest.mark.parametrize("at", NARROW, ids=lambda a: "-".join(map(str, a)))
def test_narrow_states_have_the_bits_of_the_cpu(at, kind, place, nvme):
    row = narrow_row(*at)
    narrow = {"run.state_dtype": kind, "run.steps": 4}
    gpu = start(place, row, nvme, narrow)
    plain = {**row, "stage": 0, "optimizer": "none", "param": "none",
             "ratio": 1}
    cpu = start(place, plain, nvme, {**narrow, "run.device": "cpu"})
    assert gpu.bits == cpu.bits and gpu.hash == cpu.hash
    if kind == "fp8":
        wide = start(place, plain, nvme, {"run.steps": 4, "run.device": "cpu"})
        assert gpu.hash != wide.hash
    for (planned, have) in gpu.memory.values():
        assert planned == have


@standin
@pytest.mark.parametrize("comm", ("mpi", "nccl"))
@pytest.mark.parametrize("kind", ("bf16", "fp8"))
def test_narrow_states_of_two_ranks(kind, comm, place, nvme):
    """Sums that the host forms leave the GPU's chunks another way."""
    row = narrow_row(3, "cpu", "cpu", 0.5, "bf16", 2, comm=comm, delay_us=300)
    narrow = {"run.state_dtype": kind}
    gpu = start(place, row, nvme, narrow)
    cpu = start(place, {**row, "ratio": 1}, nvme,
                {**narrow, "run.device": "cpu"})
    assert gpu.bits == cpu.bits and gpu.hash == cpu.hash


@standin
@pytest.mark.parametrize("kind", ("bf16", "fp8"))
@pytest.mark.parametrize("param,dtype", [("cpu", "bf16"), ("none", "fp32")])
def test_a_checkpoint_of_narrow_states_does_not_know_where_they_were(
        param, dtype, kind, place, nvme):
    """On the GPU, on both sides, on the CPU: one file, and each goes on."""
    save = {"run.save": True, "run.state_dtype": kind,
            "zero_optimization.sub_group_size": 2048}
    rows = [narrow_row(3, "cpu", param, ratio, dtype) for ratio in (0.3, 0.7)]
    rows.append(narrow_row(3, "none", "none", 1, dtype))
    cpu = {**save, "run.device": "cpu"}
    whole = start(place, rows[2], nvme, {**cpu, "run.steps": 5})
    want = files(start(place, rows[2], nvme, {**cpu, "run.steps": 2}))
    out = place.folder / "resumed"
    for i, row in enumerate((*rows, rows[0])):
        r = place.good(None, {**config_of(row, nvme), **save,
                              "run.steps": 2 + i},
                       ("--resume",) if i else (), out,
                       env=environment(place, row))
        if i == 0:
            assert len(want) >= 2 and files(r) == want
    assert r.bits[-1:] == whole.bits[-1:] and r.hash == whole.hash


@standin
@pytest.mark.parametrize("ratio", (1, 0.4))
def test_checkpoints_of_narrow_states_on_the_gpu_wait(ratio, place, nvme):
    """What auto chooses; those on the host alone are saved beside training."""
    row = narrow_row(2, "cpu", "none", ratio, "bf16")
    c = {"run.save_interval": 1, "run.save": False, "run.keep_last": 9,
         "run.state_dtype": "fp8", "zero_optimization.sub_group_size": 2048}
    wait = start(place, row, nvme, {**c, "run.save_mode": "sync"})
    free = start(place, row, nvme, c)
    assert wait.bits == free.bits and files(wait) == files(free)
    more = free.bytes_of("staging") - wait.bytes_of("staging")
    assert (more > 0) == (ratio == 1)
    if ratio < 1:
        run.refused(place.launch(None, {**config_of(row, nvme), **c,
                                        "run.save_mode": "async"},
                                 env=environment(place, row)),
                    "run.save_mode", "state_dtype")
