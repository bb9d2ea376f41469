# SPDX-License-Identifier: Apache-2.0
"""Whose kernels make a CPU's products of fp32: an OpenBLAS that takes slow ones by
itself is noticed, and a resumed run keeps what it began with."""
import pathlib
import platform
import re

import pytest

import run

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64",
                                reason="OpenBLAS's names are those of x86")
# What is multiplied must be worth a choice.
MODEL = {"layers": 1, "heads": 2, "width": 128, "seq": 64, "vocab": 256}
CONFIG = {"model": MODEL, "run.save": True}


def asked(kernels, **more):
    return {**CONFIG, "run.cpu_kernels": kernels, **more}


def old(**more):
    """A library before all others, which is the sanitizers' place: so no test here
    is one of theirs."""
    return {"LD_PRELOAD": run.built("tests/liboldblas.so"), **more}


def multiplies(r):
    """Whose products the header has measured."""
    found, = re.findall(r"^run: .*; (\S.*), [\d.]+ GFLOP/s in GEMM", r.out, re.M)
    return found


@pytest.fixture(scope="module")
def slow(shared):
    """Skips where OpenBLAS has one kind of kernels, or the processor is that old."""
    r = shared.good(1, asked("BLAS"), env=old())
    if "Prescott" not in multiplies(r):
        pytest.skip("this BLAS library has no kernels of an old processor")
    if " avx2 " not in pathlib.Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor is as old as the kernels")


@pytest.mark.parametrize("ranks, more", ((1, {}), (2, {"OLD_RANK": "1"})))
def test_kernels_of_an_old_processor_are_replaced(ranks, more, slow, place):
    """Also where one of the ranks alone has an old library."""
    r = place.good(ranks, asked("auto"), env=old(**more))
    taken = r.config["run"]["cpu_kernels"]
    assert "Prescott" not in multiplies(r) and taken in ("oneDNN", "SkylakeX", "Haswell")
    assert place.good(ranks, asked(taken)).numbers == r.numbers


def test_kernels_that_the_processor_cannot_run_are_refused(place):
    if "avx512f" in pathlib.Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor can")
    r = place.launch(1, {}, env={"OPENBLAS_CORETYPE": "SkylakeX"})
    run.refused(r, "OPENBLAS_CORETYPE=SkylakeX: this processor lacks avx512")


def test_the_users_own_choice_stays_and_is_told_what_it_costs(slow, place):
    r = place.good(1, asked("auto"), env={"OPENBLAS_CORETYPE": "Prescott"})
    assert "Prescott" in multiplies(r)
    assert r.config["run"]["cpu_kernels"] == "Prescott"
    # Without oneDNN nothing else may be tried.
    if place.launch(1, asked("oneDNN"), ["--plan"]).rc == 0:
        assert "note: OPENBLAS_CORETYPE is set: without it" in r.out, str(r)


@pytest.mark.parametrize("begun, then", (("auto", {"LD_PRELOAD": None}), ("BLAS", {})))
def test_a_resumed_run_keeps_its_kernels(begun, then, slow, kept):
    key = "run.cpu_kernels"
    kept(1, key, None, {**asked(begun), **old()}, {key: "auto", **then})


def test_kernels_that_are_not_here_are_refused_once(place):
    """Those that are asked for, and those that a run began with."""
    words = "run.cpu_kernels: Zen99: rank 0: this machine does not have them; "
    r = place.launch(2, asked("Zen99"))
    run.refused(r, words + "use auto")
    assert r.err.count("run.cpu_kernels") == 1, str(r)
    output = place.good(1, asked("BLAS")).output
    run.edit_index(output, lambda j: j.update(identity=[
        re.sub('(run.cpu_kernels) .*', r'\1 "Zen99"', x) for x in j["identity"]]))
    r = place.launch(1, asked("auto", **{"run.steps": 6}), ["--resume"], output)
    run.refused(r, words + "this run began with it: BLAS goes on with other bits")
