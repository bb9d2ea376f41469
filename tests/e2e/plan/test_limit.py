# SPDX-License-Identifier: Apache-2.0
"""A state four times as large as the memory: refused with the way out, and
trained from disk in bounded memory with the numbers of an unlimited run."""
import contextlib
import os
import pathlib
import re

import pytest

import rows
import run
from test_bytes import CONSTANT_MIB

MODEL = {"layers": 80, "heads": 4, "width": 192, "seq": 16, "vocab": 256}
ZERO = {"stage": 3, "sub_group_size": 1 << 16}
CONFIG = {"model": MODEL, "bf16.enabled": True, "run.steps": 2,
          "train_batch_size": 1, "zero_optimization": ZERO, "run.ring": 2,
          "run.recompute": "full"}
STATE = 12 * run.parameters(MODEL)  # bytes of master, m and v
LIMIT = STATE // 4


def disk(nvme):
    zero = run.offload(3, "nvme", "nvme", nvme)["zero_optimization"]
    zero["offload_optimizer"]["buffer_count"] = 4
    return {"zero_optimization": {**ZERO, **zero}}


def limited(bytes_):
    return {"run.memory_limit_bytes": bytes_}


def test_what_does_not_fit_is_refused_with_what_would(place):
    r = place.launch(1, {**CONFIG, **limited(LIMIT)})
    line = run.refused(r, "this run needs", "MiB of memory per rank")
    need, have = map(float, re.findall(r"([\d.]+) MiB", line))
    assert have == pytest.approx(LIMIT / run.MIB, abs=0.1)
    assert need > 4 * have
    # The table, class by class, and the total that the message names.
    for word in ("parameters", "gradients", "optimizer"):
        assert re.search(rf"^  {word} +[\d.]+ +[\d.]+ +[\d.]+$", r.err, re.M)
    total = re.search(r"^  total +([\d.]+) +([\d.]+) +[\d.]+$", r.err, re.M)
    assert sum(map(float, total.groups())) == pytest.approx(need, abs=0.11)
    assert re.search(r"it fits with .*offload_optimizer.device=nvme", r.err)
    assert not (r.output / "metrics.jsonl").exists()


def fits_with(place, config, nvme):
    """What is said to fit, which --plan then takes, with that total; None: nothing is."""
    r = place.launch(1, config, ["--plan"])
    run.refused(r, "this run needs", "MiB of memory per rank")
    change = re.search(r"it fits with (.*) \(([\d.]+) MiB\)", r.err)
    if not change:
        return None
    options = ["--plan"]
    for item in change[1].split(" and "):
        options += ["--set", item]
        if item.endswith(".device=nvme"):
            options += ["--set", item.replace("device=nvme", f"nvme_path={nvme}")]
    again = place.launch(1, config, options)
    assert again.rc == 0, str(again)
    total = re.search(r"^  total +([\d.]+) +([\d.]+)", again.out, re.M)
    assert sum(map(float, total.groups())) == pytest.approx(float(change[2]), abs=0.2)
    return change[1]


@pytest.mark.sanitized
def test_the_suggested_change_does_fit(place, nvme):
    seen = {fits_with(place, {**CONFIG, "run.ring": 60, **limited(int(part * STATE))}, nvme)
            for part in (0.97, LIMIT / STATE)}
    assert len(seen) == 2 and None not in seen, seen


ASYNC = {"model.width": 192, "zero_optimization.stage": 1, "run.save_mode": "async",
         "zero_optimization.sub_group_size": 1, "run.recompute": "full"}
BATCH = {"train_batch_size": 12, "run.workers": 1, "run.recompute": "full"}


@pytest.mark.parametrize("model, more, change", (
    ("pairs", BATCH, "train_micro_batch_size_per_gpu=2 and gradient_accumulation_steps=6"),
    ("gpt2", {**BATCH, "model.seq": 64, "run.slices": 2}, "train_micro_batch_size_per_gpu=1 and "
     "gradient_accumulation_steps=12 and run.slices=0"),
    ("gpt2", {**BATCH, "model.seq": 512, "model.width": 96, "bf16.enabled": True},
     "train_micro_batch_size_per_gpu=1 and gradient_accumulation_steps=12"),
    ("gpt2", {"model.seq": 2048, "train_batch_size": 1, "run.workers": 1, "lora": {
        "rank": 2, "targets": "*", "dropout": 0.1}}, None),
    ("gpt2", {"train_batch_size": 1 << 32, "train_micro_batch_size_per_gpu": 1 << 16,
              "gradient_accumulation_steps": 1 << 16, "run.workers": 1}, None),
    ("gpt2", ASYNC, "zero_optimization.offload_optimizer.device=nvme"),
    *(("gpt2", {**ASYNC, **more}, "run.save_mode=auto and "
       "zero_optimization.offload_optimizer.device=nvme")
      for more in ({"run.state_dtype": "bf16"}, {"run.nvme_checksum": True}))))
