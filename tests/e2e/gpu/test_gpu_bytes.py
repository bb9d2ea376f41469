# SPDX-License-Identifier: Apache-2.0
"""What crosses between host and GPU, and what is there, is what the run says it
planned and what arithmetic says; which task takes squares and adds sums.  By the
counts of the stand-in."""
import re

import pytest

import rows
import run
from rows import standin
from run import UNITS
from test_gpu import BATCH, COPIES, FAR, QUANT, ROW, host_sums, quant_row

pytestmark = [standin, pytest.mark.usefixtures("known_gpu")]


def model(layers, width):
    return {"model": {"layers": layers, "heads": 2, "width": width, "seq": 16,
                      "vocab": 256}}


def on_gpu(model, ratio, chunk):
    """Elements of each unit that the GPU updates, on one rank."""
    want = have = 0
    for n in run.units(model):
        want += ratio * n
        host = min((min(k * chunk, n) for k in range(-(-n // chunk) + 1)),
                   key=lambda e: (abs(e - (want - have)), e))
        have += host
        yield n - host


# ---- tasks ----

# A single rank's GPU takes the squares of offloaded gradients, and the host adds
# them.  With several ranks the host adds the last contribution, or its
# collectives do.  Where squares are taken block by block, another task adds those.
@pytest.mark.parametrize("ranks,comm,optimizer,micro,left", [
    (1, "mpi", "none", 0, UNITS), (1, "mpi", "none", 8, UNITS),
    (1, "mpi", "cpu", 0, UNITS), (1, "mpi", "cpu", 8, UNITS),
    (2, "mpi", "none", 0, UNITS), (2, "mpi", "cpu", 0, set()),
    (2, "mpi", "cpu", 6, {0}),
    (2, "nccl", "none", 0, UNITS), (2, "nccl", "cpu", 0, UNITS - {0}),
    (2, "nccl", "cpu", 6, {0})])
def test_a_unit_has_a_norm_task_only_without_a_sum(ranks, comm, optimizer, micro,
                                                   left, start):
    row = {**ROW, "ranks": ranks, "micro": micro, "stage": 3, "optimizer": optimizer,
           "comm": comm}
    r = start(row, {"run.task_log": True})
    assert r.units("norm", 1 if optimizer == "none" else 2) == left


@pytest.mark.parametrize("micro,left", [(0, UNITS - {0}), (8, {0})])
def test_a_gpu_without_room_leaves_the_host_sums_and_squares(micro, left, start):
    row = {**ROW, "micro": micro, "stage": 3, "optimizer": "cpu"}
    r = host_sums(start, row, {"run.task_log": True})
    assert r.units("norm", 2) == left and r.units("norm") == UNITS


# ---- bytes ----

@pytest.fixture
def counted(start, place):
    """Starts a row's run; all that its ranks' stand-ins have counted."""
    def counted(row, changes=None):
        stats = place.folder / f"stats{place.count}.json"
        r = start(row, changes, env={"IZ_STANDIN_STATS": str(stats)})
        ranks = run.read_lines(stats)
        n = {k: sum(rank[k] for rank in ranks) for k in ranks[0]}
        assert n["pageable"] == n["leaked_bytes"] == n["leaked_pinned"] == 0, n
        return r, n
    return counted


# Four units of a chunk each: a copy of each one's parameters, and of its masters.
# StarPU may measure the bus by 64 more.
@pytest.mark.parametrize("stage,optimizer,param,ratio,most", [
    (0, "none", "none", 1, 8), (2, "cpu", "none", 1, 4), (3, "cpu", "none", 0.5, 6)])
def test_initial_weights_go_to_a_gpu_by_the_chunk(stage, optimizer, param, ratio, most,
                                                  counted):
    row = {**ROW, "stage": stage, "optimizer": optimizer, "param": param,
           "ratio": ratio, "steps": 0}
    _, n = counted(row, {"model.width": 256, "model.heads": 4, "model.layers": 2,
                         "zero_optimization.sub_group_size": 1e9})
    assert n["h2d_copies"] <= most + 64
    assert n["h2d_bytes"] > 3 * 2**20


def planned(few, many, ranks):
    """That of two more steps, on all ranks, in the words of the stand-in."""
    return {way: ranks * (many.summary[key] - few.summary[key])
            for way, key in (("h2d_bytes", "up_bytes"), ("d2h_bytes", "down_bytes"))}


@pytest.fixture
def traffic(counted, references):
    """Bytes of two more steps, without those of start and end, which are the
    planned ones; and the run that had four."""
    def traffic(row, **changes):
        key = "traffic", sorted(row.items()), changes
        if key not in references:
            few, at_first = counted({**row, "steps": 2}, changes)
            many, later = counted({**row, "steps": 4}, changes)
            real = {k: later[k] - at_first[k] for k in ("h2d_bytes", "d2h_bytes")}
            assert real == planned(few, many, row["ranks"]), f"{many}\n{few}"
            references[key] = real, many
        return references[key]
    return traffic


# Two ranks' shards have the same length.  Of whole masters are the other rows; what other
# tests below send is planned too.
FACTORS = "ranks", "comm", "stage", "optimizer", "micro", "param", "ratio"
HOMES = [dict(zip(FACTORS, row)) for row in (
    (1, "mpi", 0, "none", 0, "none", 1), (1, "mpi", 3, "nvme", 0, "nvme", 1),
    (1, "mpi", 1, "cpu", 0, "none", 0), (2, "nccl", 3, "cpu", 4, "cpu", 0),
    (2, "nccl", 1, "none", 0, "none", 1), (2, "mpi", 3, "cpu", 0, "cpu", 1),
    (2, "mpi", 3, "cpu", 4, "none", 0.4), (2, "mpi", 3, "none", 4, "none", 1),
    (2, "mpi", 0, "none", 4, "none", 1))]


@pytest.mark.parametrize("row", rows.cases([
    *({**row, "master": "remainder"} for row in HOMES),
    *({**COPIES, "comm": comm, "optimizer": "cpu", "param": param}
      for comm, param in (("nccl", "cpu"), ("mpi", "none"), ("mpi", "cpu"))),
    *(quant_row(*case) for case in QUANT)]))
def test_bytes_over_the_bus_are_the_planned_ones(row, traffic):
    traffic({**ROW, **row})


@pytest.mark.parametrize("form, group, param", (
    ("nf4", 8192 + 256 + 8, "nvme"), ("int8", 16384 + 4 * 256, "cpu")))
def test_a_quantised_unit_crosses_as_its_groups(form, group, param, traffic):
    """Of 16384 weights or fewer, the end of a matrix; not as its weights."""
    row = {**ROW, "stage": 3, "optimizer": "cpu", "param": param, "tuned": form}
    c = 264
    more = {"model.width": c, "model.layers": 2, "parameters": []}
    bits, _ = traffic(row, **more)
    whole, _ = traffic(row, **more, **{"model.base_dtype": None})
    groups = sum(-(-k * c * c // 16384) for k in (3, 1, 4, 4))
    unit = 2 * 12 * c * c - groups * group
    less = whole["h2d_bytes"] - bits["h2d_bytes"]
    # Two steps, two blocks, in the forward and mostly in the backward.
    assert less % unit == 0 and 4 <= less // unit <= 8
    assert whole["d2h_bytes"] == bits["d2h_bytes"]


@pytest.mark.parametrize("comm, stage, schedule, ratio", [
    ("nccl", 2, "depth_first", 1), ("mpi", 2, "breadth_first", 1),
    ("nccl", 3, "breadth_first", 1), ("mpi", 1, "depth_first", 0.4),
    ("nccl", 1, "depth_first", 0.4)])
def test_local_sums_come_down_once_a_step(comm, stage, schedule, ratio, traffic):
    """Three micro-batches.  In bf16 whole to the host's collectives, or in fp32 a
    shard of what NCCL has brought: as many bytes."""
    embed, *rest = run.units(run.MODEL, 2)
    grads = (2 * embed + sum(rest)) // 2
    row = {**ROW, "ranks": 2, "comm": comm, "micro": 4, "stage": stage,
           "schedule": schedule, "optimizer": "cpu", "ratio": ratio}
    (each, _), (once, _) = traffic(row), traffic({**row, "sums": "local_first"})
    more = each["d2h_bytes"] - once["d2h_bytes"]
    a_step = 2 * 2 * 4 * grads  # on both ranks, of two steps
    assert more == 2 * a_step or ratio < 1 and comm == "nccl" and \
        0.3 < more / (2 * a_step) < 0.5


@pytest.mark.parametrize("param", ("none", "cpu"))
def test_fetches_of_copies_stay_on_the_host(param, start):
    """More of them do not send more to the other one; how much: test_copies.py."""
    few, many = (start({**COPIES, "comm": "mpi", "optimizer": "cpu", "param": param, "steps": 2,
                        "ring": ring}, {"run.sum_group": 4}, env=rows.on("aabb")).summary
                 for ring in (0, 1))
    assert few["far_bytes"] == many["far_bytes"] > 0
    assert few["sent_bytes"] < many["sent_bytes"]


@pytest.mark.parametrize("param, ratio", (("none", 1), ("cpu", 0.4), ("none", 0.4), ("cpu", 0)))
def test_upper_halves_come_to_the_lower_ones(param, ratio, traffic):
    """Where masters are updated on one side and parameters live on the other, these
    go both ways."""
    row = {**ROW, "stage": 3, "optimizer": "cpu", "param": param, "ratio": ratio}
    more = {kept: traffic({**row, "master": kept})[0] for kept in ("full", "remainder")}
    apart = 1 - ratio if param == "cpu" else ratio
    way = "h2d_bytes" if param == "cpu" else "d2h_bytes"
    extra = {k: more["remainder"][k] - more["full"][k] for k in more["full"]}
    both_steps = 2 * 2 * run.parameters(run.MODEL)
    assert extra.pop(way) == pytest.approx(apart * both_steps, rel=0.1)
    assert extra == {k: 0 for k in extra}


@pytest.mark.parametrize("dtype, micro, stage, param, ratio, schedule", [
    ("bf16", 4, 3, "cpu", 1, "depth_first"), ("bf16", 4, 2, "none", 0.4, "breadth_first"),
    ("fp16", 8, 1, "none", 1, "depth_first"), ("fp32", 8, 3, "cpu", 0.4, "depth_first"),
    ("fp32", 8, 3, "cpu", 1, "breadth_first"), ("bf16", 0, 3, "cpu", 1, "breadth_first")])
def test_a_single_gpu_sends_each_sum_once(dtype, micro, stage, param, ratio, schedule,
                                          start, traffic):
    """In the accumulators' type, of what the host updates, whatever the number of
    micro-batches or uses.  Without room for that the host adds: the same bits."""
    row = {**ROW, "dtype": dtype, "micro": micro, "stage": stage, "optimizer": "cpu",
           "param": param, "ratio": ratio, "schedule": schedule}
    size = 4 if dtype == "fp32" else 2
    apart = sum(on_gpu(run.MODEL, ratio, ROW["chunk"])) if ratio < 1 else 0
    host = sum(run.units(run.MODEL)) - apart
    once, gpu = traffic(row)
    assert once["d2h_bytes"] == 2 * (
        (4 if micro else size) * host + (size * apart if param == "cpu" else 0))
    row["steps"] = 4
    added = host_sums(start, row, gpu=gpu)
    cpu = start({**row, "device": "cpu", "ratio": 1})
    words = "the GPU adds the micro-batches; their sums come down once a step"
    assert (words in gpu.out) == (micro > 0) and words not in added.out
    assert gpu.numbers == cpu.numbers and added.numbers == cpu.numbers


def test_a_links_rate_is_that_of_its_own_copies(start):
    """The updated parameters of a shard go up; what the host's collectives take
    up and down beside that is not in the seconds of this copy."""
    r = start({**ROW, "ranks": 2, "stage": 2, "optimizer": "cpu"})
    up, down = (next(x.split() for x in r.out.splitlines()
                     if x.split()[:1] == [link]) for link in ("up", "down"))
    moved = float(up[4]) * r.last("links")["up"]["seconds"]
    shard = 2 * run.parameters(run.MODEL) / 2 / run.MIB
    assert 0.98 < moved / (len(r.steps) * shard) < 1.05, str(r)
    assert float(up[1]) > 3 * moved and down[4] == "-"


@pytest.mark.parametrize("dtype, micro, param, ratio", [
    ("bf16", 0, "cpu", 0.4), ("bf16", 8, "cpu", 0), ("bf16", 0, "none", 0),
    ("fp32", 0, "cpu", 0), ("fp32", 8, "none", 0.4)])
def test_the_gradients_of_what_the_gpu_updates_stay_there(dtype, micro, param, ratio,
                                                          traffic):
    """Of each element that the GPU updates no gradient comes down and none goes
    up; the new parameter comes down if it lives on the host; if it does not,
    none goes up that would have."""
    chunk, size = ROW["chunk"], 2 if dtype == "bf16" else 4
    row = {**ROW, "dtype": dtype, "micro": micro, "stage": 3, "ring": 2,
           "optimizer": "cpu", "param": param}
    whole, _ = traffic(row)
    some, r = traffic({**row, "ratio": ratio})
    apart = list(on_gpu(run.MODEL, ratio, chunk))
    of_host, of_gpu = ((8, 12) if param == "cpu" else (12, 8)) \
        if dtype == "fp32" else (12, 12)
    host, gpu = (r.memory.get(("optimizer", tier), (0, 0))[1] // size for tier, size in (
        ("cpu", of_host), ("device", of_gpu)))
    assert gpu == sum(apart)
    assert abs(host - ratio * (host + gpu)) <= chunk / 2
    assert f"effective ratio {host / (host + gpu):.3f}" in r.out
    uses = gpu + apart[0]  # the embedding's weight has two
    wide = 4 if micro else size
    saved_up, added_down = (0, gpu) if param == "cpu" else (gpu, 0)
    assert whole["h2d_bytes"] - some["h2d_bytes"] == 2 * size * saved_up
    assert whole["d2h_bytes"] - some["d2h_bytes"] == \
        2 * (wide * gpu - size * added_down)
    embed = run.units(run.MODEL)[0] - apart[0]  # the host's
    kept = 4 * (uses + host + embed) if micro else size * (gpu + embed)
    assert r.memory[("gradients", "device")] == (kept, kept)


@pytest.mark.parametrize("schedule, micro, waves, tracks", [
    ("depth_first", 0, 1, 1), ("depth_first", 8, 3, 1),
    ("breadth_first", 8, 1, 3), ("breadth_first", 3, 1, 8)])
def test_boundaries_on_the_host_cross_once_each_way(schedule, micro, waves,
                                                    tracks, traffic):
    """All but those that the slots still hold when backward begins, which are
    one for each micro-batch under way and two more.  From the host's memory to a
    file and back they go in whole pages."""
    c, layers, seq = 16, 8, 16
    row = {**ROW, **FAR, "ring": 2, "micro": micro, "schedule": schedule}
    none, _ = traffic(row, **model(layers, c))
    cpu, _ = traffic({**row, "boundaries": "cpu"}, **model(layers, c))
    boundary = (micro or BATCH) * seq * c * 4  # fp32 on the stand-in
    times = waves * ((layers + 1) * tracks - (tracks + 2))
    moved = times * boundary
    assert cpu == {way: none[way] + 2 * moved for way in none}
    filed, r = traffic({**row, "boundaries": "nvme"}, **model(layers, c))
    assert filed == cpu
    disk, region = r.last("links")["disk"]["bytes"], -(-boundary // 8192) * 8192
    assert disk == 2 * len(r.steps) * times * region
    assert r.bytes_in("nvme") == tracks * layers * region


@pytest.mark.parametrize("boundaries", ["cpu", "nvme"])
def test_boundaries_cross_in_chunks(boundaries, traffic, counted):
    """A block reads its input in forward, and twice in backward but for the chunk of a
    row that ends one reading and begins the other; every output goes to the host once,
    and so do the gradients, which come back.  The embedding's kernels
    reach them there, so nothing copies its own."""
    c, layers, seq = 16, 4, 16
    row = {**ROW, **FAR, "ring": 2, "micro": 8}
    chunks = {"run.sequence_chunk": 5, **model(layers, c)}
    none, _ = traffic(row, **chunks)
    runs = [counted({**row, "boundaries": boundaries, "steps": n}, chunks) for n in (2, 4)]
    boundary = BATCH * seq * c * 4  # of all micro-batches, fp32 on the stand-in
    moved = {"h2d_bytes": (4 * layers + 1) * boundary - layers * boundary // seq,
             "d2h_bytes": (2 * layers + 1) * boundary}
    for way, said in (("h2d_bytes", "up_bytes"), ("d2h_bytes", "down_bytes")):
        few, many = (stats[way] for _, stats in runs)
        assert many - few == none[way] + 2 * moved[way]
        few, many = (r.summary[said] for r, _ in runs)
        assert many - few == none[way] + 2 * (moved[way] + boundary)


# ---- memory ----

@pytest.mark.parametrize("param, master", (("cpu", "remainder"), ("none", "full")))
def test_buffers_of_chunks_do_not_change_bits(param, master, start):
    """One for each chunk that the GPU updates, or eight for all."""
    row = {**ROW, **FAR, "ranks": 2, "comm": "mpi", "param": param, "master": master,
           "ratio": 0.3, "recompute": "full"}
    many = start(row)
    n = int(re.search(r"on the GPU through (\d+) buffers", many.out).group(1))
    staging = many.memory["staging", "device"][1]
    few = start(row, {"run.device_memory_limit_bytes":
                      many.bytes_in("device") - staging * (n - 8) // n})
    assert n > 8 and "through 8 buffers" in few.out
    assert few.numbers == many.numbers


def test_states_beyond_the_gpu_train_there(start):
    """Four times as much as the GPU may hold, and the same losses."""
    large, row = model(40, 64), {**ROW, "dtype": "fp32", "micro": 4, "steps": 2}
    plain = start({**row, "device": "cpu"}, large)
    r = host_sums(start, {**row, **FAR, "ring": 2}, large)
    used = sum(have for (name, tier), (_, have) in r.memory.items()
               if tier == "device" and name != "scratch")
    assert 4 * used < 16 * run.parameters(large["model"])
    assert r.numbers == plain.numbers
