# SPDX-License-Identifier: Apache-2.0
"""The tools around the measurements: figures and their spread, what counts as a change,
parsing, fitted exponents.  No timing."""
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import select
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import harness  # noqa: E402
from cases import kernels, peers, scaling  # noqa: E402


def load(name):
    loader = importlib.machinery.SourceFileLoader(f"bench_{name}",
                                                  str(ROOT / "bench" / name))
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


compare = load("compare")
learn = load("learn")


def figure(values, better="more", name="f", **more):
    return {"name": name, "unit": "u", "better": better,
            **harness.spread(values), **more}


def report(*figures, cpu="a", case="c"):
    return {"machine": {"cpu": cpu, "cores": 2, "memory_mib": 1, "izar": "x"},
            "load_before": 0.0, "load_after": 0.0,
            "cases": {case: {"about": "", "seconds": 1.0,
                             "figures": list(figures)}}}


def test_the_spread_is_the_middle_half():
    s = harness.spread([5, 1, 2, 4, 3])
    assert (s["median"], s["low"], s["high"], s["n"]) == (3, 2, 4, 5)
    assert harness.spread([7])["low"] == harness.spread([7])["high"] == 7


def test_rates_are_tried_until_the_best_has_worse_ones_on_both_sides():
    losses, power, loss = {}, 0, {-1: 4, 0: 3, 1: 2, 2: 1.5, 3: 1.6}
    while power is not None:
        losses[power] = loss[power]
        best, power = learn.best_rate(losses)
    assert best == 2
    assert losses == loss


@pytest.mark.parametrize("old, new, better, verdict", [
    ([1.0, 1.1, 1.2], [1.3, 1.4, 1.5], "more", "better"),
    ([1.0, 1.1, 1.2], [1.3, 1.4, 1.5], "less", "WORSE"),
    ([1.3, 1.4, 1.5], [1.0, 1.1, 1.2], "more", "WORSE"),
    ([1.0, 1.4, 1.8], [1.2, 1.6, 2.0], "more", "same"),  # within the noise
    ([1.00, 1.00, 1.00], [1.02, 1.02, 1.02], "more", "same"),  # too little
    ([1.0], [1.15], "more", "same"),  # one round says little
    ([1.0], [1.3], "more", "better"),
    ([-1.0] * 3, [-2.0] * 3, "more", "WORSE"),
    ([-1.0] * 3, [0.5] * 3, "less", "WORSE"),
    ([0.0] * 3, [2.0] * 3, "more", "better"),
    ([0.0] * 3, [2.0] * 3, "less", "WORSE"),
])
def test_a_change_is_told_from_noise(old, new, better, verdict):
    assert compare.line(("c", "f"), figure(old, better),
                        figure(new, better))[0] == verdict


def test_an_exponent_near_zero_has_not_moved():
    old, new = (figure([v] * 3, "less", unit="") for v in (-0.04, 0.04))
    assert compare.line(("c", "f"), old, new)[0] == "same"


def test_compare_names_what_came_and_went_and_another_machine():
    old = report(figure([1, 1, 1], name="kept"), figure([1], name="old"))
    new = report(figure([1, 1, 1], name="kept"), figure([1], name="new"), cpu="b")
    text = "\n".join(compare.compare(old, new))
    assert "not the same machine" in text
    assert "gone   c: old" in text and "new    c: new" in text
    assert "kept" not in text
    assert "kept" in "\n".join(compare.compare(old, new, True))
    # A case that was not run is not "gone".
    assert compare.compare(old, report(case="d")) == ["nothing moved"]


def test_compare_reads_files(tmp_path):
    for name, value in (("old", 1.0), ("new", 2.0)):
        (tmp_path / name).write_text(json.dumps(report(figure([value] * 3))))
    out = subprocess.run([ROOT / "bench/compare", tmp_path / "old",
                          tmp_path / "new"], capture_output=True, text=True,
                         check=True).stdout
    assert "\nbetter c: f" in out and "+100.0 %" in out


@pytest.mark.parametrize("name", ["compare", "gemm_libraries", "moments", "ratio", "run",
                                   "warm", "zero3_offload_blog"])
def test_programs_tell_their_usage(name):
    for argument, status in (("--help", 0), ("--nothing-of-this-name", 2)):
        out = subprocess.run([ROOT / "bench" / name, argument], text=True,
                             capture_output=True, check=False)
        said = out.stdout + out.stderr
        assert out.returncode == status, said
        assert said.startswith("usage: bench/" + name), said


def test_targets_have_a_direction():
    assert harness.met(figure([0.9], target=0.8))
    assert not harness.met(figure([0.7], target=0.8))
    assert harness.met(figure([0.7], "less", target=0.8))
    assert harness.met(figure([1.0])) is None
    assert "MISSED" in harness.figure_line(figure([0.7], target=0.8))


def test_output_of_programs_is_parsed():
    text = ("1 threads, SIMD level AVX-512\n"
            "adam, fp32 gradient, bf16 copy   54.0 GB/s    1800 M/s, limit   55.1 "
            "GB/s, ratio 0.980 (0.970 to 0.991), 80 of 90 pairs\n"
            "hash                           no clean pair of 9\n")
    assert kernels.parse(text) == {"adam, fp32 gradient, bf16 copy": (54.0, 0.98)}


