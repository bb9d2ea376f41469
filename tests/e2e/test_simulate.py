# SPDX-License-Identifier: Apache-2.0
"""A step on a machine that is not here: the submissions of a run, simulated.
The window of a ring, the copies' hiding and the place of the optimizer are
what the design promises, and the design without a ring fails the same test."""
import json
import os
import pathlib
import resource
import subprocess

import pytest

import cover

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(os.environ.get("IZ_TEST_SIMGRID") != "1",
                                reason="needs tools/setup --simgrid")
MACHINE = ROOT / "configs/machines/v100-32-dgx2.json"
LAYERS, WIDTH, VOCAB, SEQ = 40, 5120, 50257, 1024
GIB = 1 << 30


def config():
    return {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 8,
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 3,
                              "offload_optimizer": {"device": "cpu"},
                              "offload_param": {"device": "cpu"}},
        "model": {"layers": LAYERS, "heads": 40, "width": WIDTH, "seq": SEQ,
                  "vocab": VOCAB},
        "data": {"path": "none", "bytes": True},
        "run": {"ring": 2, "workers": 8, "recompute": "full",
                "device_memory_limit_bytes": 8 * GIB},
    }


def simulate(folder, *sets, ranks=1, machine=MACHINE):
    path = folder / "config.json"
    path.write_text(json.dumps(config()))
    return simulate_file(path, *sets, ranks=ranks, machine=machine)


def simulate_file(path, *sets, ranks=1, machine=MACHINE, timeout_s=600):
    line = [ROOT / "tools/simulate", path, "--machine", machine,
            "--ranks", str(ranks)]
    for s in sets:
        line += ["--set", s]
    r = subprocess.run(line, capture_output=True, text=True, timeout=timeout_s)
    last = r.stdout.strip().splitlines()[-1:] if r.stdout else []
    if r.returncode or not last or not last[0].startswith('{"simulation"'):
        return None, r
    return json.loads(last[0])["simulation"], r


@pytest.fixture(scope="module")
def offload(tmp_path_factory):
    """13 billion parameters under 8 GiB of GPU memory."""
    s, r = simulate(tmp_path_factory.mktemp("simulate"))
    assert s, r.stdout + r.stderr
    return s


def block_bytes():
    return 2 * (12 * WIDTH * WIDTH + 13 * WIDTH)


def embed_bytes():
    return 2 * (VOCAB + SEQ) * WIDTH


def test_moves_no_more_than_the_arithmetic(offload):
    """Up: every block for forward and again for backward, but the one that is
    still in the ring; the embedding, which has about a block's size and shares
    the ring, for its forward, for the head and for its backward.  Down: every
    gradient once, the embedding's from both of its uses."""
    up = 3 * embed_bytes() + (2 * LAYERS - 1) * block_bytes()
    down = 2 * embed_bytes() + LAYERS * block_bytes()
    assert up <= offload["up_bytes"] <= 1.01 * up
    assert down <= offload["down_bytes"] <= 1.01 * down


def test_stays_in_the_memory_of_the_gpu(offload):
    assert offload["device_bytes"] <= 8 * GIB


def hides(s):
    return (s["copies_hidden_percent"] >= 85 and
            s["adam_hidden_percent"] >= 85)


def test_copies_and_optimizer_are_hidden(offload):
    assert hides(offload), offload
    assert offload["limited_by"] == "compute"
    assert offload["lost_spans"] == 0


def test_boundaries_on_the_host_are_hidden(tmp_path, offload):
    """Each crosses once each way, but three that are still there when backward
    begins.  The embedding makes one, every block one."""
    on = "activation_checkpointing.cpu_checkpointing=true"
    s, r = simulate(tmp_path, on)
    assert s, r.stdout + r.stderr
    moved = (LAYERS + 1 - 3) * 8 * SEQ * WIDTH * 2
    assert s["up_bytes"] == offload["up_bytes"] + moved
    assert s["down_bytes"] == offload["down_bytes"] + moved
    assert hides(s), s
    assert s["step_s"] < 1.02 * offload["step_s"]
    assert offload["device_bytes"] - s["device_bytes"] == moved


