# SPDX-License-Identifier: Apache-2.0
"""Whose kernels do attention's forward and backward on a GPU, and how many logits it
computes at a time: what is chosen, kept and refused, on the stand-in, which does the same
for all.  tests/codelets/gpu has what is asked of the library."""
import re

import pytest

import rows
import run

pytestmark = pytest.mark.skipif(run.GPU != "standin",
                                reason="needs the stand-in for a GPU")
CONFIG = {"bf16.enabled": True, "run.device": "cuda", "run.save": True,
          "train_batch_size": 12}
BY_CUDNN = "forward by cuDNN"
BACKWARD = "backward by cuDNN"
KEY, BOTH = "run.gpu_attention", "run.gpu_attention_backward"
LOGITS, FEW = "run.gpu_logits_bytes", 20 << 10
GPUS = {"IZ_STANDIN_DEVICES": "2", "IZ_STANDIN_CAPABILITY": "90", "STARPU_SILENT": "1"}


@pytest.fixture
def go(place):
    """Starts a run that asks for a kernel, with a cuDNN that may be gone; one that
    goes on where there is an output of that name."""
    def go(kind, out, cudnn="", good=True, ranks=1, options=(), capability=90, **more):
        output = place.folder / out
        act = place.good if good else place.launch
        return act(ranks, {**CONFIG, KEY: kind, **more},
                   options or (["--resume"] if output.exists() else ()), output,
                   {**GPUS, "IZ_STANDIN_CUDNN": cudnn,
                    "IZ_STANDIN_CAPABILITY": str(capability)})
    return go


def chosen(r, key=KEY):
    return r.config["run"][key.removeprefix("run.")]


def steps(n):
    return {"run.steps": n}


@pytest.mark.parametrize("recompute", ("widened", "none"))
def test_a_run_says_whose_kernel_it_takes(recompute, go):
    more = {"run.recompute": recompute, "run.sample_tokens": 3, "run.eval_batches": 1,
            "run.sample_prompt": "a"}
    bits = []
    for kind, back in (("auto", "auto"), ("own", "auto"), ("cudnn", "own"), ("own", "own")):
        r = go(kind, kind + back, **more, **{BOTH: back})
        for key, asked, said in ((KEY, kind, BY_CUDNN), (BOTH, back, BACKWARD)):
            assert chosen(r, key) == ("own" if asked == "own" else "cudnn"), str(r)
            assert (said in r.out) == (asked != "own"), str(r)
        bits.append(r.bits)
    assert bits == bits[:1] * 4


@pytest.mark.parametrize("cudnn, more, line", (
    ("", {}, "forward by cuDNN, backward by cuDNN"),
    ("", {"capability": 120}, "forward by cuDNN, backward by cuDNN"),
    ("no backward", {}, "forward by cuDNN, backward by izar: no plan for"),
    ("none", {}, "forward by izar, backward by izar: no plan for 16 tokens\n"),
    ("gone", {}, "forward by izar, backward by izar: libcudnn.so.9: not found\n"),
    ("", {"capability": 89}, "forward by izar, backward by izar: cuDNN's is not known to be faster"),
    ("", {"bf16.enabled": False}, "forward by izar, backward by izar: cuDNN's attention is of bf16"),
    ("", {"data.document_end": 32}, "forward by izar, backward by izar: cuDNN's attention does not")))
def test_auto_goes_by_a_rule_and_tells_why_not(cudnn, more, line, go):
    r = go("auto", "out", cudnn, **more)
    assert f"      attention: {line}" in r.out, str(r)
    for key, said in ((KEY, BY_CUDNN), (BOTH, BACKWARD)):
        assert chosen(r, key) == ("cudnn" if said in line else "own")


def test_attention_that_cudnn_has_not_is_ours(go, place):
    rows.use(place, "parallel")
    why = "cuDNN's attention has no window"
    assert f"forward by izar, backward by izar: {why}\n" in go("auto", "out").out
    run.refused(go("own", "new", good=False, **{BOTH: "cudnn"}), f"{BOTH}: cudnn: {why}; use own")


@pytest.mark.parametrize("cudnn", ("gone", "none"))
def test_all_ranks_take_the_same(cudnn, place):
    """The second one has no cuDNN, and the first one says so."""
    r = place.apart([["env", f"IZ_STANDIN_CUDNN={x}"] for x in ("", cudnn)],
                    {**CONFIG}, env={"IZ_STANDIN_DEVICES": "2"})
    assert r.rc == 0 and chosen(r) == chosen(r, BOTH) == "own", str(r)
    assert f"by izar: {'lib' if cudnn == 'gone' else 'no plan'}" in r.out, str(r)


