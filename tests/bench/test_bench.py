# SPDX-License-Identifier: Apache-2.0
"""The tools around the measurements: figures and their spread, what counts as a change,
parsing, fitted exponents.  No timing."""
import json
import pathlib
import runpy
import subprocess
import sys
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import harness  # noqa: E402
from cases import kernels, scaling, simulate  # noqa: E402


compare, learn = (types.SimpleNamespace(**runpy.run_path(str(ROOT / "bench" / name)))
                  for name in ("compare", "learn"))


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


def test_a_rate_that_diverges_is_the_worst(monkeypatch, tmp_path, capsys):
    """Also of a program that trains; the file has each run at once."""
    def fake(case, config, **_):
        rate, out = config["optimizer"]["params"]["lr"], tmp_path / "out"
        report = json.loads(out.read_text())
        assert len(report["tuning"] + report["runs"]) == len(rates)
        rates.append(rate)
        if rate > 2e-3 or config["run"]["seed"] == 2:
            raise RuntimeError("izar: the loss or its gradient is not finite after step 3")
        lines = [{"step": 6, "validation_loss": 2 - rate}, {"step": 6, "seconds": 1.0}]
        return harness.Training(lines)

    rates = []
    monkeypatch.setattr(harness.Case, "train", fake)
    monkeypatch.setattr(sys, "argv", ["learn", "experts", "--steps", "6", "--seeds", "1",
                                      "--out", str(tmp_path / "out")])
    learn.main()
    said = capsys.readouterr().out
    assert rates == [3e-3, 1.5e-3, 0.75e-3] * 2 + [1.5e-3] * 2
    assert said.count("diverges") == 4 and "dense at 0.0015: inf" in said


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


def test_compare_names_what_came_and_went_and_another_machine(tmp_path):
    kept = figure([1, 1, 1], name="kept")
    old = report(kept, figure([1], name="old"), figure([1.0] * 3))
    new = report(kept, figure([1], name="new"), figure([2.0] * 3), cpu="b")
    for name, r in (("old", old), ("new", new)):
        (tmp_path / name).write_text(json.dumps(r))
    text = harness.sh(ROOT / "bench/compare", tmp_path / "old", tmp_path / "new")
    assert "not the same machine" in text
    assert "gone   c: old" in text and "new    c: new" in text
    assert "\nbetter c: f" in text and "+100.0 %" in text
    assert "kept" not in text
    assert "kept" in "\n".join(compare.compare(old, new, True))
    # A case that was not run is not "gone".
    assert compare.compare(old, report(case="d")) == ["nothing moved"]


@pytest.mark.parametrize("text", ["", "{", '{"cases": {}}', '{"cases": []}'])
def test_compare_refuses_what_is_no_report(text, tmp_path):
    (tmp_path / "a").write_text(text)
    r = subprocess.run([ROOT / "bench/compare", tmp_path / "a", tmp_path / "a"], text=True,
                       capture_output=True)
    assert r.returncode == 1 and r.stderr == \
        f"bench/compare: {tmp_path}/a: not written by bench/run\n"


@pytest.mark.parametrize("name", ["compare", "gemm_libraries", "learn", "run", "simulated"])
def test_programs_tell_their_usage(name):
    for argument, status in (("--help", 0), ("--nothing-of-this-name", 2)):
        out = subprocess.run([ROOT / "bench" / name, argument], text=True,
                             capture_output=True)
        said = out.stdout + out.stderr
        assert out.returncode == status, said
        assert said.startswith("usage: bench/" + name), said


def test_a_simulation_that_is_further_off_is_worse(monkeypatch, tmp_path):
    (tmp_path / "build-simgrid/models/gpt2").mkdir(parents=True)
    monkeypatch.setattr(simulate, "ROOT", tmp_path)
    monkeypatch.setattr(harness.Case, "call", lambda *_: "")
    monkeypatch.setattr(harness.Case, "program", lambda *_: "")
    monkeypatch.setattr(harness.Case, "train", lambda *_: types.SimpleNamespace(step_s=1.0))
    reports = []
    for seconds in (1.1, 1.4):
        monkeypatch.setattr(simulate, "simulate", lambda *_, s=seconds: {"step_s": s})
        case = harness.Case(harness.Bench(False, tmp_path), "simulate", "")
        simulate.run(case)
        reports.append(report(*case.figures))
    said = compare.compare(*reports)
    assert len(said) == 3 * len(simulate.RANKS)
    assert all(x.startswith("WORSE") for x in said), said


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
    assert kernels.parse(text) == {"adam, fp32 gradient, bf16 copy": (54.0, 1800, 0.98)}


def test_an_exponent_is_fitted():
    assert scaling.fit([1, 2, 4, 8], [3, 12, 48, 192]) == pytest.approx(2)
    assert scaling.fit([1, 10, 100], [5, 5, 5]) == pytest.approx(0)


@pytest.mark.parametrize("fault, key", [(RuntimeError("boom"), "error"),
                                        (KeyError("boom"), "error"),
                                        (harness.Absent("tool"), "absent")])
def test_a_case_that_fails_keeps_its_figures(fault, key, tmp_path, capsys):
    def run(b):
        b.figure("first", 1, "u")
        raise fault

    case = types.SimpleNamespace(ABOUT="", run=run)
    out = harness.run_case(harness.Bench(True, tmp_path), "fake", case)
    assert str(fault) in out[key] and [f["name"] for f in out["figures"]] == ["first"]
    assert str(fault) in capsys.readouterr().out


def test_every_case_is_listed():
    out = harness.sh(ROOT / "bench/run", "--list")
    cases = {p.stem for p in (ROOT / "bench/cases").glob("*.py")}
    assert {line.split()[0] for line in out.splitlines()} == cases
    bad = subprocess.run([ROOT / "bench/run", "nonsense"], capture_output=True)
    assert bad.returncode == 2 and b"no case nonsense" in bad.stderr
