# SPDX-License-Identifier: Apache-2.0
"""Whose kernel does attention's forward on a GPU: what is chosen, kept and refused, on
the stand-in, which does the same for both.  tests/codelets/gpu has what is asked of the library."""
import json
import os

import pytest

import run

pytestmark = pytest.mark.skipif(os.environ.get("IZ_TEST_GPU", "") != "standin",
                                reason="needs the stand-in for a GPU")
CONFIG = {"bf16.enabled": True, "run.device": "cuda", "run.save": True,
          "train_batch_size": 12}
BY_CUDNN = "forward of attention by cuDNN"
KEY = "run.gpu_attention"


def asked(kind, **more):
    return {**CONFIG, KEY: kind, **more}


def env(cudnn=""):
    return {"IZ_STANDIN_CUDNN": cudnn, "IZ_STANDIN_DEVICES": "2", "STARPU_SILENT": "1"}


def chosen(r):
    return json.loads((r.output / "config.json").read_text())["run"]["gpu_attention"]


@pytest.mark.parametrize("recompute", ("full", "none"))
def test_a_run_says_whose_kernel_it_takes(recompute, place):
    more = {"run.recompute": recompute, "run.sample_tokens": 3, "run.eval_batches": 1,
            "run.sample_prompt": "a"}
    r = {kind: place.good(None, asked(kind, **more), env=env(), output=place.folder / kind)
         for kind in ("auto", "own", "cudnn")}
    assert chosen(r["auto"]) == chosen(r["own"]) == "own" and chosen(r["cudnn"]) == "cudnn"
    assert BY_CUDNN in r["cudnn"].out and BY_CUDNN not in r["auto"].out + r["own"].out
    assert r["auto"].bits == r["own"].bits == r["cudnn"].bits


def test_a_resumed_run_keeps_its_kernel(place):
    for kind in ("cudnn", "own"):
        a = place.good(None, asked(kind), env=env(), output=place.folder / kind)
        b = place.good(None, asked("auto", **{"run.steps": 6}), ["--resume"], a.output,
                       env=env())
        assert chosen(b) == kind and (BY_CUDNN in b.out) == (kind == "cudnn")
    out = place.folder / "cudnn"
    r = place.launch(None, asked("auto", **{"run.steps": 8}), ["--resume"], out,
                     env=env("gone"))
    run.refused(r, f"{KEY}: cudnn: rank 0: libcudnn.so.9: not found", "this run began "
                "with it: own goes on with other bits")
    b = place.good(None, asked("own", **{"run.steps": 8}), ["--resume"], out,
                   env=env("gone"))
    assert chosen(b) == "own"


@pytest.mark.parametrize("kind", ("cudnn", "own"))
def test_steps_on_the_cpu_forget_no_kernel(kind, place):
    out = place.folder / kind
    place.good(None, asked(kind), env=env(), output=out)
    cpu = place.good(None, asked("auto", **{"run.steps": 6, "run.device": "cpu"}),
                     ["--resume"], out, env=env("gone"))
    assert chosen(cpu) == kind and BY_CUDNN not in cpu.out
    gpu = place.good(None, asked("auto", **{"run.steps": 9}), ["--resume"], out, env=env())
    assert chosen(gpu) == kind and (BY_CUDNN in gpu.out) == (kind == "cudnn")


def test_a_run_that_began_without_a_gpu_has_chosen_nothing(place):
    """And one whose config cannot be read is not gone on with."""
    out = place.folder / "cpu"
    cpu = {"run.device": "cpu"}
    for steps, options in ((3, []), (6, ["--resume"])):
        r = place.good(None, asked("auto", **cpu, **{"run.steps": steps}), options, out,
                       env=env())
        assert chosen(r) == "auto"
    gpu = place.good(None, asked("auto", **{"run.steps": 9}), ["--resume"], out, env=env())
    assert chosen(gpu) == "own" and BY_CUDNN not in gpu.out
    (out / "config.json").unlink()
    more = asked("auto", **cpu, **{"run.steps": 12, "run.cpu_products": "fp32"})
    r = place.launch(None, more, ["--resume"], out, env=env())
    run.refused(r, f"{KEY}: auto:", "config.json does not tell")


@pytest.mark.parametrize("ranks", (None, 2))
def test_a_library_that_lost_its_kernel_says_what_the_run_began_with(ranks, place):
    out = place.folder / "lost"
    place.good(ranks, asked("cudnn"), env=env(), output=out)
    for kind, words in (("auto", "this run began with it: own goes on with other bits"),
                        ("cudnn", "; use own")):
        r = place.launch(ranks, asked(kind, **{"run.steps": 6}), ["--resume"], out,
                         env=env("none"))
        run.refused(r, f"{KEY}: cudnn: rank 0: no plan for", words)
        assert r.err.count(KEY) == 1, str(r)


@pytest.mark.parametrize("cudnn, reason", (("gone", "libcudnn.so.9: not found; use own"),
                                           ("none", "no plan for")))
@pytest.mark.parametrize("ranks", (None, 2))
def test_what_cannot_be_is_refused_once(ranks, cudnn, reason, place):
    r = place.launch(ranks, asked("cudnn"), env=env(cudnn))
    run.refused(r, f"{KEY}: cudnn: rank 0: ", reason)
    assert r.err.count(KEY) == 1 and not r.steps, str(r)
    if ranks is None and cudnn == "gone":
        r = place.launch(None, asked("cudnn"), ["--plan"], env=env(cudnn))
        run.refused(r, f"{KEY}: cudnn: rank 0: ", reason)


def test_without_a_gpu_nobody_asks(place):
    r = place.good(None, asked("cudnn", **{"run.device": "cpu"}), env=env("gone"))
    assert BY_CUDNN not in r.out and chosen(r) == "cudnn"
