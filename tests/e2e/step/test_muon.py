# SPDX-License-Identifier: Apache-2.0
"""What Muon does where, what it takes, and what it cannot do.  Its bits are in
test_matrix.py, and PyTorch's losses in tests/e2e/hf/test_families.py."""
import pytest

import rows
import run

MUON = rows.UPDATES["muon"]
CONFIG = {**MUON, "train_batch_size": 12, "run.steps": 4}
WINDOW = b"It was the best of times, it was."


def test_too_many_matrices_of_a_unit_are_refused(place):
    rows.use(place, "moe")
    # A plan looks for the most blocks that fit: here a few.
    c = {**MUON, "model.num_experts": 257, "run.memory_limit_bytes": 1 << 27}
    run.refused(place.launch(1, c, ["--plan"]), "optimizer.type: Muon", "775 matrices",
                "experts_per_unit")
    place.good(1, {**c, "model.experts_per_unit": 100}, ["--plan"])


def test_ranks_change_bits_by_their_sums_alone(place):
    """One sample makes the same gradient on any number of ranks."""
    data = place.folder / "window"
    data.write_bytes(WINDOW)
    one = {**MUON, "data": {"path": str(data), "val_fraction": 0},
           "model.seq": len(WINDOW) - 1, "run.steps": 4}
    hashes = {place.good(n, {**one, "train_batch_size": n,
                             "zero_optimization.stage": stage}).hash
              for n, stage in ((1, 0), (2, 0), (2, 3), (4, 2))}
    assert len(hashes) == 1  # sums of 2 and 4 equal numbers are exact


def test_the_bytes_are_those_of_the_documentation(place):
    """Beside those of AdamW, which are the same for the rest.  In stage 0 a rank sends
    half of all matrices, as near as the largest allows.  In stage 3 the first shard of
    a block has the matrices of 1728 and 576 elements and half of the first of 2304.
    The first rank updates 1728 and the second 2304 in three blocks, and the other two
    in two: it sends what it has of the others', and what the other rank has of its own."""
    w, sent = run.MODEL["width"], 3 * (576 + 1152 + 2304) + 2 * (1728 + 1152)
    half = 12 * w * w * run.MODEL["layers"] / 2
    for stage, want, room in ((0, half, 4 * w * w), (3, sent, 0)):
        c = {"train_batch_size": 12, "zero_optimization.stage": stage}
        muon_, adam = (place.good(2, {**c, **more}).summary["sent_bytes"]
                       for more in (MUON, {}))
        assert abs((muon_ - adam) / 3 / 4 - want) <= room, stage


@pytest.mark.parametrize("stage, clip", ((0, 0), (2, 0), (3, 0.1)))
def test_directions_do_not_wait_for_updates_of_another_unit(stage, clip, place):
    """The comm worker keeps the order of submission.  There a unit's updates go
    back behind the next unit's directions, or, with all of these on every rank,
    behind the next unit's gradient."""
    r = place.good(2, {**CONFIG, "zero_optimization.stage": stage,
                       "gradient_clipping": clip, "run.task_log": True})
    units = list(range(1, 1 + run.MODEL["layers"]))[::1 if clip else -1]
    comm = {t["worker"] for t in r.tasks if t["task"] == "clip"}
    for step in range(CONFIG["run.steps"]):
        order = [(t["task"], t["unit"]) for t in r.tasks
                 if t["worker"] in comm and t["step"] == step]
        if stage == 0:
            want = [x for u in units for x in (("reduce", u), ("muon", u))]
            want[1:-1] = [x for a, b in zip(units, units[1:])
                          for x in (("reduce", b), ("muon", a))]
            last = {x: i for i, x in enumerate(order)}
            assert sorted(want, key=last.get) == want, order
        else:
            want = [x for a, b in zip(units, units[1:]) for x in (b, a)]
            assert ([u for kind, u in order if kind == "muon"]
                    == [units[0], *want, units[-1]]), order


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_only_masters_pass_the_disk_twice(dtype, place, nvme):
    """Those of chunks with matrices and others; m and v, and the masters of chunks
    of matrices alone, pass it once a step."""
    c = {**CONFIG, **run.offload(1, "nvme", "none", nvme), **run.typed(dtype),
         "model.width": 48}
    c["zero_optimization"]["sub_group_size"] = 2048
    r = place.good(1, c)
    once = r.memory["optimizer", "nvme"][1]
    mixed = 5 * run.MODEL["layers"] * (dtype == "bf16")  # chunks
    assert r.last("links")["disk"]["bytes"] == \
        2 * c["run.steps"] * (once + 4 * 2048 * mixed)


def test_a_matrix_too_large_for_its_scratch_is_named(place):
    c = {**CONFIG, "model": {**run.MODEL, "width": 192}, "run.workers": 2}
    shown = place.launch(1, c, ["--plan"]).out
    block = 12 * 192 * 192 + 13 * 192
    assert run.planned(shown, ("matrices",)) == pytest.approx(
        2 * 4 * block, rel=0.02)  # two units at a time
    work = 4 * (192 * 768 + 2 * 192 ** 2)
    limit = int(run.planned(shown, ("total",)) - work)
    r = place.launch(1, {**c, "run.memory_limit_bytes": limit})
    run.refused(r, "izar: h.0.mlp.c_fc.weight: Muon updates a matrix of 192 x 768",
                f"takes {work / 2 ** 20:.2f} MiB in each of 2 workers",
                f"{work / 2 ** 21:.2f} MiB would fit", '"use_muon": false')


def test_rules_leave_matrices_to_adamw(place):
    hashes = set()
    for rules, matrices in (([], 4 * run.MODEL["layers"]),
                            ([{"match": "h.[0-3].*", "use_muon": False}], 4)):
        c = {**CONFIG, "parameters": rules}
        told = place.launch(1, c, ["--parameters"]).out
        assert told.count("by matrices") == matrices, told
        hashes.add(place.good(1, c).hash)
    assert len(hashes) == 2