def test_without_a_ring_nothing_is_hidden(tmp_path, offload):
    """One slot: a fetch cannot run ahead of the unit before it."""
    s, r = simulate(tmp_path, "run.ring=1")
    assert s, r.stdout + r.stderr
    assert s["copies_hidden_percent"] < 20 and not hides(s)
    assert s["step_s"] > 1.2 * offload["step_s"]
    assert s["limited_by"] == "late fetches"
    assert "run.ring=2 in place of 1" in " ".join(r.stdout.split())


def test_a_barrier_before_the_optimizer_costs_its_time(tmp_path, offload):
    """An optimizer that waits for nothing but runs under nothing."""
    adam = (12 * WIDTH * WIDTH * LAYERS + VOCAB * WIDTH) * 28
    machine = json.loads(MACHINE.read_text())
    alone_s = adam / machine["host_bytes_per_s"]
    s, r = simulate(tmp_path, "run.ring=2", "gradient_clipping=0")
    assert s, r.stdout + r.stderr
    assert s["step_s"] < offload["step_s"] + 0.1 * alone_s


SMALL = ("model.layers=6", "model.width=1024", "model.heads=16",
         "model.vocab=8192", "run.device_memory_limit_bytes=0",
         "run.workers=4")


@pytest.mark.parametrize("variable", (
    "STARPU_PREFETCH=0", "STARPU_CALIBRATE=1", "STARPU_LIMIT_CUDA_MEM=64",
    "STARPU_LIMIT_CPU_MEM=64", "STARPU_MINIMUM_CLEAN_BUFFERS=50"))
def test_what_the_header_calls_without_effect_has_none(variable, tmp_path,
                                                      monkeypatch):
    """Every task at the same time on the same worker."""
    plain, _ = simulate(tmp_path, *SMALL)
    monkeypatch.setenv(*variable.split("="))
    s, r = simulate(tmp_path, *SMALL)
    assert s == plain, r.stderr
    assert f"environment: {variable} (no effect: " in r.stdout
    assert r.stdout.count("environment: ") == 1, "only what the user set"


def test_a_scheduler_that_would_hang_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("STARPU_SCHED", "heteroprio")
    s, r = simulate(tmp_path, *SMALL)
    assert s is None and r.returncode == 1
    assert "STARPU_SCHED: with a GPU, tasks under heteroprio never end" in r.stderr


def test_a_users_workers_count(tmp_path, monkeypatch):
    s, r = simulate(tmp_path, *SMALL, "run.workers=4")
    monkeypatch.setenv("STARPU_NCPU", "2")
    t, u = simulate(tmp_path, *SMALL, "run.workers=4")
    assert "; 4 workers" in r.stdout and "; 2 workers" in u.stdout
    assert s["task_hash"] != t["task_hash"]


def test_the_same_to_the_bit(tmp_path):
    a, _ = simulate(tmp_path, *SMALL)
    b, _ = simulate(tmp_path, *SMALL)
    assert a and a == b
    c, _ = simulate(tmp_path, *SMALL, "run.ring=3")
    assert c["task_hash"] != a["task_hash"]


# What could wait for each other: slots, chunks, staging buffers, lanes.
SWEEP = {
    "run.ring": (1, 2, 4),
    "run.schedule": ("depth_first", "breadth_first"),
    "run.scheduler": ("prio", "lws", "eager", "dmda"),
    "zero_optimization.sub_group_size": (300000, 3000000),
    "activation_checkpointing.cpu_checkpointing": ("false", "true"),
    "homes": ("none/none", "cpu/none", "cpu/cpu", "nvme/cpu", "nvme/nvme"),
    "buffer_count": (1, 4),
    "ranks": (1, 32),
    "train_micro_batch_size_per_gpu": (1, 2),
    "limit": ("the plan", "the machine"),
}


