# SPDX-License-Identifier: Apache-2.0
"""Units computed on a GPU.  On the stand-in of tests/fake the numbers are
those of a run on the CPU, bit for bit, in every stage and placement, with
random delays in front of tasks and of everything on a stream; on a real GPU
(IZ_TEST_GPU=real) they are those of the plainest run there.  What crosses
between host and GPU is what the run says it planned."""
import itertools
import random
import re

import pytest

import cover
import inputs
import rows
import run
from rows import PLAIN, REAL, TUNED, standin, valid_on_gpu
from run import UNITS

pytestmark = [pytest.mark.skipif(run.GPU not in ("standin", "real"),
                                 reason="needs a GPU or its stand-in"),
              pytest.mark.usefixtures("known_gpu")]
BATCH = 24

SUMS = {
    "ranks": (1, 2, 3),
    "dtype": ("fp32", "bf16", "fp16"),
    "micro": (1, 2, 0),  # samples of a micro-batch; 0: all of the rank's
    "clip": (0.0, 0.5),
    "tuned": tuple(t for t in TUNED if t not in ("dropout", "int8")),
    "sums": ("ranks_first", "local_first"),
}
FREE = {
    "stage": (0, 1, 2, 3),
    "optimizer": ("none", "cpu", "nvme"),
    "param": ("none", "cpu", "nvme"),
    "ratio": (1, 0.7, 0.3, 0),
    "master": ("full", "remainder"),
    "comm": ("mpi", "nccl"),
    "schedule": ("depth_first", "breadth_first"),
    "scheduler": ("eager", "lws", "prio", "dmda"),
    "delay_us": (0, 300),
    "jitter_us": (0, 500),
    "overlap": (True, False),
    "recompute": ("full", "widened", "none"),
    "boundaries": ("near", "host", "disk"),
    "ring": (0, 1, 3),
    "workers": (1, 2),
}
if REAL:  # one GPU: ranks share it through MPI
    FREE["comm"], FREE["jitter_us"] = ("mpi",), (0,)
FACTORS = {**SUMS, **FREE}
ROWS = cover.rows(FACTORS, valid_on_gpu, [
    row for row in rows.product(**{k: FREE[k] for k in (
        "stage", "optimizer", "param")}) if valid_on_gpu(row)] + [
    {"stage": stage, "optimizer": "cpu", "param": param, "ratio": ratio,
     "ranks": ranks}
    for stage, param in ((1, "none"), (2, "none"), (3, "none"), (3, "cpu"))
    for ratio in (0.7, 0.3, 0) for ranks in (1, 2)])
if run.FULL:
    every = [dict(zip(FACTORS, v)) for v in itertools.product(*FACTORS.values())]
    ROWS += random.Random(11).sample(list(filter(valid_on_gpu, every)), 300)

# Two chunks of a shard of a block on three ranks.
PLACE = {**PLAIN, "ratio": 1, "comm": "mpi", "boundaries": "near", "device": "cuda",
         "batch": BATCH, "chunk": 2048, "steps": 3, "sums": "ranks_first"}
ROW = {**PLACE, "ranks": 1, "dtype": "bf16", "micro": 0, "clip": 0.5}
FAR = {"stage": 3, "optimizer": "cpu", "param": "cpu"}
ON_CPU = {} if REAL else {"device": "cpu"}


def far_sums(start, row, changes=None):
    """A run whose GPU has a byte too little to add what the host updates, also with
    the fewest buffers for chunks, 8."""
    changes = changes or {}
    r = start(row, changes)
    n = [int(x) for x in re.findall(r"through (\d+) buffers", r.out)]
    more = r.memory["staging", "device"][1] * max(n[0] - 8, 0) // n[0] if n else 0
    return start(row, {**changes, "run.device_memory_limit_bytes":
                       r.bytes_in("device") - more - 1})


@pytest.mark.parametrize("row", rows.cases(ROWS))
def test_same_bits_as_the_plain_run(row, start, references):
    key = tuple(row[k] for k in SUMS)
    if key not in references:
        left = {k: v for k, v in row.items() if k in SUMS}
        references[key] = start({**PLACE, **left, **ON_CPU}).numbers
    r = start({**PLACE, **row})
    assert len(r.bits) == 3 and r.numbers == references[key], str(r)


# On one rank with one micro-batch nothing else depends on the memory.
@pytest.mark.parametrize("row", rows.cases([
    {"model": "gpt2", "ranks": 1, "dtype": "bf16", **FAR, "boundaries": "host"},
    {"model": "gpt2", "ranks": 2, "dtype": "fp32", "stage": 2, "micro": 4},
    {"model": "llama", "ranks": 1, "dtype": "fp16", **FAR, "ratio": 0.4}]))
def test_units_that_repeat_differently_have_the_same_bits(row, start):
    rows.check_mixes(start, {**ROW, **row}, "device")


# A base in 4 bits: where it lives, on one rank and on several, which meet on the
# host or on their GPUs.
NF4 = [(1, "mpi", 0, "none", "none"), (1, "mpi", 3, "cpu", "none"),
       (1, "mpi", 3, "cpu", "cpu"), (1, "mpi", 3, "nvme", "nvme"),
       (2, "mpi", 1, "none", "none"), (2, "nccl", 2, "cpu", "none"),
       (2, "nccl", 3, "none", "none"), (3, "mpi", 3, "cpu", "none"),
       (3, "nccl", 3, "cpu", "cpu"), (3, "mpi", 3, "cpu", "cpu"),
       (2, "nccl", 3, "nvme", "nvme"), (2, "mpi", 3, "nvme", "nvme"),
       (1, "mpi", 3, "none", "none/cpu"), (2, "nccl", 3, "none", "none/nvme"),
       (3, "nccl", 3, "none", "none/cpu"), (2, "mpi", 3, "cpu", "cpu/none")]


