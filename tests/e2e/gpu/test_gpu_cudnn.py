# SPDX-License-Identifier: Apache-2.0
"""Whose kernel does attention's forward on a GPU: what is chosen, kept and refused, on
the stand-in, which does the same for both.  tests/codelets/gpu has what is asked of the library."""
import pytest

import run

pytestmark = pytest.mark.skipif(run.GPU != "standin",
                                reason="needs the stand-in for a GPU")
CONFIG = {"bf16.enabled": True, "run.device": "cuda", "run.save": True,
          "train_batch_size": 12}
BY_CUDNN = "forward of attention by cuDNN"
KEY = "run.gpu_attention"


@pytest.fixture
def go(place):
    """Starts a run that asks for a kernel, with a cuDNN that may be gone; one that
    goes on where there is an output of that name."""
    def go(kind, out, cudnn="", good=True, ranks=1, options=(), **more):
        output = place.folder / out
        act = place.good if good else place.launch
        return act(ranks, {**CONFIG, KEY: kind, **more},
                   options or (["--resume"] if output.exists() else ()), output,
                   {"IZ_STANDIN_CUDNN": cudnn, "IZ_STANDIN_DEVICES": "2",
                    "STARPU_SILENT": "1"})
    return go


def chosen(r):
    return r.config["run"]["gpu_attention"]


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