def sets_of(row):
    sets = [f"{k}={v}" for k, v in row.items() if "." in k or "train" in k]
    for key, home in zip(("offload_optimizer", "offload_param"),
                         row["homes"].split("/")):
        at = f"zero_optimization.{key}"
        sets += [f"{at}.device={home}"]
        if home == "nvme":
            sets += [f"{at}.nvme_path=/none",
                     f"{at}.buffer_count={row['buffer_count']}"]
    return (*SMALL, *sets, f"train_batch_size={8 * row['ranks']}")


@pytest.mark.parametrize("row", cover.rows(SWEEP, lambda row: True),
                         ids=lambda r: "-".join(map(str, r.values())))
def test_ends_whatever_is_tight(row, tmp_path):
    """The watchdog ends what waits for ever, and without the last line nothing
    has ended.  With the plan's own bytes as limits nothing changes, and one
    byte less is refused."""
    sets = sets_of(row)
    s, r = simulate(tmp_path, *sets, ranks=row["ranks"])
    assert s, r.stdout + r.stderr
    if row["limit"] == "the machine":
        return
    limits = {"run.memory_limit_bytes": s["host_bytes"],
              "run.device_memory_limit_bytes": s["device_bytes"]}
    tight, r = simulate(tmp_path, *sets, *(f"{k}={v}" for k, v in limits.items()),
                        ranks=row["ranks"])
    assert tight == s, r.stdout + r.stderr
    for key in limits:
        less = {**limits, key: limits[key] - 1}
        none, r = simulate(tmp_path, *sets,
                           *(f"{k}={v}" for k, v in less.items()),
                           ranks=row["ranks"])
        assert none is None and "this run needs" in r.stderr, r.stdout + r.stderr


@pytest.mark.parametrize("zero", (
    ("zero_optimization.stage=0",),
    ("zero_optimization.stage=2", "zero_optimization.offload_param.device=none"),
    ("zero_optimization.offload_optimizer.device=nvme",
     "zero_optimization.offload_optimizer.nvme_path=/none"),
))
def test_every_placement_on_many_ranks(zero, tmp_path):
    if zero[0].endswith("=0"):
        zero += ("zero_optimization.offload_param.device=none",
                 "zero_optimization.offload_optimizer.device=none")
    s, r = simulate(tmp_path, *SMALL, *zero, "train_batch_size=64",
                    "train_micro_batch_size_per_gpu=1", ranks=32)
    assert s, r.stdout + r.stderr
    assert s["ranks"] == 32


def test_a_trillion_on_512_ranks_is_simulated_in_seconds(tmp_path, monkeypatch):
    """Processor time and memory: a machine may be busy with other things."""
    # meson sets it; glibc then writes to all memory that is allocated
    monkeypatch.delenv("MALLOC_PERTURB_", raising=False)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    s, r = simulate(tmp_path, "model.layers=552", "model.width=12288",
                    "model.heads=96", "train_micro_batch_size_per_gpu=4",
                    "train_batch_size=2048", "run.device_memory_limit_bytes=0",
                    "activation_checkpointing.cpu_checkpointing=true", ranks=512)
    assert s, r.stdout + r.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert spent < 30
    assert after.ru_maxrss * 1024 < 500e6
    assert hides(s), s
    # three quarters of the products count: the forward is done twice
    assert 0.9 < s["flop_per_s"] * 4 / 3 / 53e12 < 1


def test_collectives_cost_what_a_node_receives(tmp_path):
    """Two nodes of 16 with a slow link between them, which is then the step:
    parameters enter a node once, of a sum each of its ranks receives a part."""
    slow = {**json.loads(MACHINE.read_text()), "node_bytes_per_s": 10**9,
            "message_ns": 0}
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(slow))
    s, r = simulate(tmp_path, *SMALL, "run.ring=8", "train_batch_size=32",
                    "train_micro_batch_size_per_gpu=1", ranks=32, machine=path)
    assert s, r.stdout + r.stderr
    c, layers = 1024, 6
    embed, blocks, head = (8192 + SEQ) * c, layers * (12 * c * c + 13 * c), 2 * c
    gathers = 2 * (embed + blocks + head)  # the ring holds all: once a step
    sums = 2 * (2 * embed + blocks + head)  # both uses of the embedding
    link_s = (gathers + 16 * sums) * 31 / 32 * 1e-9
    assert link_s <= s["step_s"] < 1.05 * link_s, r.stdout