def test_a_suggested_change_is_one_that_a_config_may_have(model, more, change, place, nvme):
    """Pairs stay together, slices divide, sums of several micro-batches are fp32, samples
    with dropout stay whole, there are at most 10^6 micro-batches, and saves can read what
    is on nvme."""
    rows.use(place, model)
    config = {**rows.BESIDE.get(model, (None, {}))[1], **more}
    r = place.launch(1, config, ["--plan"])
    total = re.search(r"^  total +([\d.]+) +([\d.]+)", r.out, re.M)
    limit = int(0.75 * sum(map(float, total.groups())) * run.MIB)
    assert fits_with(place, {**config, **limited(limit)}, nvme) == change


@pytest.mark.parametrize("ranks", (pytest.param(1, marks=pytest.mark.sanitized), 2))
def test_hopeless_limit_is_told_once(ranks, place):
    r = place.launch(ranks, {**CONFIG, "train_batch_size": ranks, **limited(1 << 20)})
    run.refused(r, "this run needs", "MiB of memory per rank")
    run.refused(r, "are not enough: it needs more ranks")


# ---- larger than memory ----

BASE = {**MODEL, "width": 256, "layers": 160, "base_dtype": "nf4"}
CODES = 12 * BASE["width"]**2 * BASE["layers"] * 33 // 64  # 4.125 bits each
EXPERTS = {"layers": 40, "heads": 4, "kv_heads": 2, "width": 64, "seq": 16, "vocab": 256,
           "qk_norm": True, "num_experts": 24, "num_experts_per_tok": 2,
           "moe_intermediate_size": 64}
OF_EXPERTS = 12 * 3 * 24 * 64 * 64 * EXPERTS["layers"]  # of their matrices alone
# Boundaries of four micro-batches side by side.
DEEP = {**MODEL, "layers": 30, "width": 32, "seq": 256}
BOUNDARIES = 4 * DEEP["layers"] * 2 * 256 * 32 * 4
WIDE = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
        "run.schedule": "breadth_first"}


def boundaries(nvme):
    return {"activation_checkpointing.cpu_checkpointing": True,
            "activation_checkpointing.nvme_path": str(nvme)}


