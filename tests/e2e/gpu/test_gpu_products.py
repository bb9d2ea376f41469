# SPDX-License-Identifier: Apache-2.0
"""What decides the bits of a GPU's products beside their operands: how many logits
are computed at a time, and by which algorithm of the library.  By the program with
its own kernels on the stand-in, with a stand-in for cuBLASLt, whose algorithms have
other bits each and pretend to take a time (tests/fake/cublaslt.c)."""
import json
import re

import pytest

import rows
import run
from test_gpu_kernels import MODELS

pytestmark = [pytest.mark.skipif(run.GPU != "kernels",
                                 reason="needs the programs with GPU kernels"),
              pytest.mark.usefixtures("known_gpu")]
CONFIG = {"run.device": "cuda", "run.save": True,
          "train_batch_size": 4}
LOGITS, PRODUCTS = "gpu_logits_bytes", "gpu_products"
FEW, DEFAULT = 20 << 10, 256 << 20


@pytest.fixture
def go(place):
    """Starts a run, or one that goes on where there is an output of that name."""
    rows.use(place, "gpt2", MODELS, kernels=True)

    def go(out, steps=2, ranks=1, good=True, options=(), env=None, **keys):
        output = place.folder / out
        act = place.good if good else place.launch
        return act(ranks, {**CONFIG, "run.steps": steps,
                           **{f"run.{k}": v for k, v in keys.items()}},
                   options or (["--resume"] if output.exists() else ()), output,
                   {"IZ_STANDIN_DEVICES": "2", "STARPU_SILENT": "1", **(env or {})})
    return go


def chosen(r, key):
    return r.config["run"][key]


def test_a_resumed_run_computes_as_many_logits_at_a_time(go):
    whole, many = go("whole", 4, **{LOGITS: FEW}), go("many", 4)
    assert chosen(many, LOGITS) == DEFAULT
    assert whole.hash != many.hash, f"{whole}\n{many}"
    for steps, keys in ((2, {LOGITS: FEW}), (3, {}), (4, {})):
        part = go("part", steps, **keys)
        assert chosen(part, LOGITS) == FEW
    assert part.hash == whole.hash, f"{part}\n{whole}"


@pytest.mark.parametrize("begun, goes_on", ((FEW, FEW), (0, DEFAULT)))
def test_steps_on_the_cpu_forget_no_logits(begun, goes_on, go):
    go("out", 1, **{LOGITS: begun}, device="cuda" if begun else "cpu")
    assert chosen(go("out", 2, device="cpu"), LOGITS) == begun
    assert chosen(go("out", 3), LOGITS) == goes_on


def test_a_run_from_before_there_was_a_choice(go):
    """And one whose config cannot be read is not gone on with."""
    path = go("out", 1, **{LOGITS: FEW}).output / "config.json"
    config = json.loads(path.read_text())
    del config["run"][LOGITS]
    path.write_text(json.dumps(config))
    assert chosen(go("out", 2), LOGITS) == DEFAULT
    path.unlink()
    words = {"gpu_attention": "own", "sum_group": 1}
    run.refused(go("out", 3, good=False, **words), f"run.{LOGITS}: auto:",
                "config.json does not tell", "set the bytes of a chunk")


# ---- algorithms ----

def speeds(ms, **env):
    return {"IZ_CUBLASLT": ms, **env}


def entries(r):
    """The list in the run's config, which has an entry for each kind of product
    that is not formed by the first algorithm, and how many kinds there are."""
    head, *entry = chosen(r, PRODUCTS).split(" ")[1:]
    others, kinds = map(int, re.search(
        r"(\d+) of (\d+) kinds of products by another algorithm", r.out).groups())
    assert head.isdigit() and len(entry) == others, str(r)
    return entry, kinds


def timed(r):
    return int(re.search(r"; (\d+) were timed", r.out)[1])


def test_the_fastest_algorithm_is_taken_and_listed(go):
    first = go("first", **{LOGITS: FEW}, env=speeds("40,10,20"))
    assert chosen(first, PRODUCTS) == "first"
    r = go("timed", **{LOGITS: FEW, PRODUCTS: "timed"}, env=speeds("40,10,20"))
    entry, kinds = entries(r)
    assert len(entry) == kinds == timed(r) > 12, str(r)
    assert "25.0 % of their time is left" in r.out
    assert r.hash != first.hash
    # Where the library estimates anything else, the list has the same bits.
    again = go("again", **{LOGITS: FEW, PRODUCTS: chosen(r, PRODUCTS)})
    assert again.hash == r.hash and chosen(again, PRODUCTS) == chosen(r, PRODUCTS)
    assert "were timed" not in again.out and entries(again) == entries(r)