@pytest.mark.parametrize("ranks, comm, stage, home", (
    (1, "mpi", 3, "cpu"), (2, "nccl", 3, "none"), (3, "mpi", 2, "none")))
def test_dropout_leaves_out_the_same(ranks, comm, stage, home, start):
    if REAL and comm == "nccl":
        pytest.skip("one GPU")
    row = {**ROW, "ranks": ranks, "tuned": "dropout", "micro": 2}
    plain = start({**row, **ON_CPU})
    r = start({**row, "comm": comm, "stage": stage, "optimizer": home, "param": home})
    assert r.numbers == plain.numbers, str(r)
    assert r.numbers != start({**row, "tuned": "dropout"}, {"lora.dropout": 0.0}).numbers


# What is trained, and where the copies of it live that the reference is.
PAIRS = [("lora", 1, "mpi", 3, "cpu", "cpu", "near"), ("lora", 2, "nccl", 3, "none", "none", "host"),
         ("all", 1, "mpi", 0, "none", "none", "near"), ("all", 1, "mpi", 3, "cpu", "nvme", "disk"),
         ("all", 2, "mpi", 3, "cpu", "cpu", "host"), ("all", 3, "nccl", 2, "cpu", "none", "near"),
         ("top", 2, "nccl", 3, "cpu", "cpu", "near"), ("nf4", 2, "mpi", 3, "cpu", "cpu", "host"),
         ("all", 1, "mpi", 3, "none", "none/cpu", "near"), ("all", 2, "nccl", 3, "none", "none/nvme", "near"),
         ("all", 2, "mpi", 3, "cpu", "cpu/none", "host"), ("all", 3, "nccl", 3, "cpu", "cpu/nvme", "near"),
         ("top", 2, "mpi", 3, "none", "none/cpu", "near"), ("lora", 1, "mpi", 3, "cpu", "nvme/none", "near")]


@pytest.mark.parametrize("tuned, ranks, comm, stage, optimizer, param, boundaries", PAIRS)
def test_pairs_of_texts_have_the_same_bits(tuned, ranks, comm, stage, optimizer, param,
                                           boundaries, place, start, references):
    if REAL and comm == "nccl":
        pytest.skip("one GPU")
    seq = run.MODEL["seq"]
    place.bytes, place.data = False, inputs.pairs_shard(
        place.folder / "pairs.bin", *inputs.pair_texts(inputs.some_pairs(), seq), seq)
    row = {**ROW, "ranks": ranks, "tuned": tuned, "micro": 4, "delay_us": 300,
           "jitter_us": 0 if REAL else 500}
    more = {"loss": {"type": "dpo", "beta": 0.2, "sft": 0.1}, "run.eval_batches": 1,
            "run.slices": 1, "data.val_fraction": 0.2}

    def numbers(r):
        return r.numbers, r.validation, [
            {k: v for k, v in x.items() if "/" in k} for x in r.steps]
    key = "pairs", tuned, ranks
    if key not in references:
        references[key] = numbers(start({**row, **ON_CPU}, more))
    r = start({**row, "comm": comm, "stage": stage, "optimizer": optimizer,
               "param": param, "boundaries": boundaries}, more)
    assert numbers(r) == references[key], str(r)
    assert len(references[key][2][0]) == 6


# 8 bits in some of them.
QUANT = [(form, *x) for form, cases in (("nf4", NF4), ("int8", NF4[::3])) for x in cases]


@pytest.mark.parametrize("form, ranks, comm, stage, optimizer, param", QUANT)
def test_a_quantised_base_has_the_same_bits(form, ranks, comm, stage, optimizer, param,
                                            start, references):
    if REAL and comm == "nccl":
        pytest.skip("one GPU")
    row = {**ROW, "ranks": ranks, "tuned": form, "micro": 4, "delay_us": 300,
           "jitter_us": 0 if REAL else 500}
    key = form, ranks
    more = {"run.save": True, "run.save_interval": 2, "run.eval_batches": 1}
    if key not in references:
        r = start({**row, **ON_CPU}, more)
        references[key] = r.numbers, r.validation, r.files
    r = start({**row, "comm": comm, "stage": stage, "optimizer": optimizer,
               "param": param}, more)
    assert (r.numbers, r.validation) == references[key][:2], str(r)
    # What a rank's file holds depends on the stage: then the values are the same.
    assert len(r.files) == len(references[key][2])


# Experts that some micro-batches leave without rows.
@pytest.mark.parametrize("row", rows.cases([
    {"ranks": 1, "dtype": "fp32"},
    {"ranks": 1, "dtype": "bf16", **FAR, "recompute": "none", "boundaries": "host"},
    {"ranks": 2, "dtype": "fp16", "stage": 2, "optimizer": "cpu", "comm": "nccl",
     "recompute": "widened"},
    {"ranks": 2, "dtype": "bf16", "stage": 3, "optimizer": "cpu", "ratio": 0.4,
     "schedule": "breadth_first"},
    {"ranks": 3, "dtype": "fp32", "stage": 3, "optimizer": "nvme", "param": "nvme",
     "recompute": "none", "comm": "nccl"}]))
