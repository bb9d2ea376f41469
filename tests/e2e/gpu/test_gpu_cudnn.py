# SPDX-License-Identifier: Apache-2.0
"""Whose kernels do attention's forward and backward on a GPU: what is chosen, kept and
refused, on the stand-in, which does the same for both and pretends to take a time.  tests/codelets/gpu has what is asked of the library."""
import re

import pytest

import run

pytestmark = pytest.mark.skipif(run.GPU != "standin",
                                reason="needs the stand-in for a GPU")
CONFIG = {"bf16.enabled": True, "run.device": "cuda", "run.save": True,
          "train_batch_size": 12}
BY_CUDNN = "forward of attention by cuDNN"
BACKWARD = "backward of attention by cuDNN"
KEY = "run.gpu_attention"


@pytest.fixture
def go(place):
    """Starts a run that asks for a kernel, with a cuDNN that may be gone; one that
    goes on where there is an output of that name."""
    def go(kind, out, cudnn="", good=True, ranks=1, options=(), times="", **more):
        output = place.folder / out
        act = place.good if good else place.launch
        return act(ranks, {**CONFIG, KEY: kind, **more},
                   options or (["--resume"] if output.exists() else ()), output,
                   {"IZ_STANDIN_CUDNN": cudnn, "IZ_STANDIN_DEVICES": "2",
                    "IZ_STANDIN_ATTENTION": times, "STARPU_SILENT": "1"})
    return go


def chosen(r, key="gpu_attention"):
    return r.config["run"][key]


def steps(n):
    return {"run.steps": n}


@pytest.mark.parametrize("recompute", ("full", "widened", "none"))
def test_a_run_says_whose_kernel_it_takes(recompute, go):
    more = {"run.recompute": recompute, "run.sample_tokens": 3, "run.eval_batches": 1,
            "run.sample_prompt": "a"}
    r = {kind: go(kind, kind, **more) for kind in ("auto", "own", "cudnn")}
    assert chosen(r["auto"]) == chosen(r["own"]) == "own" and chosen(r["cudnn"]) == "cudnn"
    assert BY_CUDNN in r["cudnn"].out and BY_CUDNN not in r["auto"].out + r["own"].out
    assert r["auto"].bits == r["own"].bits == r["cudnn"].bits


def test_a_resumed_run_keeps_its_kernel(go):
    for kind in ("cudnn", "own"):
        go(kind, kind)
        b = go("auto", kind, **steps(6))
        assert chosen(b) == kind and (BY_CUDNN in b.out) == (kind == "cudnn")
    r = go("auto", "cudnn", "gone", good=False, **steps(8))
    run.refused(r, f"{KEY}: cudnn: rank 0: libcudnn.so.9: not found", "this run began "
                "with it: own goes on with other bits")
    assert chosen(go("own", "cudnn", "gone", **steps(8))) == "own"


@pytest.mark.parametrize("kind", ("cudnn", "own"))
def test_steps_on_the_cpu_forget_no_kernel(kind, go):
    go(kind, "out")
    cpu = go("auto", "out", "gone", **steps(6), **{"run.device": "cpu"})
    assert chosen(cpu) == kind and BY_CUDNN not in cpu.out
    gpu = go("auto", "out", **steps(9))
    assert chosen(gpu) == kind and (BY_CUDNN in gpu.out) == (kind == "cudnn")


def test_a_run_that_began_without_a_gpu_has_chosen_nothing(go):
    """And one whose config cannot be read is not gone on with."""
    cpu = {"run.device": "cpu"}
    for n in (3, 6):
        assert chosen(go("auto", "cpu", **steps(n), **cpu)) == "auto"
    gpu = go("auto", "cpu", **steps(9))
    assert chosen(gpu) == "own" and BY_CUDNN not in gpu.out
    (gpu.output / "config.json").unlink()
    r = go("auto", "cpu", good=False, **steps(12), **cpu,
           **{"run.cpu_products": "fp32"})
    run.refused(r, f"{KEY}: auto:", "config.json does not tell")


@pytest.mark.parametrize("ranks", (1, 2))
def test_a_library_that_lost_its_kernel_says_what_the_run_began_with(ranks, go):
    go("cudnn", "lost", ranks=ranks)
    for kind, words in (("auto", "this run began with it: own goes on with other bits"),
                        ("cudnn", "; use own")):
        r = go(kind, "lost", "none", good=False, ranks=ranks, **steps(6))
        run.refused(r, f"{KEY}: cudnn: rank 0: no plan for", words)
        assert r.err.count(KEY) == 1, str(r)


@pytest.mark.parametrize("cudnn, reason", (("gone", "libcudnn.so.9: not found; use own"),
                                           ("none", "no plan for")))
