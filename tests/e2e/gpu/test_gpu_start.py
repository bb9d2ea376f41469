# SPDX-License-Identifier: Apache-2.0
"""The start of a run on a GPU: what does not fit or cannot be done there is refused
before step 0; StarPU's first measurement of a machine; which GPU."""
import json

import pytest

import rows
import run
from rows import standin
from test_gpu import BATCH, FAR, ROW

pytestmark = pytest.mark.skipif(run.GPU not in ("standin", "real"),
                                reason="needs a GPU or its stand-in")


@standin
@pytest.mark.parametrize("param", ("none", "cpu"))
def test_too_small_a_host_is_told_what_the_gpu_can_take(param, start):
    """The ratio that is offered trains, and the next one would not."""
    row = {**ROW, **FAR, "param": param, "steps": 1}
    some = {"model.layers": 20, "model.width": 48}
    whole = start(row, some)
    states = whole.memory[("optimizer", "cpu")][1]
    some["run.memory_limit_bytes"] = whole.bytes_in("cpu") - states // 3
    r = start(row, some, good=False)
    run.refused(r, "MiB of memory per rank")
    line = run.refused(r, "it fits with zero_optimization.offload_optimizer.ratio=")
    ratio = float(line.split("ratio=")[1].split()[0])
    assert 0.5 <= ratio <= 0.7
    assert start({**row, "ratio": ratio}, some).numbers == whole.numbers
    run.refused(start({**row, "ratio": ratio + 0.05}, some, good=False),
                "MiB of memory per rank")


@standin
@pytest.mark.parametrize("ranks, comm, param", [(1, "mpi", "none"), (2, "nccl", "cpu")])
def test_an_automatic_ratio_and_cut_are_kept(ranks, comm, param, start, place):
    """The plan takes what the measured rates and memory make fast; that changes no
    bits but those of the cut.  The effective config has numbers, and a run that goes
    on keeps the cut.  Without a GPU the host has everything, in one micro-batch."""
    row = {**ROW, **FAR, "ranks": ranks, "comm": comm, "param": param, "steps": 2,
           "device": "cuda"}
    some = {"model.layers": 20, "model.width": 48}
    auto = {**some, "run.save_interval": 1, "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto"}
    key = "run.device_memory_limit_bytes"
    output = place.folder / "chosen"
    room = start({**row, "ratio": 0.4, "recompute": "full"}, some).bytes_in("device")
    start({**row, "ratio": "auto"}, {**auto, key: room}, output=output)
    config = json.loads((output / "config.json").read_text())
    ratio = config["zero_optimization"]["offload_optimizer"]["ratio"]
    micro = config["train_micro_batch_size_per_gpu"]
    assert 0 <= ratio <= 1 and ratio * 20 == round(ratio * 20)
    assert micro * config["gradient_accumulation_steps"] * ranks == BATCH
    again = start({**row, "ratio": ratio, "steps": 3}, auto, output=output,
                  options=["--resume"])
    whole = start({**row, "micro": micro, "steps": 3}, some)
    assert again.bits[-1:] == whole.bits[-1:] and again.hash == whole.hash
    host = start({**row, "ratio": "auto", "device": "cpu", "steps": 3, "comm": "mpi"},
                 auto)
    assert "effective ratio" not in host.out and "1 micro-batch a step" in host.out


@standin
def test_rows_of_a_chunk_are_chosen_by_rates(start):
    r = start(ROW, {"run.sequence_chunk": "auto"}, options=["--plan"])
    assert "predicted: a step takes" in r.out, str(r)


@standin
@pytest.mark.parametrize("ranks, device, comm", [
    (1, "cuda", "mpi"), (2, "cuda", "nccl"), (3, "cpu", "mpi")])