def test_what_does_not_fit_is_refused(tmp_path):
    s, r = simulate(tmp_path, "run.device_memory_limit_bytes=3600000000")
    assert s is None and r.returncode == 1
    assert "of the GPU's memory" in r.stderr and "it fits with" in r.stderr


def test_a_type_that_the_gpus_lack_is_refused(tmp_path):
    old = json.loads(MACHINE.read_text())
    old.update(fp16_flops_per_s=0)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(old))
    s, r = simulate(tmp_path, *SMALL, machine=path)
    assert s is None and r.returncode == 1
    assert "fp16.enabled: the GPUs of" in r.stderr, r.stderr


def test_a_machine_without_a_gpu(tmp_path):
    bare = json.loads(MACHINE.read_text())
    bare.update(gpus=0, gpu_bytes=0)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(bare))
    s, r = simulate(tmp_path, *SMALL, machine=path)
    assert s, r.stdout + r.stderr
    assert s["device_bytes"] == s["up_bytes"] == s["down_bytes"] == 0
    assert s["step_s"] > 0


def test_attention_has_a_rate_of_its_own(tmp_path):
    bare = json.loads(MACHINE.read_text())
    bare.update(gpus=0, gpu_bytes=0, cores=1)
    path = tmp_path / "machine.json"
    seconds = []
    for rate in (None, bare["core_flops_per_s"] // 8):
        if rate:
            bare["core_fused_flops_per_s"] = rate
        path.write_text(json.dumps(bare))
        s, r = simulate(tmp_path, *SMALL, "run.recompute=none", "run.workers=1",
                        machine=path)
        assert s, r.stdout + r.stderr
        seconds.append(s["step_s"])
    layers, c = 6, 1024
    tokens = 8 * SEQ
    flops = 6 * layers * tokens * c * (SEQ + 1)  # forward and backward
    more = flops * (8 - 1) / bare["core_flops_per_s"]
    assert abs(seconds[1] - seconds[0] - more) < 0.02 * more


def bare_elements():
    """Of the model of SMALL, which is all that is trained."""
    c = 1024
    return (8192 + SEQ) * c + 6 * (12 * c * c + 13 * c) + 2 * c


@pytest.mark.parametrize("ranks", (1, 2))
def test_the_last_sums_squares_take_a_core_time(ranks, tmp_path):
    """So slow that they are the step: once for every element, in the comm worker with
    several ranks, by the one worker otherwise; not once per micro-batch."""
    bare = json.loads(MACHINE.read_text())
    rate = 10**5
    bare.update(gpus=0, gpu_bytes=0, cores=1, core_squares_per_s=rate)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(bare))
    s, r = simulate(tmp_path, *SMALL, "run.workers=1",
                    "train_micro_batch_size_per_gpu=2", ranks=ranks, machine=path)
    assert s, r.stdout + r.stderr
    squares_s = bare_elements() / ranks / rate
    del bare["core_squares_per_s"]
    path.write_text(json.dumps(bare))
    without, r = simulate(tmp_path, *SMALL, "run.workers=1",
                          "train_micro_batch_size_per_gpu=2", ranks=ranks,
                          machine=path)
    assert without["step_s"] < squares_s
    assert squares_s <= s["step_s"] < squares_s + without["step_s"]