@pytest.mark.parametrize("model", ("moe", "units of experts"))
def test_experts_have_the_same_bits(model, row, start, references):
    if REAL and row.get("comm") == "nccl":
        pytest.skip("one GPU")
    row = {**ROW, "model": model, "micro": 2, "delay_us": 300,
           "jitter_us": 0 if REAL else 500, **row}
    more = {"run.eval_batches": 1, "run.slices": 1}

    def told(r):
        return r.numbers, r.validation, [{k: v for k, v in x.items() if "expert" in k
                                          or "router" in k} for x in r.steps]
    left = {k: v for k, v in row.items() if k in SUMS or k == "model"}
    want = told(start({**PLACE, **left, **ON_CPU}, more))
    assert told(start(row, more)) == want
    assert want[2][0]


@pytest.mark.parametrize("products", ("gpu", "host"))
@pytest.mark.parametrize("model", ("moe", "units of experts"))
def test_matrices_of_experts_have_the_same_bits(model, products, start):
    row = {**ROW, "model": model, "micro": 2, "ranks": 2, "dtype": "bf16", "update": "muon"}
    want = start({**row, **ON_CPU})
    for more in ({"stage": 3, "optimizer": "cpu", "param": "cpu"},
                 {"stage": 2, "optimizer": "cpu", "ratio": 0.4, "chunk": 2048}):
        r = start({**row, **more, "products": products})
        assert r.numbers == want.numbers, str(r)


@pytest.mark.parametrize("model", ("moe", "units of experts"))
def test_adapters_of_experts_have_the_same_bits(model, start):
    row = {**ROW, "model": model, "micro": 2, "ranks": 2, "dtype": "bf16", "stage": 3,
           "optimizer": "cpu", "recompute": "widened", "comm": "mpi" if REAL else "nccl"}
    want = start({**row, **ON_CPU}, rows.ON_EXPERTS)
    assert start(row, rows.ON_EXPERTS).numbers == want.numbers


# Lion's one state on either side, in every type.
@pytest.mark.parametrize("kind, dtype, stage, optimizer, param, ratio", [
    ("fp32", "fp32", 0, "none", "none", 1), ("fp32", "bf16", 3, "cpu", "cpu", 0.4),
    ("bf16", "bf16", 1, "cpu", "none", 0), ("fp8", "fp16", 2, "cpu", "none", 0.4),
    ("fp8", "bf16", 3, "nvme", "nvme", 1)])
def test_lion_has_the_same_bits(kind, dtype, stage, optimizer, param, ratio, start):
    row = {**ROW, "ranks": 2, "dtype": dtype, "micro": 2, "tuned": "rules",
           "update": "lion", "moments": kind}
    want = start({**row, **ON_CPU})
    r = start({**row, "stage": stage, "optimizer": optimizer, "param": param,
               "ratio": ratio})
    assert r.numbers == want.numbers, str(r)


# Muon's matrices on either side of the link, with their states on either side,
# on one rank and on several, which meet on the host.
@standin
@pytest.mark.parametrize("products", ("host", "gpu"))
@pytest.mark.parametrize("ranks, dtype, stage, optimizer, param, more", [
    (1, "fp32", 0, "none", "none", {}), (1, "bf16", 3, "cpu", "cpu", {}),
    (1, "bf16", 1, "cpu", "none", {"master": "remainder", "chunk": 2048}),
    (1, "fp16", 3, "nvme", "nvme", {"clip": 0.5}),
    (2, "fp32", 0, "none", "none", {"delay_us": 300, "jitter_us": 500}),
    (2, "bf16", 2, "none", "none", {"comm": "nccl", "moments": "bf16"}),
    (2, "fp16", 2, "cpu", "none", {"chunk": 2048, "delay_us": 300}),
    (3, "bf16", 3, "cpu", "cpu", {"comm": "nccl", "moments": "fp8"}),
    (3, "fp32", 1, "nvme", "none", {"schedule": "breadth_first"}),
    (3, "bf16", 3, "none", "none", {"master": "remainder", "clip": 0.5}),
    (1, "bf16", 3, "cpu", "cpu", {"ratio": 0.4, "chunk": 2048}),
    (1, "fp32", 2, "cpu", "none", {"ratio": 0, "clip": 0.5}),
    (2, "bf16", 3, "cpu", "cpu", {"ratio": 0.4, "master": "remainder"}),
    (2, "fp16", 1, "cpu", "none", {"ratio": 0.7, "comm": "nccl", "clip": 0}),
    (3, "bf16", 2, "cpu", "none", {"ratio": 0.5, "chunk": 2048, "moments": "fp8",
                                   "comm": "nccl", "delay_us": 300})])
def test_muon_has_the_same_bits(ranks, dtype, stage, optimizer, param, more, products,
                                start):
    row = {**ROW, "ranks": ranks, "dtype": dtype, "micro": 2, "tuned": "rules",
           "update": "muon", **{k: more[k] for k in ("clip", "moments") if k in more}}
    want = start({**row, **ON_CPU})
    r = start({**row, **more, "stage": stage, "optimizer": optimizer, "param": param,
               "products": products})
    assert r.numbers == want.numbers, str(r)
    where = "GPU" if products == "gpu" else "host"
    assert f"are updated as such on the {where}" in r.out