def test_first_start_on_a_machine(ranks, device, comm, start, tmp_path):
    """StarPU then measures the bus, which resets all GPUs; one rank does, and each
    goes on with its own.  It does so for a run on the CPU too."""
    row = {**ROW, "ranks": ranks, "device": device, "comm": comm}
    aloud = {"STARPU_SILENT": None}
    known = start(row, env=aloud)
    first = start(row, env={**aloud, "STARPU_HOME": str(tmp_path)})
    assert first.numbers == known.numbers
    assert first.err.count("calibrating...") == 1, str(first)
    assert first.err.count("CUDA 0...") == 1, str(first)


@standin
@pytest.mark.parametrize("device, busy", (("cuda", 1), ("cpu", 0)))
def test_first_start_beside_a_gpu_that_others_use(device, busy, start, tmp_path):
    start({**ROW, "device": device},
          env={"IZ_STANDIN_DEVICES": "2", "IZ_STANDIN_BUSY": str(busy),
               "STARPU_HOME": str(tmp_path)})


@standin
@pytest.mark.parametrize("bad", (0, 1))
def test_a_rank_that_fails_before_starpu_starts_ends_the_others(bad, place, nvme):
    row = {**ROW, "ranks": 2, "comm": "nccl"}
    each = [[], []]
    each[bad] = ["env", "IZ_TRACE_STEPS=0:1"]
    r = place.apart(each, {**rows.config_of(row, nvme), "run.comm_timeout_s": 60},
                    env=rows.environment(place, row))
    run.refused(r, f"rank {bad}: IZ_TRACE_STEPS")
    assert "waited" not in r.err, str(r)


@standin
@pytest.mark.parametrize("ranks, device", ((1, "auto"), (2, "cuda")))
def test_host_memory_that_cannot_be_pinned_is_refused(ranks, device, start, place):
    row = {**ROW, "ranks": ranks, "stage": 3, "optimizer": "cpu", "device": device}
    stats = place.folder / "stats.json"
    r = start(row, good=False, env={"IZ_STANDIN_STATS": str(stats),
                                    "IZ_STANDIN_NO_PINNING": "1"})
    run.refused(r, f"run.device: {device}: pinning ", "failed: out of memory",
                everyone=True)
    # mpirun may end a rank that has told why before its library writes a line.
    left = run.read_lines(stats)
    assert 0 < len(left) <= ranks
    assert all(x["leaked_bytes"] == x["leaked_pinned"] == 0 for x in left), left
    assert {p.name for p in r.output.iterdir()} == {"metrics.jsonl"}
    assert not r.lines, str(r)


# ---- choice ----

@standin
def test_more_ranks_than_gpus_is_refused_unless_wished(start):
    row, env = {**ROW, "ranks": 2}, {"IZ_STANDIN_DEVICES": "1"}
    r = start({**row, "comm": "auto"}, env=env, good=False)
    run.refused(r, "several ranks have the same GPU")
    start(row, env=env)
    # Hosts of one name, whose GPUs are at the same address, have one each.
    start({**row, "comm": "auto"}, env={**env, **rows.on("ab")}, options=["--plan"])


def test_a_users_choice_of_gpu(place):
    """STARPU_ variables win, or the run is refused before step 0."""
    one = {"run.steps": 2, "run.device": "auto"}
    r = place.good(1, one, env={"STARPU_NCUDA": "0"})
    assert "on the CPU: STARPU_NCUDA is 0" in r.out
    assert "up" not in r.last("links")
    r = place.good(1, {**one, **run.offload(3, "cpu", "cpu", None)},
                   env={"STARPU_NCUDA": "1", "STARPU_WORKERS_CUDAID": "0"})
    assert set(r.last("links")) == {"up", "down"}
    assert "environment: STARPU_WORKERS_CUDAID=0" in r.out
    for wrong in ("99", "gpu", "0;1"):
        r = place.launch(1, one, env={"STARPU_WORKERS_CUDAID": wrong})
        run.refused(r, "STARPU_WORKERS_CUDAID", wrong, "no list of numbers")
    r = place.launch(1, one, env={"STARPU_SCHED": "heteroprio"})
    run.refused(r, "STARPU_SCHED", "heteroprio")