def test_squares_of_a_machine_that_does_not_tell_their_rate(tmp_path):
    """As if read once more, in fp32; on a GPU too, whose host takes them where
    it sums several micro-batches."""
    machine = json.loads(MACHINE.read_text())
    sets = (*SMALL, "train_micro_batch_size_per_gpu=4")
    path, steps = tmp_path / "machine.json", []
    for rate in (None, machine["core_bytes_per_s"] // 4, 10**6):
        if rate:
            machine["core_squares_per_s"] = rate
        path.write_text(json.dumps(machine))
        s, r = simulate(tmp_path, *sets, machine=path)
        assert s, r.stdout + r.stderr
        steps.append(s)
    assert steps[0] == steps[1]
    assert steps[2]["step_s"] >= bare_elements() / 4 / 10**6  # four workers


def test_cores_that_multiply_bf16(tmp_path):
    """Products of bf16 have a rate of their own; one that a machine does not
    have is refused, or fp32 is taken where nothing is asked for."""
    bare = json.loads(MACHINE.read_text())
    bare.update(gpus=0, gpu_bytes=0, cores=1)
    path = tmp_path / "machine.json"
    want = (*SMALL, "fp16.enabled=false", "bf16.enabled=true", "run.workers=1")
    asked = "run.cpu_products=\"bf16\""
    path.write_text(json.dumps(bare))
    plain, r = simulate(tmp_path, *want, machine=path)
    assert plain, r.stdout + r.stderr
    s, r = simulate(tmp_path, *want, asked, machine=path)
    assert s is None and r.returncode == 1
    assert "run.cpu_products: bf16: the cores of" in r.stderr, r.stderr
    bare["core_bf16_flops_per_s"] = 2 * bare["core_flops_per_s"]
    path.write_text(json.dumps(bare))
    fast, r = simulate(tmp_path, *want, machine=path)
    assert fast and plain["step_s"] / 2 < fast["step_s"] < 0.7 * plain["step_s"]
    assert simulate(tmp_path, *want, asked, machine=path)[0]["step_s"] == \
        fast["step_s"]
    wide, _ = simulate(tmp_path, *want, "run.cpu_products=\"fp32\"", machine=path)
    assert wide["step_s"] == plain["step_s"]


def test_a_machine_file_is_checked(tmp_path):
    bad = json.loads(MACHINE.read_text())
    bad["gpu_byte"] = bad.pop("gpu_bytes")
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(bad))
    s, r = simulate(tmp_path, machine=path)
    assert s is None
    assert "gpu_bytes: is missing" in r.stderr
    assert "gpu_byte: unknown key" in r.stderr


# ---- part of the optimizer on the GPU ----

# Few samples: the host's update is what limits where the link is fast.
SHARED = ("run.device_memory_limit_bytes=0", "model.layers=12",
          "model.width=2048", "model.heads=16", "train_batch_size=2",
          "train_micro_batch_size_per_gpu=2")
RATIO = "zero_optimization.offload_optimizer.ratio="


def elements():
    """Of that model: embedding, blocks, head."""
    c = 2048
    return (VOCAB + SEQ) * c + 12 * (12 * c * c + 13 * c) + 2 * c


def test_a_ratio_relieves_the_host(tmp_path):
    machine = ROOT / "configs/machines/h200-141.json"
    whole, r = simulate(tmp_path, *SHARED, machine=machine)
    assert whole["limited_by"] == "optimizer", whole
    assert "a smaller offload_optimizer.ratio" in " ".join(r.stdout.split())
    half, r = simulate(tmp_path, *SHARED, RATIO + "0.5", machine=machine)
    assert half, r.stderr
    assert "effective ratio 0.5" in r.stdout
    assert half["step_s"] < 0.8 * whole["step_s"]
    # In fp16 and of half of the elements: parameters come down, gradients do not,
    # of which the embedding has two.  States, 12 bytes, and gradients are on the
    # GPU, and of the embedding two buffers for its gradient are half as long.
    chunk, embedding = 2 * (1 << 20), (VOCAB + SEQ) * 2048
    assert half["up_bytes"] == whole["up_bytes"]
    assert abs(whole["down_bytes"] - half["down_bytes"] - embedding) <= chunk
    left = whole["host_bytes"] - half["host_bytes"]
    sums = elements() / 2 / 1024 * 8
    assert abs(left - 7 * elements() - 2 * embedding + sums) <= 9 * chunk
    came = half["device_bytes"] - whole["device_bytes"]
    stages = 8 * 2 * (1 << 20)  # of a chunk's parameters
    assert abs(came - 7 * elements() - stages) <= 8 * chunk