@standin
@pytest.mark.parametrize("model", ("llama", "all of llama", "vit", "dlrm"))
@pytest.mark.parametrize("dtype, stage, optimizer, param, ranks", [
    ("fp32", 0, "none", "none", 1), ("bf16", 3, "none", "none", 2),
    ("fp16", 2, "cpu", "none", 2), ("bf16", 3, "cpu", "cpu", 3),
    ("fp32", 3, "nvme", "nvme", 1)])
def test_other_models_have_the_same_bits(model, dtype, stage, optimizer, param, ranks,
                                         start):
    row = {**PLAIN, "model": model, "ranks": ranks, "dtype": dtype, "batch": 12,
           "micro": 2, "sums": "ranks_first"}
    cpu = start({**row, "device": "cpu"})
    gpu = start({**row, "device": "cuda", "stage": stage, "optimizer": optimizer,
                 "param": param})
    assert gpu.numbers == cpu.numbers, str(gpu)


# A single rank's GPU takes the squares of offloaded gradients, and the host adds
# them.  With several ranks the host adds the last contribution, or its
# collectives do.  Where squares are taken block by block, another task adds those.
@pytest.mark.parametrize("ranks,comm,optimizer,micro,left", [
    (1, "mpi", "none", 0, UNITS), (1, "mpi", "none", 8, UNITS),
    (1, "mpi", "cpu", 0, UNITS), (1, "mpi", "cpu", 8, UNITS),
    (2, "mpi", "none", 0, UNITS), (2, "mpi", "cpu", 0, set()),
    (2, "mpi", "cpu", 6, {0})] + ([] if REAL else [
    (2, "nccl", "none", 0, UNITS), (2, "nccl", "cpu", 0, UNITS - {0}),
    (2, "nccl", "cpu", 6, {0})]))
def test_a_unit_has_a_norm_task_only_without_a_sum(ranks, comm, optimizer, micro,
                                                   left, start):
    row = {**ROW, "ranks": ranks, "micro": micro, "stage": 3, "optimizer": optimizer,
           "comm": comm}
    r = start(row, {"run.task_log": True})
    assert r.units("norm", 1 if optimizer == "none" else 2) == left


@standin
@pytest.mark.parametrize("micro,left", [(0, UNITS - {0}), (8, {0})])
def test_a_gpu_without_room_leaves_the_host_sums_and_squares(micro, left, start):
    row = {**ROW, "micro": micro, "stage": 3, "optimizer": "cpu"}
    r = far_sums(start, row, {"run.task_log": True})
    assert r.units("norm", 2) == left and r.units("norm") == UNITS