# Of what model, settings, the limit, what is then far, and its bytes on disk at least.
# A step's tokens may miss some experts; all of them have an update.
BEYOND = {
    "states": ("gpt2", MODEL, {"run.nvme_checksum": True}, LIMIT, disk, STATE),
    "a base in 4 bits": ("gpt2", BASE, {"lora": {"rank": 2, "targets": "*"}}, CODES // 4,
                         disk, CODES),
    "experts": ("moe", EXPERTS, {}, OF_EXPERTS // 4, disk, OF_EXPERTS),
    "boundaries": ("gpt2", DEEP, WIDE, BOUNDARIES * 3 // 2, boundaries,
                   BOUNDARIES),
}


@pytest.mark.parametrize("name", BEYOND)
def test_what_does_not_fit_trains_from_disk(name, place, nvme):
    """With the numbers of a run without a limit."""
    model, shape, more, limit, far, least = BEYOND[name]
    rows.use(place, model, {model: shape})
    c = {**{k: v for k, v in CONFIG.items() if k != "model"}, **more}
    run.refused(place.launch(1, {**c, **limited(limit)}), "of memory per rank, there are")
    r = place.good(1, {**c, **far(nvme), **limited(limit)})
    assert r.numbers == place.good(1, c).numbers
    assert r.bytes_in("device", "cpu") <= limit and r.bytes_in("nvme") >= least
    assert r.summary["peak_resident_bytes"] <= limit + CONSTANT_MIB * run.MIB


def test_a_block_of_experts_need_not_fit(place, nvme):
    """What a device has at a time is less than the parameters of one alone; beside it
    the host has gradients of all blocks."""
    model = {"layers": 2, "heads": 2, "width": 64, "seq": 8, "vocab": 256,
             "num_experts": 512, "num_experts_per_tok": 2,
             "moe_intermediate_size": 64, "experts_per_unit": 16}
    place.use(run.built("models/moe"), model)
    c = {k: v for k, v in CONFIG.items() if k != "model"}
    block = 2 * 3 * 512 * 64 * 64
    tight = {**disk(nvme), **limited(3 * block)}
    run.refused(place.launch(1, {**c, **tight, "model.experts_per_unit": 0}),
                "of memory per rank, there are")
    r = place.good(1, {**c, **tight})
    assert r.bytes_in("device") < block // 4
    assert r.numbers == place.good(1, c).numbers


@contextlib.contextmanager
def in_a_group(place, controller, limits, before="true"):
    """Programs of `place` run in a control group, below one that has these limits, of
    version 1 and 2, after a command."""
    top = pathlib.Path("/sys/fs/cgroup")
    old = (top / controller).is_dir()
    group = top / (controller if old else "") / f"izar-{os.getpid()}"
    below = group / "below"
    try:
        below.mkdir(parents=True)
        for name, value in limits[not old].items():
            (group / name).write_text(str(value))
        place.wrap(f"#!/bin/sh\necho $$ >{below}/cgroup.procs || exit 77\n{before}\n"
                   "exec {} \"$@\"\n")
        yield
    except OSError as e:
        pytest.skip(str(e))
    finally:
        for folder in (below, group):
            with contextlib.suppress(OSError):
                folder.rmdir()


def launch_in_group(place, *args):
    r = place.launch(*args)
    if r.rc == 77:
        pytest.skip(r.err)
    return r


def test_the_limit_of_a_cgroup_counts(place):
    """Of one above the process's own, in both versions; of what it holds, pages of
    files that nobody uses are free."""
    limit = 300 * run.MIB
    many = f"head -c 150M /dev/zero >{place.folder}/many; sync {place.folder}/many"
    free = 0
    with in_a_group(place, "memory", ({"memory.limit_in_bytes": limit},
                                      {"memory.max": limit}), many):
        for _ in range(5):  # the kernel's figures may be seconds old
            r = launch_in_group(place, 1, {"model": run.GPT2}, ["--plan"])
            line = run.refused(r, "this run needs", "MiB of memory per rank")
            assert float(re.findall(r"([\d.]+) MiB", line)[1]) < 300
            # No reserve: somebody has set this limit for what runs in the group.
            free, beside = map(float, re.findall(
                r"([\d.]+) MiB", r.out[r.out.index("this host: "):])[:2])
            if free > 200:
                break
    assert 200 < free < 300 and beside > 222 and "reserve" not in r.out


def test_the_quota_of_a_cgroup_counts(place):
    """As many workers as have time, and one at least; the user's number is taken."""
    half = ({"cpu.cfs_quota_us": 50000}, {"cpu.max": "50000 100000"})
    with in_a_group(place, "cpu", half):
        for wish, workers in ((0, 1), (2, 2)):
            r = launch_in_group(place, 1, {"run.steps": 1, "run.workers": wish})
            assert r.rc == 0, str(r)
            assert re.search(rf"rank 0: {workers} worker.*, quota of 0.5 core\b", r.out, re.M)


def test_a_plan_leaves_the_host_a_reserve(place):
    """A run is refused that would take all that is free."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / run.MIB
    said = place.launch(1, {}, ["--plan"]).out
    line = re.search(r"^this host: ([\d.]+) MiB are free for ranks beside a reserve of "
                     r"([\d.]+) MiB; a rank needs ([\d.]+) MiB of them beside its plan",
                     said, re.M)
    if not line:
        pytest.skip("a control group limits this host")
    free, reserve, beside = map(float, line.groups())
    assert reserve == pytest.approx(max(1024, total / 33), abs=0.1)
    assert free + reserve < total
    assert 222 < beside < CONSTANT_MIB
    layers = int((free + reserve) * run.MIB / (16 * 12 * 768**2))
    r = place.launch(1, {"model": {**run.GPT2, "layers": layers}})
    line = run.refused(r, "this run needs", "MiB of memory per rank")
    assert float(re.findall(r"([\d.]+) MiB", line)[1]) < total - reserve
    assert "beside a reserve of" in r.err and not r.steps
    assert "reserve" not in place.launch(1, limited(10**15), ["--plan"]).out
