# SPDX-License-Identifier: Apache-2.0
"""A quantised base: wherever it lives, the bits of a run whose base has its values."""
import array

import pytest

import run
from run import hf

# No multiple of 64 divides these matrices, and one of each block has two groups.
MODEL = {**run.MODEL, "width": 66, "layers": 3}
LORA = {"lora": {"rank": 4, "alpha": 6.0, "targets": "*"},
        "train_batch_size": 12, "run.steps": 4, "optimizer.params.lr": 0.02}
FORMATS = ("nf4", "int8")
NF4 = {"model.base_dtype": "nf4"}
ADAPTER = {"lora.export": "adapter"}
GROUP = 64 * 256
GROUP_BYTES = {"nf4": GROUP // 2 + 256 + 4 + 4, "int8": GROUP + 4 * 256}


@pytest.fixture(scope="module")
def folder(shared):
    """Weights."""
    shared.model = {**MODEL}
    return hf.write(shared.folder / "in", hf.gpt2_tensors(MODEL, "F32"),
                    hf.gpt2_config(MODEL))


@pytest.fixture
def base(place, folder):
    """The config of a run that starts from them."""
    place.model = {**MODEL}
    return {**LORA, "model.import": str(folder)}


@pytest.fixture(scope="module")
def values(shared, folder):
    """A folder with those that they have as they are quantised; adapters begin at
    zero, and so does what they add."""
    def values(dtype, form):
        out = shared.folder / f"{form}-{dtype}"
        if not out.exists():
            shared.good(1, {**LORA, "model.import": str(folder), "model.base_dtype": form,
                            **run.typed(dtype), "run.steps": 1, "run.export": str(out),
                            "optimizer.params.lr": 0.0})
        return out
    return values


def trained(place, ranks, config, name, **more):
    """A run's numbers, and the adapter that it leaves."""
    folder = place.folder / name
    r = place.good(ranks, {**config, **ADAPTER, "run.export": str(folder)}, **more)
    return r.bits, (folder / "adapter_model.safetensors").read_bytes()


def groups(model):
    """Of a block's matrices."""
    c = model["width"]
    return sum(-(-c * n // GROUP) for n in (3 * c, c, 4 * c, 4 * c))


# The format, ranks, stage, homes of optimizer and parameters, type, and more.  What
# is frozen may have a home of its own.  Of nf4 more places are in test_matrix.py.
EACH, ASYNC = {"run.save_interval": 1}, {"run.save_mode": "async"}
CASES = [
    ("nf4", 1, 0, "none", "none", "fp32", {}),
    ("int8", 1, 3, "cpu", "nvme", "fp16", EACH),
    ("nf4", 1, 3, "none", "none/nvme", "bf16", {**EACH, **ASYNC}),
    ("int8", 2, 0, "none", "none", "bf16", {"run.sum_order": "local_first"}),
    ("int8", 2, 3, "none", "nvme", "fp32", {**EACH, **ASYNC}),
    ("int8", 3, 3, "cpu", "nvme/none", "bf16", {"run.nvme_checksum": True}),
]


@pytest.mark.parametrize("form, ranks, stage, optimizer, param, dtype, more", CASES)
def test_the_bits_are_those_of_its_values(form, ranks, stage, optimizer, param, dtype,
                                          more, place, base, values, nvme):
    c = {**base, **run.typed(dtype), **more, "run.eval_batches": 1}
    zero = run.offload(stage, optimizer, param, nvme)
    want = trained(place, ranks, {
        **c, "run.save_interval": 0, "run.save_mode": "auto",
        "model.import": str(values(dtype, form))}, "plain")
    have = trained(place, ranks, {
        **c, **zero, "model.base_dtype": form, "run.save": True,
        "run.inject_delay_us": 300}, form)
    assert have == want


# Experts: few weights each, and matrices that fill their groups.
MIXTURES = {
    "qwen3_moe": {}, "mixtral": {"intermediate_size": 12},
    "whole groups": {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 8}}
MIXED = [
    ("qwen3_moe", 0, "nf4", 1, (0, "none", "none"), "fp32", "*", "adapter"),
    ("qwen3_moe", 2, "int8", 2, (3, "none", "nvme"), "bf16", "*experts*", "merged"),
    ("mixtral", 3, "nf4", 3, (3, "cpu", "cpu"), "fp16", "*", "merged"),
    ("mixtral", 0, "int8", 2, (1, "cpu", "none"), "fp32", "*attn*", "merged"),
    ("whole groups", 0, "nf4", 2, (3, "nvme", "nvme"), "bf16", "*attn*", "adapter"),
    ("whole groups", 3, "nf4", 1, (3, "none", "none/cpu"), "fp32", "*", "merged")]


@pytest.mark.parametrize("kind, per_unit, form, ranks, zero, dtype, targets, export", MIXED)
def test_experts_have_the_bits_of_their_values(kind, per_unit, form, ranks, zero, dtype,
                                               targets, export, place, nvme):
    """Each matrix of an expert is quantised by itself: however a block is cut, and
    whoever goes on."""
    place.use(run.built("models/moe"))
    model = hf.llama_config(kind if kind in hf.MOE else "qwen3_moe", **MIXTURES[kind])
    weights = hf.random_tensors(hf.llama_shapes(model), {"fp32": "F32", "bf16": "BF16",
                                                         "fp16": "F16"}[dtype])
    plain = hf.write(place.folder / "in", weights, model)
    c = {**LORA, **run.typed(dtype), "lora": {**LORA["lora"], "targets": targets},
         "model": {"seq": 16, "import": str(plain)}, "lora.export": export}
    quantised, values = {**c, "model.base_dtype": form}, place.folder / "values"
    place.good(1, {**quantised, "run.export": str(values), "lora.export": "merged",
                   "run.steps": 1, "optimizer.params.lr": 0.0})
    now = hf.read(values)
    assert {k for k, t in weights.items() if t != now[k]} == \
        {k for k in weights if "experts" in k or "_proj" in k}
    c, quantised = ({**x, "model.experts_per_unit": per_unit} for x in (c, quantised))
    want = place.good(ranks, {**c, "model.import": str(values),
                              "run.export": str(place.folder / "a")})
    have = place.halves(ranks, {**quantised, **run.offload(*zero, nvme), "run.save": True,
                                "run.steps": 2},
                        {**quantised, "run.save": True,
                         "run.export": str(place.folder / "b")}, again=ranks)
    assert have.bits == want.bits
    run.ckpt("export", have.output, "--out", place.folder / "tool",
             *["--adapter"][:export == "adapter"])
    a, b, tool = ({x.name: x.read_bytes() for x in (place.folder / y).glob("*model*.safetensors")}
                  for y in ("a", "b", "tool"))
    assert a and a == b == tool


@pytest.mark.sanitized
@pytest.mark.parametrize("form, least, most, n", (
    ("nf4", 0.05, 0.15, 16), ("int8", 0.002, 0.01, 64)))
def test_the_values_are_others_and_near(form, least, most, n, values):
    """Or the test above would compare a run with itself."""
    before, after = hf.gpt2_tensors(MODEL, "F32"), hf.read(values("fp32", form))
    for name, (_, shape, data) in before.items():
        was, now = (array.array("f", x[name][2]) for x in (before, after))
        if len(shape) == 1 or "wte" in name or "wpe" in name:
            assert was == now, name
            continue
        error = sum((a - b)**2 for a, b in zip(was, now)) / sum(a * a for a in was)
        assert least < error**0.5 < most, name
        assert len(set(now[:64])) <= n and now != was, name


def test_8_bits_are_by_their_definition(values):
    """Code times scale, of blocks of 64 of a matrix end to end."""
    before, after = hf.gpt2_tensors(MODEL, "F32"), hf.read(values("fp32", "int8"))
    name = "transformer.h.1.mlp.c_proj.weight"
    was, now = (array.array("f", x[name][2]) for x in (before, after))
    for i in range(0, len(was), 64):
        most = max(map(abs, was[i:i + 64]))
        for a, b in zip(was[i:i + 64], now[i:i + 64]):
            code = b * 127 / most
            assert abs(code - round(code)) < 1e-4  # the nearest, or one of two
            assert abs(code - a * 127 / most) < 0.5001


def test_a_unit_of_several_pieces(place, nvme):
    """Of 4 MiB in a file, each a block of a checkpoint; a group begins in one and ends
    in the next."""
    c = {**LORA, **NF4, "model": {"width": 1024, "heads": 8, "layers": 1},
         "bf16.enabled": True, "run.steps": 2, "run.save": True,
         "run.save_interval": 1, "train_batch_size": 2, "optimizer.params.lr": 0.0}
    results = []
    for ranks, zero in ((1, {}), (1, run.offload(3, "none", "nvme", nvme)),
                        (2, {"zero_optimization.stage": 3})):
        out = place.folder / f"export{len(results)}"
        r = place.good(ranks, {**c, **zero, "run.export": str(out)})
        results.append((r.numbers, r.files, hf.read(out)))
        tool = place.folder / f"tool{len(results)}"
        run.ckpt("export", r.output, "--out", tool)
        assert hf.read(tool) == hf.read(out)
    assert results[0] == results[1]
    assert results[0][2] == results[2][2]  # half of it is one piece


@pytest.mark.parametrize("form", FORMATS)
def test_bytes_are_those_of_the_arithmetic(form, place, base, nvme):
    """Whole groups to each rank, in memory, on the wire and in a checkpoint."""
    n = groups(MODEL)
    assert n == 6
    group = GROUP_BYTES[form]
    each = -(-n // 2) * group
    layers = MODEL["layers"]
    c = {**base, "run.save": True, "run.steps": 1, "run.ring": 9,
         "zero_optimization.stage": 3}
    r, plain = (place.good(2, {**c, **more})
                for more in ({"model.base_dtype": form}, {}))
    width = MODEL["width"]
    weights = 12 * width * width
    others = 2 * width + 2 * width + 3 * width + width + 4 * width + width
    less = (-(-(weights + others) // 2 // 64) - -(-others // 2 // 64)) * 64 * 4
    assert plain.bytes_of("parameters") - r.bytes_of("parameters") == \
        layers * (less - each)
    assert r.bytes_of("staging") - plain.bytes_of("staging") == 2 * 2 * each
    # Each block is gathered once; the scales' sums are 8 bytes for each group.
    sent = plain.summary["sent_bytes"] - r.summary["sent_bytes"]
    assert abs(sent - layers * (less - each)) < 1024
    file = next(k for k in r.files if k.endswith("rank-00000-of-00002.safetensors"))
    part = f"h.0.base/{form}".encode()
    assert part in r.files[file] and part not in plain.files[file]
    size = sum(len(x) for x in r.files.values())
    was = sum(len(x) for x in plain.files.values())
    assert abs(was - size - layers * (4 * weights - n * group)) < 4096
    run.ckpt("verify", r.output)


@pytest.mark.parametrize("form, bits", (("nf4", 4.13), ("int8", 8.5)))
def test_the_plan_counts_bits(form, bits, place):
    place.use(run.built("models/llama"), {"preset": "llama-3-8b", "seq": 512})
    c = {**LORA, "model.base_dtype": form, "bf16.enabled": True,
         "zero_optimization.stage": 3, "train_batch_size": 2, "data.path": "none", "run.memory_limit_bytes": 1 << 36}
    r = place.launch(1, c, ["--plan", "--ranks", "2"])
    assert r.rc == 0, str(r)
    # Of 32 blocks q, k, v, o, gate, up and down of Llama 3 8B.
    n = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    assert f"{n / 1e6:.2f}M of the parameters are in {form}" in r.out, str(r)
    assert f"{bits:.2f} bits each" in r.out
    whole = n // GROUP * GROUP_BYTES[form]
    others = run.planned(r.out, ["parameters"]) - whole / 2
    assert 0 < others < 2 * 1.2e9  # embedding, head and adapters, half of them


def test_ckpt_exports_a_base_without_adapters(place, base):
    """Those with them: tests/e2e/hf/test_lora.py."""
    out = place.folder / "run"
    r = place.good(3, {**base, **NF4, **run.typed("fp16"), "run.save": True, "lora": {},
                       "run.export": str(out), "parameters": [
                           {"match": "*", "frozen": True}, {"match": "ln_f.*", "frozen": False}]})
    run.ckpt("export", r.output, "--out", place.folder / "tool")
    assert hf.read(place.folder / "tool") == hf.read(out)


@pytest.mark.parametrize("size", ("8b", "70b"))
def test_the_configs_fit_a_desktop(size):
    """A card of 24 GB, and a host of which 16 GB are used at most."""
    r = run.call(run.built("models/llama"), run.ROOT / f"configs/llama-3-{size}-nf4.json",
                 "--plan", "--machine", run.ROOT / "configs/machines/rtx4090-workstation.json")
    assert r.rc == 0, str(r)
    total = next(x.split() for x in r.out.splitlines() if x.startswith("  total"))
    assert float(total[1]) < 24 * 1024 and float(total[2]) < 13 * 1024
    assert "are in nf4" in r.out