GONE, NONE = {"IZ_STANDIN_CUDNN": "gone"}, {"IZ_STANDIN_CUDNN": "none"}
BEGAN = "this run began with it: own goes on with other bits"


@pytest.mark.parametrize("ranks, key, kind, lost, words", (
    (1, LOGITS, FEW, {}, ()), (1, KEY, "own", {}, ()),
    (1, KEY, "cudnn", GONE, ("libcudnn.so.9: not found", BEGAN)),
    (2, KEY, "cudnn", NONE, ("no plan for", BEGAN)),
    (2, KEY, "cudnn", {**NONE, KEY: "cudnn"}, ("no plan for", "; use own")),
    (1, BOTH, "cudnn", {"IZ_STANDIN_CUDNN": "no backward"}, ("no plan", BEGAN))))
def test_a_resumed_run_keeps_its_kernel(ranks, key, kind, lost, words, go, kept):
    r = kept(ranks, key, kind, {**CONFIG, **GPUS, KEY: "own", BOTH: "own", key: kind},
             {key: 0 if key == LOGITS else "auto"}, lost, ("rank 0: ", *words))
    assert (" by cuDNN" in r.out) == (kind == "cudnn")
    if lost == GONE:  # which is another choice
        assert chosen(go("own", r.output.name, "gone", **steps(8))) == "own"


@pytest.mark.parametrize("key, auto, begun, goes_on", (
    (KEY, "auto", "cudnn", "cudnn"), (KEY, "auto", "own", "own"), (KEY, "auto", None, "cudnn"),
    (LOGITS, 0, FEW, FEW), (LOGITS, 0, None, 256 << 20)))
def test_steps_on_the_cpu_forget_no_choice(key, auto, begun, goes_on, go):
    """And make none, where a run begins with them."""
    if begun:
        go("auto", "out", **{key: begun})
    cpu = go("auto", "out", "gone", **{**steps(6), "run.device": "cpu", key: auto})
    assert chosen(cpu, key) == (begun or auto) and BY_CUDNN not in cpu.out
    gpu = go("auto", "out", **{**steps(9), key: auto})
    assert chosen(gpu, key) == goes_on and (BY_CUDNN in gpu.out) == (goes_on != "own")


@pytest.mark.parametrize("ranks, key, cudnn, options, reason", (
    (1, KEY, "gone", ["--plan"], "libcudnn.so.9: not found; use own"),
    (2, KEY, "gone", [], "libcudnn.so.9: not found; use own"),
    (1, KEY, "none", [], "no plan for"), (2, BOTH, "no backward", [], "no plan for")))
def test_what_cannot_be_is_refused_once(ranks, key, cudnn, options, reason, go):
    r = go("own", "out", cudnn, False, ranks, options, **{key: "cudnn"})
    run.refused(r, f"{key}: cudnn: rank 0: ", reason)
    assert r.err.count(key) == 1 and not r.steps, str(r)


def test_without_a_gpu_nobody_asks(go):
    r = go("cudnn", "out", "gone", **{"run.device": "cpu"})
    assert BY_CUDNN not in r.out and chosen(r) == "cudnn"


def test_the_plan_counts_the_backward(go):
    """A matrix of 16 bits for the scores of each head, of one sample of two."""
    plan = {"options": ["--plan"], "run.device_memory_limit_bytes": 100 << 20,
            "model.seq": 4096, "train_batch_size": 2, "run.recompute": "full"}
    go("own", "own", **{**plan, BOTH: "own"})
    by = go("own", "cudnn", good=False, **{**plan, BOTH: "cudnn"})
    run.refused(by, f"izar: {BOTH}: cudnn takes ", "bytes more than own: a matrix")
    run.refused(by, f"izar: it fits with {BOTH}=own (")
    scratch, more = (float(re.search(x, by.err)[1]) for x in (
        r"scratch +(\d+\.\d+)", r"takes (\d+) bytes more"))
    auto = go("own", "auto", **{**plan, BOTH: "auto"})
    assert "backward by izar: the plan has no room for cuDNN's scratch" in auto.out
    scores = 2 * 3 * 4096**2 / 2**20
    assert scores < scratch < 1.2 * scores, str(by)
    assert scores / 2 < more / 2**20 < scores, str(by)