@standin
@pytest.mark.parametrize("width", (24, 64))
@pytest.mark.parametrize("ranks, comm", [(1, "mpi"), (2, "nccl")])
def test_the_hosts_sums_are_cut_for_all_workers(ranks, comm, width, start):
    """Into at most 16 pieces of whole chunks.  The tied embedding has a sum of
    micro-batches for each use; the task that adds them takes their squares."""
    row = {**ROW, **FAR, "ranks": ranks, "comm": comm, "micro": 4, "workers": 2}
    more = {**model(2, width), "run.task_log": True}
    r = far_sums(start, row, more) if ranks == 1 else start(row, more)

    def pieces(n):
        chunks = -(-padded(-(-n // ranks)) // ROW["chunk"])
        return -(-chunks // -(-chunks // 16))

    block = pieces(12 * width * width + 13 * width)
    embed = pieces((256 + 16) * width)
    times = BATCH // ranks // 4 - (ranks > 1)  # the first comes straight
    assert min(block, embed) > 1
    sums, squares = r.per_step("reduce"), r.per_step("norm")
    assert [sums[u] for u in range(4)] == [
        2 * times * embed, times * block, times * block, times], str(sums)
    assert [squares[u] for u in range(4)] == [embed + 1, 1, 1, 1], str(squares)


# ---- bytes ----

@pytest.fixture
def counted(start, place):
    """Starts a row's run; all that its ranks' stand-ins have counted."""
    def counted(row, changes=None):
        stats = place.folder / f"stats{place.count}.json"
        r = start(row, changes, env={"IZ_STANDIN_STATS": str(stats)})
        ranks = run.read_lines(stats)
        return r, {k: sum(rank[k] for rank in ranks) for k in ranks[0]}
    return counted


# Four units of a chunk each: a copy of each one's parameters, and of its masters.
# StarPU may measure the bus by 64 more.
@standin
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


@pytest.fixture
def traffic(counted):
    """Bytes of two more steps, without those of start and end."""
    def traffic(row, **changes):
        few, at_first = counted({**row, "steps": 2}, changes)
        many, later = counted({**row, "steps": 4}, changes)
        return ({k: later[k] - at_first[k] for k in ("h2d_bytes", "d2h_bytes")},
                {k: many.summary[k] - few.summary[k]
                 for k in ("up_bytes", "down_bytes", "fetched_bytes")})
    return traffic


# Two ranks' shards have the same length.
@standin
@pytest.mark.parametrize("master", ("full", "remainder"))
@pytest.mark.parametrize("ranks,comm,stage,optimizer,micro,param,ratio", [
    (1, "mpi", 0, "none", 0, "none", 1), (1, "mpi", 2, "cpu", 0, "none", 1),
    (1, "mpi", 3, "cpu", 0, "cpu", 1), (1, "mpi", 3, "nvme", 0, "nvme", 1),
    (1, "mpi", 3, "cpu", 0, "none", 1), (1, "mpi", 2, "cpu", 0, "none", 0.4),
    (1, "mpi", 3, "cpu", 0, "cpu", 0.4), (1, "mpi", 1, "cpu", 0, "none", 0),
    (2, "nccl", 3, "cpu", 0, "cpu", 1), (2, "nccl", 3, "cpu", 0, "cpu", 0.4),
    (2, "nccl", 3, "cpu", 4, "none", 0.4), (2, "nccl", 3, "cpu", 4, "cpu", 0),
    (2, "nccl", 1, "none", 0, "none", 1),
    (2, "mpi", 3, "cpu", 0, "cpu", 1), (2, "mpi", 3, "cpu", 4, "cpu", 0.4),
    (2, "mpi", 3, "cpu", 4, "none", 0.4), (2, "mpi", 3, "none", 4, "none", 1),
    (2, "mpi", 2, "cpu", 0, "none", 1), (2, "mpi", 1, "none", 0, "none", 1),
    (2, "mpi", 0, "none", 4, "none", 1)])
def test_bytes_over_the_bus_are_the_planned_ones(ranks, comm, stage, optimizer, micro,
                                                 param, ratio, master, start, traffic):
    row = {**ROW, "ranks": ranks, "comm": comm, "micro": micro, "stage": stage,
           "optimizer": optimizer, "param": param, "ratio": ratio, "master": master}
    if ranks > 1:
        start(row)  # StarPU measures the bus of two GPUs
    real, planned = traffic(row)
    assert real["h2d_bytes"] == ranks * planned["up_bytes"]
    assert real["d2h_bytes"] == ranks * planned["down_bytes"]


@standin
@pytest.mark.parametrize("form, ranks, comm, stage, optimizer, param", QUANT)
def test_codes_cross_the_bus(form, ranks, comm, stage, optimizer, param, start,
                             traffic):
    row = {**ROW, "ranks": ranks, "comm": comm, "stage": stage, "optimizer": optimizer,
           "param": param}
    if ranks > 1:
        start({**row, "param": param.split("/")[0]})  # StarPU measures the bus of the GPUs
    bits, planned = traffic({**row, "tuned": form})
    assert bits["h2d_bytes"] == ranks * planned["up_bytes"]
    assert bits["d2h_bytes"] == ranks * planned["down_bytes"]


@standin
@pytest.mark.parametrize("micro", (2, 6))
def test_experts_of_the_host_do_not_cross_the_bus(micro, traffic):
    """Their parameters do not go up, their gradients do not come down."""
    row = {**ROW, **FAR, "model": "units of experts", "micro": micro,
           "boundaries": "host", "schedule": "breadth_first"}
    every, _ = traffic(row)
    real, planned = traffic(row, **{"run.cold_experts": "auto",
                                    "run.cold_expert_rows": 10**6})
    assert real["h2d_bytes"] == planned["up_bytes"] < every["h2d_bytes"]
    assert real["d2h_bytes"] == planned["down_bytes"]


@standin
@pytest.mark.parametrize("form, group, param", (
    ("nf4", 8192 + 256 + 8, "cpu"), ("nf4", 8192 + 256 + 8, "nvme"),
    ("int8", 16384 + 4 * 256, "cpu")))
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


@standin
@pytest.mark.parametrize("comm", ("mpi", "nccl"))
@pytest.mark.parametrize("stage, schedule, ratio", [
    (2, "depth_first", 1), (2, "breadth_first", 1), (3, "breadth_first", 1),
    (1, "depth_first", 0.4)])
def test_local_sums_come_down_once_a_step(comm, stage, schedule, ratio, start, traffic):
    """Three micro-batches.  In bf16 whole to the host's collectives, or in fp32 a
    shard of what NCCL has brought: as many bytes."""
    c, shard = run.MODEL["width"], lambda n: padded(-(-n // 2))
    grads = 2 * shard((256 + 16) * c) + shard(2 * c) + \
        run.MODEL["layers"] * shard(12 * c * c + 13 * c)
    row = {**ROW, "ranks": 2, "comm": comm, "micro": 4, "stage": stage,
           "schedule": schedule, "optimizer": "cpu", "ratio": ratio}
    start(row)  # StarPU measures the bus of two GPUs
    each, _ = traffic(row)
    once, planned = traffic({**row, "sums": "local_first"})
    more = each["d2h_bytes"] - once["d2h_bytes"]
    a_step = 2 * 2 * 4 * grads  # on both ranks, of two steps
    assert more == 2 * a_step or ratio < 1 and comm == "nccl" and \
        0.3 < more / (2 * a_step) < 0.5
    assert once["h2d_bytes"] == 2 * planned["up_bytes"]
    assert once["d2h_bytes"] == 2 * planned["down_bytes"]


@standin
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


@standin
@pytest.mark.parametrize("stage, dtype, optimizer, ratio, sums", [
    (0, "fp32", "none", 1, "local_first"), (1, "bf16", "none", 1, "ranks_first"),
    (2, "fp16", "cpu", 1, "local_first"), (3, "bf16", "cpu", 0.4, "ranks_first")])
def test_groups_of_ranks_have_the_bits_of_the_cpu(stage, dtype, optimizer, ratio, sums,
                                                  start):
    row = {**ROW, "ranks": 4, "stage": stage, "dtype": dtype, "micro": 3, "sums": sums,
           "schedule": "breadth_first"}
    gpu = {**row, "optimizer": optimizer, "ratio": ratio}
    found = {}
    for g in (2, 4):
        group = {"run.sum_group": g}
        found[g] = start({**row, "device": "cpu"}, group).numbers
        for comm in ("nccl", "mpi"):
            assert start({**gpu, "comm": comm}, group).numbers == found[g], comm
    assert found[2] != found[4]


# Copies of the parameters in two groups of two ranks, where parameters live.
COPIES = {**ROW, "ranks": 4, "group": 2, "stage": 3, "micro": 3, "delay_us": 300,
          "jitter_us": 500}


@standin
@pytest.mark.parametrize("comm", ("nccl", "mpi"))
@pytest.mark.parametrize("dtype, optimizer, param, ratio, tuned, ring", [
    ("fp32", "none", "none", 1, "all", 1), ("bf16", "cpu", "none", 0.4, "lora", 3),
    ("fp16", "cpu", "cpu", 1, "frozen", 1), ("bf16", "nvme", "cpu", 1, "lora", 3),
    ("fp32", "nvme", "none", 1, "top", 1)])
def test_copies_have_the_bits_of_the_cpu(comm, dtype, optimizer, param, ratio, tuned,
                                         ring, start, references):
    row = {**COPIES, "comm": comm, "dtype": dtype, "optimizer": optimizer,
           "param": param, "ratio": ratio, "tuned": tuned, "ring": ring}
    key = "copies", dtype, tuned
    if key not in references:
        references[key] = start({**ROW, "ranks": 4, "micro": 3, "dtype": dtype,
                                 "tuned": tuned, "device": "cpu"}).numbers
    r = start(row)
    assert r.numbers == references[key], str(r)
    assert r.bytes_of("parameter copies") > 0


@standin
@pytest.mark.parametrize("comm", ("nccl", "mpi"))
@pytest.mark.parametrize("param", ("none", "cpu"))
def test_bytes_of_copies_over_the_bus_are_the_planned_ones(comm, param, start, traffic):
    row = {**COPIES, "comm": comm, "optimizer": "cpu", "param": param, "jitter_us": 0,
           "delay_us": 0}
    start(row)  # StarPU measures the bus of four GPUs
    real, planned = traffic(row)
    assert real["h2d_bytes"] == 4 * planned["up_bytes"]
    assert real["d2h_bytes"] == 4 * planned["down_bytes"]


@standin
@pytest.mark.parametrize("param", ("none", "cpu"))
def test_fetches_of_copies_stay_on_the_host(param, start):
    """More of them do not send more to the other one.  (GPUs of one machine are not
    on two hosts for NCCL, which sends as much.)"""
    def sent(steps, ring, comm, **env):
        r = start({**COPIES, "comm": comm, "optimizer": "cpu", "param": param,
                   "steps": steps, "ring": ring}, {"run.sum_group": 4}, env=env)
        return r.summary["far_bytes"], r.summary["sent_bytes"]
    hosts = {"LD_PRELOAD": run.built("tests/libhosts.so"), "HOSTS": "aabb"}
    few, many, more = (sent(*x, "mpi", **hosts) for x in ((2, 0), (2, 1), (3, 1)))
    assert few[0] == many[0] < more[0] and few[1] < many[1]
    assert sent(3, 1, "nccl")[1] - sent(2, 1, "nccl")[1] == more[1] - many[1]


@standin
@pytest.mark.parametrize("ratio", (1, 0.4, 0))
@pytest.mark.parametrize("param", ("none", "cpu"))
def test_upper_halves_come_to_the_lower_ones(param, ratio, traffic):
    """Where masters are updated on one side and parameters live on the other, these
    go both ways."""
    row = {**ROW, "stage": 3, "optimizer": "cpu", "param": param, "ratio": ratio}
    more = {kept: traffic({**row, "master": kept})[0] for kept in ("full", "remainder")}
    far = 1 - ratio if param == "cpu" else ratio
    way = "h2d_bytes" if param == "cpu" else "d2h_bytes"
    extra = {k: more["remainder"][k] - more["full"][k] for k in more["full"]}
    both_steps = 2 * 2 * run.parameters(run.MODEL)
    assert extra.pop(way) == pytest.approx(far * both_steps, rel=0.1)
    assert extra == {k: 0 for k in extra}


@standin
@pytest.mark.parametrize("schedule", ("depth_first", "breadth_first"))
@pytest.mark.parametrize("dtype, micro, stage, param, ratio", [
    ("bf16", 4, 3, "cpu", 1), ("bf16", 4, 2, "none", 0.4), ("fp16", 8, 1, "none", 1),
    ("fp32", 8, 3, "cpu", 0.4), ("bf16", 0, 3, "cpu", 1)])
def test_a_single_gpu_sends_each_sum_once(schedule, dtype, micro, stage, param, ratio,
                                          start, traffic):
    """In the accumulators' type, of what the host updates, whatever the number of
    micro-batches or uses.  Without room for that the host adds: the same bits."""
    row = {**ROW, "dtype": dtype, "micro": micro, "stage": stage, "optimizer": "cpu",
           "param": param, "ratio": ratio, "schedule": schedule}
    size = 4 if dtype == "fp32" else 2
    apart = sum(on_gpu(run.MODEL, ratio, ROW["chunk"])) if ratio < 1 else 0
    host = sum(padded(n) for n in unit_elems(run.MODEL)) - apart
    once, planned = traffic(row)
    assert once["d2h_bytes"] == 2 * (
        (4 if micro else size) * host + (size * apart if param == "cpu" else 0))
    assert once["h2d_bytes"] == planned["up_bytes"]
    assert once["d2h_bytes"] == planned["down_bytes"]
    near, far = start(row), far_sums(start, row)
    cpu = start({**row, "device": "cpu", "ratio": 1})
    words = "the GPU adds the micro-batches; their sums come down once a step"
    assert (words in near.out) == (micro > 0) and words not in far.out
    assert near.numbers == cpu.numbers and far.numbers == cpu.numbers


@standin
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


def model(layers, width):
    return {"model": {"layers": layers, "heads": 2, "width": width, "seq": 16,
                      "vocab": 256}}


def padded(n):
    return -(-n // 64) * 64


@standin
def test_offload_moves_what_the_arithmetic_says(traffic):
    """Per step: a ring of 2 keeps what backward begins with, so that every
    block but the last goes up twice; every gradient comes down once."""
    c, layers = 16, 8
    real, _ = traffic({**ROW, **FAR, "ring": 2}, **model(layers, c))
    block = padded(12 * c * c + 13 * c) * 2
    embed = padded((256 + 16) * c) * 2
    head = padded(2 * c) * 2
    # embedding and head have slots of their own; of two block slots the last
    # two blocks are still there when backward begins
    up = embed + head + block * (2 * layers - 2)
    down = embed + head + block * layers
    assert real["h2d_bytes"] == 2 * up
    assert real["d2h_bytes"] == 2 * down


def state_elems(r, tier, per_element):
    return r.memory.get(("optimizer", tier), (0, 0))[1] // per_element


def unit_elems(model):
    c = model["width"]
    return [(model["vocab"] + model["seq"]) * c,
            *[12 * c * c + 13 * c] * model["layers"], 2 * c]


def on_gpu(model, ratio, chunk):
    """Elements of each unit that the GPU updates, on one rank."""
    want = have = 0
    for n in map(padded, unit_elems(model)):
        want += ratio * n
        host = min((min(k * chunk, n) for k in range(-(-n // chunk) + 1)),
                   key=lambda e: (abs(e - (want - have)), e))
        have += host
        yield n - host


@standin
@pytest.mark.parametrize("ratio", (0.4, 0))
@pytest.mark.parametrize("dtype,micro,param", [
    ("bf16", 0, "cpu"), ("bf16", 8, "cpu"), ("bf16", 0, "none"),
    ("fp32", 0, "cpu"), ("fp32", 8, "none")])
def test_the_gradients_of_what_the_gpu_updates_stay_there(dtype, micro, param,
                                                          ratio, start, traffic):
    """Of each element that the GPU updates no gradient comes down and none goes
    up; the new parameter comes down if it lives on the host; if it does not,
    none goes up that would have."""
    chunk, size = ROW["chunk"], 2 if dtype == "bf16" else 4
    row = {**ROW, "dtype": dtype, "micro": micro, "stage": 3, "ring": 2,
           "optimizer": "cpu", "param": param}
    whole, _ = traffic(row)
    some, planned = traffic({**row, "ratio": ratio})
    r = start({**row, "ratio": ratio})
    apart = list(on_gpu(run.MODEL, ratio, chunk))
    of_host, of_gpu = ((8, 12) if param == "cpu" else (12, 8)) \
        if dtype == "fp32" else (12, 12)
    host = state_elems(r, "cpu", of_host)
    gpu = state_elems(r, "device", of_gpu)
    assert gpu == sum(apart)
    assert abs(host - ratio * (host + gpu)) <= chunk / 2
    assert f"effective ratio {host / (host + gpu):.3f}" in r.out
    uses = gpu + apart[0]  # the embedding's weight has two
    wide = 4 if micro else size
    saved_up, added_down = (0, gpu) if param == "cpu" else (gpu, 0)
    assert whole["h2d_bytes"] - some["h2d_bytes"] == 2 * size * saved_up
    assert whole["d2h_bytes"] - some["d2h_bytes"] == \
        2 * (wide * gpu - size * added_down)
    assert some["h2d_bytes"] == planned["up_bytes"]
    assert some["d2h_bytes"] == planned["down_bytes"]
    embed = padded((256 + 16) * run.MODEL["width"]) - apart[0]  # the host's
    kept = 4 * (uses + host + embed) if micro else size * (gpu + embed)
    assert r.memory[("gradients", "device")] == (kept, kept)


@standin
def test_breadth_first_divides_the_way_up(traffic):
    row = {**ROW, **FAR, "ring": 2, "micro": 3}
    deep, _ = traffic(row, **model(8, 32))
    wide, _ = traffic({**row, "schedule": "breadth_first"}, **model(8, 32))
    assert 7 * wide["h2d_bytes"] < deep["h2d_bytes"]


@standin
@pytest.mark.parametrize("schedule, micro, waves, tracks", [
    ("depth_first", 0, 1, 1), ("depth_first", 8, 3, 1),
    ("breadth_first", 8, 1, 3), ("breadth_first", 3, 1, 8)])
def test_boundaries_on_the_host_cross_once_each_way(schedule, micro, waves,
                                                    tracks, start, traffic):
    """All but those that the slots still hold when backward begins, which are
    one for each micro-batch under way and two more.  From the host's memory to a
    file and back they go in whole pages."""
    c, layers, seq = 16, 8, 16
    row = {**ROW, **FAR, "ring": 2, "micro": micro, "schedule": schedule}
    near, _ = traffic(row, **model(layers, c))
    far, planned = traffic({**row, "boundaries": "host"}, **model(layers, c))
    boundary = (micro or BATCH) * seq * c * 4  # fp32 on the stand-in
    times = waves * ((layers + 1) * tracks - (tracks + 2))
    moved = times * boundary
    assert far["h2d_bytes"] - near["h2d_bytes"] == 2 * moved
    assert far["d2h_bytes"] - near["d2h_bytes"] == 2 * moved
    assert far["h2d_bytes"] == planned["up_bytes"]
    assert far["d2h_bytes"] == planned["down_bytes"]
    filed = {**row, "boundaries": "disk"}
    assert traffic(filed, **model(layers, c))[0] == far
    r = start(filed, model(layers, c))
    disk, region = r.last("links")["disk"]["bytes"], -(-boundary // 8192) * 8192
    assert disk == 2 * row["steps"] * times * region
    assert r.bytes_in("nvme") == tracks * layers * region


@standin
def test_nothing_is_left_and_nothing_was_pageable(counted):
    _, stats = counted({**ROW, **FAR})
    assert stats["kernels"] > 0
    assert stats["pageable"] == 0 and stats["leaked_bytes"] == 0


# ---- memory ----

@standin
def test_states_beyond_the_gpu_train_there(start):
    """Four times as much as the GPU may hold, and the same losses."""
    large, row = model(40, 64), {**ROW, "dtype": "fp32", "micro": 4, "steps": 2}
    plain = start({**row, "device": "cpu"}, large)
    r = far_sums(start, {**row, **FAR, "ring": 2}, large)
    used = sum(have for (name, tier), (_, have) in r.memory.items()
               if tier == "device" and name != "scratch")
    assert 4 * used < 16 * run.parameters(large["model"])
    assert r.numbers == plain.numbers


@standin
@pytest.mark.parametrize("ranks, comm, c", ((1, "mpi", 16), (1, "mpi", 48),
                                            (2, "nccl", 48)))
def test_gradients_are_staged_only_where_the_host_adds(ranks, comm, c, start):
    """One contribution comes straight down, but of the tied embedding there are
    two, whether it is larger than a block or smaller; of two micro-batches
    every unit has two.  Two buffers, in the type of the wire, or in fp32 where
    ranks were added.  None if the GPU adds."""
    row = {**ROW, **FAR, "ranks": ranks, "comm": comm}
    embed = padded((256 + 16) * c)
    block = padded(12 * c * c + 13 * c)
    each = 2 * (2 if ranks == 1 else 4)
    staged = {}
    for micro in (0, 12 // ranks):
        r = (far_sums(start, {**row, "micro": micro}, model(2, c)) if ranks == 1
             else start({**row, "micro": micro}, model(2, c)))
        staged[micro] = r.memory[("staging", "cpu")][1]
    bounce = staged[0] - each * padded(embed // ranks)
    assert staged[12 // ranks] == \
        bounce + each * padded(max(embed, block) // ranks)
    assert bounce == 32 * run.MIB


@standin
@pytest.mark.parametrize("schedule, tracks", [("depth_first", 1),
                                             ("breadth_first", 3)])
def test_boundaries_on_the_host_are_not_on_the_gpu(schedule, tracks, start):
    """Deep and thin, so that boundaries are most of it: a GPU that holds them
    only as they pass.  Evaluation and text pass through the same slots."""
    c, layers, seq, micro = 32, 60, 16, 8
    row = {**ROW, **FAR, "ring": 2, "micro": micro, "schedule": schedule}
    host = {**row, "boundaries": "host"}
    small = {**model(layers, c), "run.eval_batches": 2, "run.eval_interval": 1,
             "run.sample_tokens": 4, "run.sample_prompt": "In"}
    near, far = start(row, small), start(host, small)
    one = micro * seq * c * 4  # fp32 on the stand-in
    for r, device, cpu in ((near, tracks * (layers + 2), 0),
                           (far, 2 * tracks + 2, tracks * layers)):
        held = {tier: have for (name, tier), (_, have) in r.memory.items()
                if name == "boundaries" and have}
        assert held == {t: n * one for t, n in (("device", device),
                                                ("cpu", cpu)) if n}, str(r)
    assert far.numbers == near.numbers
    assert run.sampled(far) == run.sampled(near)
    least = far_sums(start, host, small).bytes_in("device")
    tight = {**small, "run.device_memory_limit_bytes": least}
    start(host, tight)
    r = start(row, tight, good=False)
    run.refused(r, "MiB of the GPU's memory")
    assert "cpu_checkpointing=true" in r.err


@standin
@pytest.mark.parametrize("param", ("none", "cpu"))
def test_a_skipped_step_changes_nothing_on_either_side(param, start):
    row = {**ROW, "dtype": "fp16", "steps": 8}
    high = {"fp16.initial_scale_power": 22, "fp16.hysteresis": 1}
    r = start({**row, **FAR, "param": param, "ratio": 0.5}, high)
    plain = start({**row, "device": "cpu"}, high)
    skipped = [x["skipped"] for x in r.steps]
    assert True in skipped and False in skipped
    assert r.numbers == plain.numbers
