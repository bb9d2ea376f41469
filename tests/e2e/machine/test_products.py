# SPDX-License-Identifier: Apache-2.0
"""Which products a CPU makes with parameters in bf16: what is chosen, kept, offered
and refused.  test_matrix.py has their bits, tests/codelets/ops their values."""
import os
import re
import subprocess

import pytest

import run
from inputs import described
from run import GPT2, planned

CONFIG = {"bf16.enabled": True, "run.save": True, "train_batch_size": 12}
WITHOUT = {"ONEDNN_MAX_CPU_ISA": "AVX2", "DNNL_MAX_CPU_ISA": "AVX2"}


def products(r):
    """What the header says that products are made in."""
    of_bf16, = re.findall(r"GFLOP/s in GEMM( of bf16)?(?: on rank 0)?$", r.out, re.M)
    return "bf16" if of_bf16 else "fp32"


def asked(kind, **more):
    return {**CONFIG, "run.cpu_products": kind, **more}


# Small layers are faster in fp32 on any machine: rounding and calling cost more than the
# product.
@pytest.mark.sanitized
@pytest.mark.parametrize("env, why", (({}, "in bf16 one of"), (WITHOUT, "oneDNN multiplies no")))
def test_auto_takes_what_is_faster_and_says_why(env, why, place, bf16_products):
    model = {"layers": 2, "heads": 1, "width": 8, "seq": 8, "vocab": 256}
    r = place.good(1, asked("auto", model=model), env=env)
    assert products(r) == r.config["run"]["cpu_products"] == "fp32"
    assert f"products in fp32: {why}" in r.out, str(r)


def test_bf16_that_cannot_be_is_refused_once(place, bf16_products):
    r = place.launch(3, asked("bf16"), env=WITHOUT)
    run.refused(r, "run.cpu_products: bf16: rank 0: oneDNN multiplies no")
    assert r.err.count("run.cpu_products") == 1, str(r)


@pytest.mark.parametrize("ranks, kind, lost", ((1, "fp32", {}), (2, "bf16", WITHOUT)))
def test_a_resumed_run_keeps_its_products(ranks, kind, lost, kept, bf16_products):
    key = "run.cpu_products"
    r = kept(ranks, key, kind, asked(kind), {key: "auto"}, lost,
             ("rank 0: oneDNN multiplies no", "this run began with it"))
    assert products(r) == kind


def test_less_memory_by_products_of_fp32_is_offered(place, bf16_products):
    """Rounded operands need scratch."""
    more = {"model": {**GPT2, "layers": 1}, "run.recompute": "full",
            "train_batch_size": 1, "run.memory_limit_bytes": 10**15}
    scratch = {}
    for kind in ("fp32", "bf16"):
        r = place.launch(1, asked(kind, **more), ["--plan"])
        scratch[kind] = planned(r.out, ("scratch",))
        total = planned(r.out, ("total",))
    assert scratch["fp32"] < scratch["bf16"]
    more["run.memory_limit_bytes"] = int(total - 2**20)
    r = place.launch(1, asked("bf16", **more), ["--plan"])
    run.refused(r, "it fits with run.cpu_products=fp32")
    assert place.launch(1, asked("fp32", **more), ["--plan"]).rc == 0


@pytest.mark.alone
def test_a_described_machine_makes_the_same_products(place, bf16_products):
    path, machine = described(place)
    assert machine["core_bf16_flops_per_s"] >= machine["core_flops_per_s"]
    more = {"model": GPT2, "train_batch_size": 1, "run.workers": machine["cores"],
            "run.memory_limit_bytes": 10**15}
    here, *there = (place.launch(1, asked(kind, **more), ["--plan", *at]) for kind, at in (
        ("bf16", ()), ("auto", ("--machine", path)), ("bf16", ("--machine", path))))
    for r in there:
        assert planned(r.out, ("scratch",)) == planned(here.out, ("scratch",))


def most_memory(config):
    """Bytes that were resident at most while `dlrm --plan` ran, but for what
    AddressSanitizer would keep of freed memory."""
    options = os.environ.get("ASAN_OPTIONS", "") + ":quarantine_size_mb=1"
    p = subprocess.Popen([run.built("models/dlrm"), str(config), "--plan"],
                         env=run.environment({"ASAN_OPTIONS": options}),
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(p.pid, 0)
    p.returncode = os.waitstatus_to_exitcode(status)
    assert p.returncode == 0
    return usage.ru_maxrss * 1024


def test_what_is_timed_is_small(place, bf16_products):
    """The largest matrix of this model is a table, which nothing is multiplied
    with."""
    model = {"preset": "criteo-1m", "rows": 10**6, "unit_rows": 10**6, "dim": 64}
    place.model = model
    peak = [most_memory(place.config(asked(kind, **{"run.memory_limit_bytes": 10**15})))
            for kind in ("fp32", "auto")]
    table = 4 * model["rows"] * model["dim"]
    assert peak[1] < peak[0] + table / 2
