# SPDX-License-Identifier: Apache-2.0
"""Lion: the bits depend neither on stage, home, chunks nor schedule, an update is
that of the paper's formula, and a checkpoint keeps and names its one state."""
import json
import pathlib
import struct
import subprocess

import pytest

import run
from test_matrix import PLACEMENTS, TUNED
from test_models import BATCH as RECORDS
from test_models import records, start  # noqa: F401

LION = {"type": "Lion", "params": {"lr": 1e-3, "betas": [0.9, 0.99],
                                   "weight_decay": 0.3}}
SIZE = {"fp32": 4, "bf16": 2, "fp8": 1 + 1 / 64}


def config(**more):
    return {"optimizer": LION, "train_batch_size": 12, "run.steps": 4,
            "gradient_clipping": 0.5, **more}


# What changes the bits; every placement gets the next of them.
KINDS = [{"ranks": 2}, {"ranks": 3, "bf16.enabled": True, **TUNED["rules"]},
         {"ranks": 1, "run.state_dtype": "fp8", "gradient_clipping": 0},
         {"ranks": 2, "fp16.enabled": True, "fp16.initial_scale_power": 8,
          "run.state_dtype": "bf16", **TUNED["frozen"]}]
CASES = [(KINDS[i % len(KINDS)], place) for i, place in enumerate(PLACEMENTS)]


@pytest.fixture(scope="session")
def references():
    return {}


def launch(place, kind, **more):
    c = {**config(), **kind, **more}
    return place.good(c.pop("ranks"), c)


@pytest.mark.parametrize("kind, where", CASES, ids=[
    f"{KINDS.index(k)}-{'-'.join(map(str, w.values()))}" for k, w in CASES])
def test_stage_home_and_chunks_do_not_matter(kind, where, place, nvme, references):
    key = KINDS.index(kind)
    if key not in references:
        references[key] = launch(place, kind)
    want = references[key]
    r = launch(place, kind, **run.offload(where["stage"], where["optimizer"],
                                          where["param"], nvme),
               **{"zero_optimization.sub_group_size": 2048,
                  "run.schedule": "breadth_first", "run.inject_delay_us": 100})
    assert r.bits == want.bits and r.hash == want.hash, str(r)


def test_an_overflow_in_fp16_skips_the_update(place, nvme):
    c = config(**{"fp16.enabled": True, "fp16.initial_scale_power": 24,
                  "fp16.hysteresis": 1, "run.steps": 12})
    a = place.good(2, c)
    b = place.good(2, {**c, **run.offload(3, "nvme", "nvme", nvme)})
    assert 0 < a.summary["skipped_steps"] < 12
    assert a.bits == b.bits and a.hash == b.hash


@pytest.mark.parametrize("where", ((2, "cpu", "none"), (3, "nvme", "nvme")))
def test_rows_of_sparse_tables(where, start, nvme):
    more = {"optimizer": LION, "train_batch_size": RECORDS, "run.steps": 4}
    want = start("sparse", 2, more)
    got = start("sparse", 2, {**more, **run.offload(*where, nvme)})
    assert got.bits == want.bits and got.hash == want.hash
    assert want.hash != start("dlrm", 2, more).hash  # rows that nobody read rest


# ---- the formula ----

def saved(output, step):
    """{array: values} of a checkpoint that one rank wrote."""
    path = output / f"checkpoints/step-{step:08}/rank-00000-of-00001.safetensors"
    data = path.read_bytes()
    n, = struct.unpack("<Q", data[:8])
    head = json.loads(data[8:8 + n])
    head.pop("__metadata__", None)
    return {k: struct.unpack(f"<{(e - b) // 4}f", data[8 + n + b:8 + n + e])
            for k, (b, e) in ((k, t["data_offsets"]) for k, t in head.items())}


@pytest.fixture(scope="module")
def three(workplace, text):
    """Checkpoints of the first three steps, and the first of AdamW, whose m is
    the same average of the same gradient."""
    place = run.Place(workplace / "lion", text)
    place.folder.mkdir()
    more = {"gradient_clipping": 0, "run.save": True, "run.save_interval": 1,
            "run.steps": 3, "run.keep_last": 9}
    lion = place.good(None, config(**more))
    adam = place.good(None, config(**{
        **more, "run.steps": 1,
        "optimizer": {"type": "AdamW",
                      "params": {"lr": 1e-3, "betas": [0.99, 0.999]}}}))
    yield place, [saved(lion.output, s) for s in (1, 2, 3)], \
        saved(adam.output, 1), lion.output
    place.clear()


def test_the_first_state_is_the_average_of_adams_gradient(three):
    _, (first, *_), adam, _ = three
    names = [k for k in first if k.endswith("/m")]
    assert len(names) == 7 and not any(k.endswith("/v") for k in first)
    for k in names:
        assert first[k] == adam[k]


def test_an_update_is_that_of_the_paper(three):
    """In double: the gradient of a step follows from two states."""
    _, steps, _, _ = three
    p = LION["params"]
    (b1, b2), lr, wd = p["betas"], p["lr"], p["weight_decay"]
    told = moved = 0
    for old, new in zip(steps, steps[1:]):
        for k in (k for k in old if k.endswith("/m")):
            master = k[:-1] + "master"
            for m0, m1, p0, p1 in zip(old[k], new[k], old[master], new[master]):
                g = (m1 - b2 * m0) / (1 - b2)
                u = b1 * m0 + (1 - b1) * g
                # m is rounded to 2^-24 of itself, of which g is 100 times that
                if abs(u) < 1e-4 * abs(m0) + 1e-4 * abs(m1):
                    continue
                want = p0 - lr * ((u > 0) - (u < 0) + wd * p0)
                assert abs(p1 - want) < 2e-7 * max(1, abs(p0)), (k, p0, p1, want)
                told += 1
                moved += p0 != p1
    assert told > 0.95 * 2 * run.parameters(run.MODEL) * 0.9 and moved > told / 2