def test_an_exponent_is_fitted():
    assert scaling.fit([1, 2, 4, 8], [3, 12, 48, 192]) == pytest.approx(2)
    assert scaling.fit([1, 10, 100], [5, 5, 5]) == pytest.approx(0)


# What peers/llmc_gpt.c takes from llm.c, with one tensor; the loss says what was called.
LLMC = r"""
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#define NUM_PARAMETER_TENSORS 1
typedef struct { int max_seq_len, vocab_size, padded_vocab_size, num_layers, num_heads,
                 channels; } GPT2Config;
typedef struct { float *all; } ParameterTensors;
typedef struct { GPT2Config config; ParameterTensors params; size_t param_sizes[1];
                 float *params_memory; size_t num_parameters; float mean_loss; } GPT2;
void fill_in_parameter_sizes(size_t *sizes, GPT2Config c)
{ sizes[0] = (size_t)(c.num_layers * c.channels * c.num_heads); }
float *malloc_and_point_parameters(ParameterTensors *p, size_t *sizes)
{ return p->all = malloc(4 * sizes[0]); }
void gpt2_forward(GPT2 *m, int *x, int *y, size_t b, size_t t)
{
    for (size_t i = 0; i < b * t; i++)
        if (x[i] >= m->config.vocab_size || y[i] >= m->config.vocab_size)
            abort();
    m->mean_loss += 1 + (float)m->config.padded_vocab_size;
}
void gpt2_zero_grad(GPT2 *m) { m->mean_loss *= 2; }
void gpt2_backward(GPT2 *m) { m->mean_loss += 3; }
void gpt2_update(GPT2 *m, float lr, float b1, float b2, float eps, float wd, int t)
{ m->mean_loss += 0.5f * (float)t; }
void gpt2_free(GPT2 *m) { free(m->params_memory); }
#ifndef TESTING
#error "its main would be in the way"
#endif
"""


def test_llmc_is_built_and_run_as_the_peer_case_does(tmp_path, monkeypatch):
    (tmp_path / "llm.c").mkdir()
    (tmp_path / "llm.c/train_gpt2.c").write_text(LLMC)
    monkeypatch.setattr(peers, "LLMC", str(tmp_path / "llm.c"))
    monkeypatch.setattr(peers, "ours", lambda b, model, samples, steps: 100.0)
    monkeypatch.setenv("IZ_BENCH_LLMC", str(tmp_path / "llm.c"))

    class Bench:
        folder = tmp_path
        quick = True

    b = harness.Case(Bench, "peers", "")
    peers.against_llmc(b)
    assert [f["name"] for f in b.figures] == [
        f"izar / llm.c, {shape[0]}" for shape in peers.SHAPES]
    assert all(f["n"] == 2 and f["median"] > 0 for f in b.figures)
    assert "-I $IZ_BENCH_LLMC bench/peers/llmc_gpt.c" in b.commands[0]
    row = b.call_json([tmp_path / "llmc_gpt", 1, 1, 2, 8, 256, 2, 2])[0]
    assert len(row["seconds"]) == 2
    assert row["loss"] == ((257 * 2 + 3.5) + 257) * 2 + 3 + 1


class FakeCase:
    """A case that fails, or needs what is not here."""

    ABOUT = "x"

    def __init__(self, fault):
        self.fault = fault

    def run(self, b):
        b.figure("first", 1, "u")
        raise self.fault


@pytest.mark.parametrize("fault, key", [(RuntimeError("boom"), "error"),
                                        (KeyError("boom"), "error"),
                                        (harness.Absent("tool"), "absent")])
def test_a_case_that_fails_keeps_its_figures(fault, key, tmp_path, capsys):
    out = harness.run_case(harness.Bench(True, tmp_path), "fake", FakeCase(fault))
    assert str(fault) in out[key] and [f["name"] for f in out["figures"]] == ["first"]
    assert str(fault) in capsys.readouterr().out


def test_every_case_is_listed():
    out = subprocess.run([ROOT / "bench/run", "--list"], capture_output=True,
                         text=True, check=True).stdout
    cases = {p.stem for p in (ROOT / "bench/cases").glob("*.py")}
    assert {line.split()[0] for line in out.splitlines()} == cases
    bad = subprocess.run([ROOT / "bench/run", "nonsense"], capture_output=True,
                         text=True, check=False)
    assert bad.returncode == 2 and "no case nonsense" in bad.stderr


def test_a_program_is_killed_with_its_parent():
    code = """import subprocess, sys
sys.path.insert(0, sys.argv[1])
import harness
p = subprocess.Popen(["sleep", "600"], preexec_fn=harness.with_parent)
print(p.pid, flush=True)
p.wait()
"""
    p = subprocess.Popen([sys.executable, "-c", code, ROOT / "bench"], text=True,
                         stdout=subprocess.PIPE)
    child = os.pidfd_open(int(p.stdout.readline()))
    p.kill()
    p.communicate()
    assert select.select([child], [], [], 60)[0], "it lives on"
    os.close(child)
