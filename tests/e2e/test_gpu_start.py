# SPDX-License-Identifier: Apache-2.0
"""The start of a run on a GPU: what does not fit or cannot be done there is refused
before step 0; StarPU's first measurement of a machine; which GPU."""
import json
import subprocess
import time

import pytest

import run
from test_gpu import KIND, ROW, config_of, environment, standin, start

pytestmark = pytest.mark.skipif(KIND not in ("standin", "real"),
                                reason="needs a GPU or its stand-in")


@standin
def test_too_small_a_gpu_is_refused_with_what_fits(place, nvme):
    r = place.launch(None, {**config_of(ROW, nvme), "zero_optimization.stage": 1,
                            "run.device_memory_limit_bytes": 64 << 20,
                            "model.layers": 60, "model.width": 96},
                     env=environment(place, ROW))
    run.refused(r, "MiB of the GPU's memory")
    assert "it fits with" in r.err and "offload_optimizer.device" in r.err


@standin
@pytest.mark.parametrize("param", ("none", "cpu"))
def test_too_small_a_host_is_told_what_the_gpu_can_take(param, place, nvme):
    """The ratio that is offered trains, and the next one would not."""
    row = {**ROW, "stage": 3, "optimizer": "cpu", "param": param}
    some = {"model.layers": 20, "model.width": 48, "run.steps": 1}
    whole = start(place, row, nvme, some)
    states = whole.memory[("optimizer", "cpu")][1]
    held = sum(have for (_, tier), (_, have) in whole.memory.items()
               if tier == "cpu")
    some["run.memory_limit_bytes"] = held - states // 3
    r = place.launch(None, {**config_of(row, nvme), **some},
                     env=environment(place, row))
    run.refused(r, "MiB of memory per rank")
    line = run.refused(r, "it fits with "
                       "zero_optimization.offload_optimizer.ratio=")
    ratio = float(line.split("ratio=")[1].split()[0])
    assert 0.5 <= ratio <= 0.7
    fits = start(place, {**row, "ratio": ratio}, nvme, some)
    assert fits.bits == whole.bits and fits.hash == whole.hash
    r = place.launch(None, config_of({**row, "ratio": ratio + 0.05}, nvme) |
                     some, env=environment(place, row))
    run.refused(r, "MiB of memory per rank")


@standin
@pytest.mark.parametrize("ranks", (1, 2))
def test_first_start_on_a_machine(ranks, place, nvme, tmp_path):
    """StarPU then measures the bus, which resets all GPUs; one rank does, and each
    goes on with its own."""
    row = {**ROW, "ranks": ranks, "comm": "nccl" if ranks > 1 else ROW["comm"]}
    env = environment(place, row)
    del env["STARPU_SILENT"]
    known = place.good(row["ranks"], config_of(row, nvme), env=env)
    first = place.good(row["ranks"], config_of(row, nvme),
                       env={**env, "STARPU_HOME": str(tmp_path)})
    assert first.bits == known.bits and first.hash == known.hash
    assert first.err.count("CUDA 0...") == 1, str(first)


@standin
@pytest.mark.parametrize("device, busy", (("cuda", 1), ("cpu", 0)))
def test_first_start_beside_a_gpu_that_others_use(device, busy, place, nvme,
                                                  tmp_path):
    env = {**environment(place, ROW), "IZ_STANDIN_DEVICES": "2",
           "IZ_STANDIN_BUSY": str(busy), "STARPU_HOME": str(tmp_path)}
    place.good(None, {**config_of(ROW, nvme), "run.device": device}, env=env)


@standin
@pytest.mark.parametrize("bad", (0, 1))
def test_a_rank_that_fails_before_starpu_starts_ends_the_others(bad, place, nvme):
    row = {**ROW, "ranks": 2, "comm": "nccl"}
    path = str(place.config({**config_of(row, nvme), "run.comm_timeout_s": 60}))
    program = ["-np", "1", run.PROGRAM, path]
    each = [program, program]
    each[bad] = ["-np", "1", "-x", "IZ_TRACE_STEPS=0:1", run.PROGRAM, path]
    line = ["mpirun", "--oversubscribe", "--bind-to", "none", *each[0], ":", *each[1]]
    begin = time.monotonic()
    p = subprocess.run(line, env=run.environment(environment(place, row)),
                       capture_output=True, text=True, timeout=run.TIMEOUT_S)
    r = run.Result(p.returncode, p.stdout, p.stderr, place.folder,
                   time.monotonic() - begin, line)
    run.refused(r, f"rank {bad}: IZ_TRACE_STEPS")
    assert r.rc and r.seconds < 40 and "waited" not in r.err, str(r)


@standin
@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("device", ("cuda", "auto"))
def test_host_memory_that_cannot_be_pinned_is_refused(ranks, device, place, nvme):
    row = {**ROW, "ranks": ranks, "stage": 3, "optimizer": "cpu"}
    stats = place.folder / "stats.json"
    env = {**environment(place, row, stats), "IZ_STANDIN_NO_PINNING": "1"}
    r = place.launch(None if ranks == 1 else ranks,
                     {**config_of(row, nvme), "run.device": device}, env=env)
    run.refused(r, f"run.device: {device}: pinning ", "failed: out of memory",
                everyone=True)
    left = [json.loads(line) for line in stats.read_text().splitlines()]
    assert len(left) == ranks
    assert all(x["leaked_bytes"] == x["leaked_pinned"] == 0 for x in left), left
    assert [p.name for p in r.output.iterdir()] == ["config.json"], str(r)


# ---- choice ----

@standin
def test_more_ranks_than_gpus_is_refused_unless_wished(place, nvme):
    row = {**ROW, "ranks": 2}
    env = {**environment(place, row), "IZ_STANDIN_DEVICES": "1"}
    r = place.launch(2, {**config_of(row, nvme), "run.comm": "auto"}, env=env)
    run.refused(r, "several ranks have the same GPU")
    place.good(2, {**config_of(row, nvme), "run.comm": "mpi"}, env=env)


@pytest.mark.parametrize("changes,words", [
    ({"run.slices": 2}, ("run.slices",)),
    ({"zero_optimization.stage": 3,
      "zero_optimization.offload_param.device": "cpu"}, ("offload_param",)),
    ({"run.state_dtype": "bf16", "run.save_mode": "async"},
     ("run.save_mode", "run.state_dtype")),
])
def test_what_a_gpu_cannot_do_is_refused(changes, words, place, nvme):
    r = place.launch(None, {**config_of(ROW, nvme), **changes},
                     env=environment(place, ROW))
    run.refused(r, *words)


def test_a_users_choice_of_gpu(place):
    """STARPU_ variables win, or the run is refused before step 0."""
    one = {"run.steps": 2, "run.device": "auto"}
    r = place.good(None, one, env={"STARPU_NCUDA": "0"})
    assert "on the CPU: STARPU_NCUDA is 0" in r.out
    assert "up" not in r.last("links")
    r = place.good(None, {**one, **run.offload(3, "cpu", "cpu", None)},
                   env={"STARPU_NCUDA": "1", "STARPU_WORKERS_CUDAID": "0"})
    assert set(r.last("links")) == {"up", "down"}
    assert "environment: STARPU_WORKERS_CUDAID=0" in r.out
    for wrong in ("99", "gpu", "0;1"):
        r = place.launch(None, one, env={"STARPU_WORKERS_CUDAID": wrong})
        run.refused(r, "STARPU_WORKERS_CUDAID", wrong, "no list of numbers")
    r = place.launch(None, one, env={"STARPU_SCHED": "heteroprio"})
    run.refused(r, "STARPU_SCHED", "heteroprio")