@pytest.mark.parametrize("ms, like", (("100,99,99", "100"), ("100,98,97", "100,98,97"),
                                      ("40,10!,20", "40,30,20")))
def test_little_gain_and_no_fixed_order_are_no_choice(ms, like, go):
    """The list is that of the other speeds, but for the times in it."""
    a, b = (go(str(i), 1, **{PRODUCTS: "timed"}, env=speeds(x))
            for i, x in enumerate((ms, like)))
    assert a.hash == b.hash and len(entries(a)[0]) == len(entries(b)[0])
    assert (a.hash == go("first", 1).hash) == (like == "100")


def test_a_resumed_run_keeps_its_algorithms(go):
    slow, fast = speeds("40,10"), speeds("10,40")
    whole = go("whole", 5, **{PRODUCTS: "timed"}, env=slow)
    for steps, products, device in ((1, "timed", "cuda"), (2, "auto", "cuda"),
                                    (3, "timed", "cuda"), (4, "auto", "cpu")):
        r = go("out", steps, **{PRODUCTS: products}, device=device,
               env=slow if steps == 1 else fast)
        assert chosen(r, PRODUCTS) == chosen(whole, PRODUCTS), str(r)
        assert steps == 1 or "were timed" not in r.out
        if steps == 3:
            assert [x["loss"] for x in r.steps] == [x["loss"] for x in whole.steps[:3]]
    assert chosen(go("out", 5, env=fast), PRODUCTS) == chosen(whole, PRODUCTS)
    # What is asked for in so many words is done.
    assert chosen(go("out", 6, **{PRODUCTS: "first"}, env=slow), PRODUCTS) == "first"
    assert timed(go("out", 7, **{PRODUCTS: "timed"}, env=slow)) > 12


def test_a_run_that_began_without_a_gpu_measures_later(go):
    for n in (1, 2):
        cpu = go("out", n, **{PRODUCTS: "timed" if n == 1 else "auto"}, device="cpu")
        assert chosen(cpu, PRODUCTS) == "timed"
    assert timed(go("out", 3, env=speeds("40,10"))) > 12


def test_all_ranks_take_the_choice_of_the_first(go):
    one, other = (go(str(i), ranks=2, **{PRODUCTS: "timed"}, env=speeds(ms))
                  for i, ms in enumerate(("40,10", "40,10;10,40")))
    assert one.hash == other.hash
    assert chosen(one, PRODUCTS) == chosen(other, PRODUCTS)
    assert one.hash != go("first", ranks=2).hash


@pytest.mark.parametrize("ms, n", (("4000,2000,4000", 0), ("1000,500,1000", 1),
                                   ("500,250,500", 3)))
def test_what_the_time_does_not_suffice_for_has_the_first(ms, n, go):
    """20 s, of which a kind needs 40, 10 or 5; the last one is not whole."""
    r = go("out", 1, **{PRODUCTS: "timed"}, env=speeds(ms))
    entry, kinds = entries(r)
    assert len(entry) == timed(r) == n < kinds, str(r)


def test_a_list_that_cannot_be_is_refused(go):
    good = go("good", 1, **{PRODUCTS: "timed"}, env=speeds("40,10"))
    text = chosen(good, PRODUCTS)
    version, one, two = text.split(" ")[1:4]
    words = one.split(".")
    words[-1] = f"{int(words[-1], 16) | 1:x}"
    for products, why in (
            ("fastest", "fastest is not auto, first, timed or a list"),
            ("cublasLt many", "cublasLt: not a list of algorithms"),
            ("cublasLt 1", f"a list for cuBLASLt 1, and here is {version}"),
            (text + " 12", "12: not an algorithm of a list"),
            (f"cublasLt {version} {one}.", "not an algorithm of a list"),
            (f"cublasLt {version} {'0' * 16}:1", "0:1: not a product of this run"),
            (f"cublasLt {version} {one[:16]}{two[16:]}", f"{one[:16]}"),
            (f"cublasLt {version} {'.'.join(words)}", "its sums have no fixed order")):
        r = go("bad", good=False, **{PRODUCTS: products})
        run.refused(r, f"run.{PRODUCTS}", why)
        assert not r.steps
    r = go("good", 2, good=False, env={"IZ_CUBLASLT_VERSION": "77"})
    run.refused(r, f"run.{PRODUCTS}: rank 0: a list for cuBLASLt {version}, and "
                "here is 77; use first or timed")