def test_every_worker_of_the_host_updates_what_lives_on_the_gpu(tmp_path):
    """Each has a buffer for the parameters that go up, so that it takes no
    longer than with parameters on the host."""
    near, r = simulate(tmp_path, *SHARED,
                       'zero_optimization.offload_param.device="none"')
    assert near, r.stderr
    far, _ = simulate(tmp_path, *SHARED)
    assert near["step_s"] < 1.1 * far["step_s"]


def test_a_ratio_without_a_gpu_is_refused(tmp_path):
    bare = json.loads(MACHINE.read_text())
    bare.update(gpus=0, gpu_bytes=0)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(bare))
    s, r = simulate(tmp_path, *SMALL, RATIO + "0.5", machine=path)
    assert s is None and r.returncode == 1
    assert "offload_optimizer.ratio: 0.5 leaves chunks to a GPU" in r.stderr


def test_tune_tries_ratios(tmp_path):
    path, best = tmp_path / "config.json", tmp_path / "best.json"
    base = config()
    base["model"].update(layers=4, width=2048, heads=16, vocab=1024)
    base["zero_optimization"]["offload_optimizer"]["ratio"] = 0.9
    base["train_batch_size"] = base["train_micro_batch_size_per_gpu"] = 1
    base["run"]["device_memory_limit_bytes"] = 0
    path.write_text(json.dumps(base))
    r = subprocess.run([ROOT / "tools/tune", path, "--machine", MACHINE, "--try",
                        "1", "--out", best], capture_output=True, text=True,
                       timeout=600)
    assert r.returncode == 0, r.stdout + r.stderr
    tried = r.stdout.split("front:")[0]
    rows = [x.split() for x in tried.splitlines() if x.strip()[:1].isdigit()]
    assert [x[-2] for x in rows] == ["1", "0.75", "0.5", "0.25", "0"]
    zero = json.loads(best.read_text())["zero_optimization"]
    fastest = max(rows, key=lambda x: float(x[0]))
    assert zero["offload_optimizer"]["ratio"] == float(fastest[-2]) < 1


def test_tune_writes_a_config_that_is_the_fastest_it_tried(tmp_path):
    path, best = tmp_path / "config.json", tmp_path / "best.json"
    base = config()
    base["model"].update(layers=4, width=512, heads=8, vocab=1024)
    base["run"]["device_memory_limit_bytes"] = 0
    path.write_text(json.dumps(base))
    r = subprocess.run([ROOT / "tools/tune", path, "--machine", MACHINE, "--try",
                        "5", "--out", best], capture_output=True, text=True,
                       timeout=600)
    assert r.returncode == 0, r.stdout + r.stderr
    tried, front = ([line.split() for line in part.splitlines()
                     if line.strip()[:1].isdigit()]
                    for part in r.stdout.split("front:"))
    assert len(tried) >= 5
    assert len(front) >= 1 and all(f in tried for f in front)
    fastest = max(float(t[0]) for t in tried)
    s, out = simulate_file(best)
    assert abs(s["tokens_per_s"] - fastest) <= 1, out.stdout
    for a in front:  # nothing tried is better in both
        assert not any(float(t[0]) > float(a[0]) and float(t[1]) < float(a[1])
                       for t in tried)


def test_tune_says_when_nothing_fits(tmp_path):
    path = tmp_path / "config.json"
    base = config()
    base["run"]["device_memory_limit_bytes"] = 1 << 20
    path.write_text(json.dumps(base))
    r = subprocess.run([ROOT / "tools/tune", path, "--machine", MACHINE],
                       capture_output=True, text=True, timeout=600)
    assert r.returncode == 1 and "nothing fits" in r.stderr