def test_an_update_is_that_of_lion_pytorch(three):
    torch = pytest.importorskip("torch")
    lion = pytest.importorskip("lion_pytorch")
    _, (old, new, _), _, _ = three
    b2 = LION["params"]["betas"][1]
    for k in (k for k in old if k.endswith("/m")):
        m0, m1 = (torch.tensor(x[k], dtype=torch.double) for x in (old, new))
        w = torch.nn.Parameter(torch.tensor(old[k[:-1] + "master"],
                                            dtype=torch.double))
        optimizer = lion.Lion([w], lr=LION["params"]["lr"],
                              betas=LION["params"]["betas"],
                              weight_decay=LION["params"]["weight_decay"])
        w.grad = (m1 - b2 * m0) / (1 - b2)
        optimizer.state[w]["exp_avg"] = m0.clone()
        optimizer.step()
        got = torch.tensor(new[k[:-1] + "master"], dtype=torch.double)
        same = (got - w.detach()).abs() < 2e-7
        assert same.double().mean() > 0.95, k
        assert torch.allclose(optimizer.state[w]["exp_avg"], m1, rtol=1e-5)


def test_it_learns(place):
    r = place.good(None, config(**{"run.steps": 60}))
    assert r.losses[-1] < r.losses[0] - 1.5


# ---- memory, checkpoints ----

@pytest.mark.parametrize("kind", SIZE)
def test_the_plan_has_one_state(kind, place):
    r = place.good(None, config(**{"run.state_dtype": kind, "run.steps": 1,
                                   "bf16.enabled": True}))
    n = run.parameters(run.MODEL)
    held = r.bytes_of("optimizer")
    size = 4 + SIZE[kind]  # and the master
    assert size * n <= held <= size * (n + 64 * 7)


@pytest.mark.parametrize("kind, a, b", [
    ("fp32", (3, "nvme", "nvme"), (1, "cpu", "none")),
    ("fp8", (2, "none", "none"), (3, "nvme", "cpu"))])
def test_two_and_two_are_four(kind, a, b, place, nvme):
    more = {"run.state_dtype": kind, "run.save": True}
    out = place.folder / "halves"
    want = place.good(2, config(**more))
    place.good(2, config(**more, **run.offload(*a, nvme), **{"run.steps": 2}),
               output=out)
    got = place.good(2, config(**more, **run.offload(*b, nvme)), ["--resume"],
                     output=out)
    assert got.bits == want.bits and got.hash == want.hash


def test_saving_beside_training_gives_the_same_files(place):
    more = {"run.save": True, "run.save_interval": 1, "run.steps": 3,
            **run.offload(3, "cpu", "cpu", None)}
    files = []
    for mode in ("sync", "async"):
        out = place.folder / mode
        place.good(2, config(**more, **{"run.save_mode": mode}), output=out)
        files.append({p.relative_to(out): p.read_bytes()
                      for p in sorted(out.glob("checkpoints/*/*.safetensors"))})
    assert len(files[0]) == 4 and files[0] == files[1]


def test_other_ranks_go_on_with_the_same_states(place):
    out = place.folder / "parts"
    want = place.good(1, config())
    place.good(3, config(**{"run.save": True, "run.steps": 2}), output=out)
    place.good(1, config(**{"run.save": True, "run.steps": 3}), ["--resume"],
               output=out)
    got = place.good(2, config(**{"run.save": True}), ["--resume"], output=out)
    assert got.losses == pytest.approx(want.losses, rel=1e-4)
    index = out / "checkpoints/step-00000004/index.json"
    assert json.loads(index.read_text())["optimizer"] == "lion"
    tool = pathlib.Path(run.PROGRAM).parents[1] / "tools/ckpt"
    t = subprocess.run([str(tool), "list", str(out)], capture_output=True,
                       text=True, check=True, env=run.environment())
    assert all("MiB  lion: master, m  {" in x for x in t.stdout.splitlines())


def test_the_states_of_another_optimizer_are_refused(place):
    adamw = {"type": "AdamW", "params": {"lr": 1e-3}}
    for first, second, has, wants in ((LION, adamw, "lion", "adam"),
                                      (adamw, LION, "adam", "lion")):
        out = place.folder / has
        more = {"run.save": True, "run.steps": 1}
        place.good(None, {**config(**more), "optimizer": first}, output=out)
        r = place.launch(None, {**config(**more), "optimizer": second},
                         ["--resume"], output=out)
        run.refused(r, f"states of optimizer {has}", f"has those of {wants}")


def test_numbers_that_lion_has_not_are_refused(place):
    for key, value in (("eps", 1e-8), ("bias_correction", True),
                       ("adam_w_mode", True), ("nesterov", True)):
        r = place.launch(None, config(**{f"optimizer.params.{key}": value}))
        run.refused(r, f"optimizer.params.{key}",
                    "unknown key" if key == "nesterov" else
                    "Lion has no such parameter")