@pytest.mark.parametrize("ranks", (1, 2))
def test_what_cannot_be_is_refused_once(ranks, cudnn, reason, go):
    r = go("cudnn", "out", cudnn, good=False, ranks=ranks)
    run.refused(r, f"{KEY}: cudnn: rank 0: ", reason)
    assert r.err.count(KEY) == 1 and not r.steps, str(r)
    if ranks == 1 and cudnn == "gone":
        r = go("cudnn", "plan", cudnn, good=False, options=["--plan"])
        run.refused(r, f"{KEY}: cudnn: rank 0: ", reason)


def test_without_a_gpu_nobody_asks(go):
    r = go("cudnn", "out", "gone", **{"run.device": "cpu"})
    assert BY_CUDNN not in r.out and chosen(r) == "cudnn"


# ---- the faster forward ----

@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("times, kind", (("40,10", "cudnn"), ("40,39.5", "own")))
def test_the_faster_forward_is_taken_and_kept(times, kind, ranks, go):
    """Less than two of a hundred are no reason for cuDNN's, nor is what the times would
    be later.  By the times it says how often a micro-batch calls the forward."""
    r = go("timed", "out", times=times, ranks=ranks)
    own, cudnn = (float(t) for t in times.split(","))
    n = r.config["model"]["layers"]
    assert (f"forward of attention: {kind}; per micro-batch own takes {n * own:.3f} ms, "
            f"cudnn {n * cudnn:.3f} ms") in r.out, str(r)
    assert chosen(r) == kind and (BY_CUDNN in r.out) == (kind == "cudnn")
    for steps_, ask in ((6, "auto"), (9, "timed")):
        again = go(ask, "out", times="10,40" if kind == "cudnn" else "40,10", ranks=ranks,
                   **steps(steps_))
        assert chosen(again) == kind and "per micro-batch own" not in again.out
        assert (BY_CUDNN in again.out) == (kind == "cudnn")


@pytest.mark.parametrize("cudnn, more, reason", (
    ("gone", {}, "libcudnn.so.9: not found"), ("none", {}, "no plan for"),
    ("", {"bf16.enabled": False}, "cuDNN's attention is of bf16 and fp16"),
    ("", {}, "there was too little time")))
def test_where_cudnn_cannot_be_had_timed_is_own(cudnn, more, reason, go):
    r = go("timed", "out", cudnn, times="40,10" if reason[0] != "t" else "9000,10", **more)
    assert f"forward of attention: own, not timed: {reason}" in r.out, str(r)
    assert chosen(r) == "own" and BY_CUDNN not in r.out


def test_a_run_that_began_without_a_gpu_times_later(go):
    for n, kind in ((3, "timed"), (6, "auto")):
        cpu = go(kind, "out", "gone", **steps(n), **{"run.device": "cpu"})
        assert chosen(cpu) == "timed"
    assert chosen(go("auto", "out", times="40,10", **steps(9))) == "cudnn"


# ---- the backward ----

def test_the_backward_is_chosen_kept_and_refused(go):
    key = "run.gpu_attention_backward"
    r = {kind: go("own", kind, **{key: kind}) for kind in ("auto", "cudnn")}
    assert r["auto"].bits == r["cudnn"].bits
    assert BACKWARD in r["cudnn"].out and BACKWARD not in r["auto"].out
    assert chosen(r["auto"], key[4:]) == "own" and BY_CUDNN not in r["cudnn"].out
    again = go("auto", "cudnn", **steps(6))
    assert BACKWARD in again.out and chosen(again, key[4:]) == "cudnn"
    for cudnn, words in (("gone", "libcudnn.so.9: not found"), ("no backward", "no plan")):
        lost = go("auto", "cudnn", cudnn, good=False, **steps(9))
        run.refused(lost, f"{key}: cudnn: rank 0: {words}", "this run began with it: own")
    run.refused(go("own", "new", "no backward", good=False, **{key: "cudnn"}),
                f"{key}: cudnn: rank 0: no plan", "; use own")


def test_the_plan_counts_the_backward(go):
    """A matrix of 16 bits for the scores of each head, of one sample of two."""
    key = "run.gpu_attention_backward"
    plan = {"options": ["--plan"], "run.device_memory_limit_bytes": 100 << 20,
            "model.seq": 4096, "train_batch_size": 2, "run.recompute": "full"}
    go("own", "own", **{**plan, key: "own"})
    by = go("own", "cudnn", good=False, **{**plan, key: "cudnn"})
    run.refused(by, f"izar: {key}: cudnn takes ", "bytes more than own: a matrix")
    run.refused(by, f"izar: it fits with {key}=own (")
    scratch, more = (float(re.search(x, by.err)[1]) for x in (
        r"scratch +(\d+\.\d+)", r"takes (\d+) bytes more"))
    scores = 2 * 3 * 4096**2 / 2**20
    assert scores < scratch < 1.2 * scores, str(by)
    assert scores / 2 < more / 2**20 < scores, str(by)
