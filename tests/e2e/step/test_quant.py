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
NF4 = {"model.base_dtype": "nf4"}
GROUP = 64 * 256
GROUP_BYTES = {"nf4": GROUP // 2 + 256 + 4 + 4, "int8": GROUP + 4 * 256}
ERROR = {"nf4": 0.15, "int8": 0.01}  # at most
# Of experts: few weights each, and matrices that fill their groups.
MIXTURES = {"qwen3_moe": ("qwen3_moe",), "mixtral": ("mixtral", {44: 12}),
            "whole groups": ("qwen3_moe", {32: 128, 20: 128, 12: 8, 48: 32, 24: 16})}

# The model, format, ranks, stage and homes, type, exported adapters, and more.  What is
# frozen may have a home of its own.  Of nf4 more places are in test_matrix.py.
ASYNC = {"run.save_interval": 1, "run.save_mode": "async"}
CASES = [
    ("gpt2", "nf4", 1, (0, "none", "none"), "fp32", "adapter", {}),
    ("gpt2", "int8", 1, (3, "cpu", "nvme"), "fp16", "merged", {"run.save_interval": 1}),
    ("gpt2", "nf4", 1, (3, "none", "none/nvme"), "bf16", "adapter", ASYNC),
    ("gpt2", "int8", 2, (0, "none", "none"), "fp32", "merged",
     {"run.sum_order": "local_first"}),
    ("gpt2", "int8", 2, (3, "none", "nvme"), "fp32", "adapter", ASYNC),
    ("gpt2", "int8", 3, (3, "cpu", "nvme/none"), "bf16", "adapter",
     {"run.nvme_checksum": True}),
    ("qwen3_moe", "nf4", 1, (0, "none", "none"), "fp32", "adapter", {}),
    ("qwen3_moe", "int8", 2, (3, "none", "nvme"), "bf16", "merged",
     {"model.experts_per_unit": 4, "lora.targets": "*experts*"}),
    ("mixtral", "nf4", 3, (3, "cpu", "cpu"), "fp16", "merged",
     {"model.experts_per_unit": 4}),
    ("mixtral", "int8", 2, (1, "cpu", "none"), "fp32", "merged",
     {"lora.targets": "*attn*"}),
    ("whole groups", "nf4", 2, (3, "nvme", "nvme"), "bf16", "adapter",
     {"lora.targets": "*attn*"}),
    ("whole groups", "nf4", 1, (3, "none", "none/cpu"), "fp32", "merged",
     {"model.experts_per_unit": 4})]


def weights(kind, dtype):
    """A model's tensors, its config, and the names of what is quantised."""
    dtype = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}[dtype]
    if kind == "gpt2":
        tensors = hf.random_tensors(hf.gpt2_shapes(MODEL), dtype)
        return tensors, hf.gpt2_config(MODEL), {
            k for k, (_, shape, _) in tensors.items() if ".h." in k and len(shape) > 1}
    shapes, model = hf.model_of(*MIXTURES[kind])
    tensors = hf.random_tensors(shapes, dtype)
    return tensors, model, {k for k in tensors if "experts" in k or "_proj" in k}


@pytest.mark.parametrize("kind, form, ranks, zero, dtype, export, more", [
    pytest.param(*x, id="-".join(map(str, x)), marks=[pytest.mark.sanitized] * (
        x[:3] == ("gpt2", "nf4", 1))) for x in CASES])
def test_the_bits_are_those_of_its_values(kind, form, ranks, zero, dtype, export, more,
                                          place, nvme):
    """The run's whose base has the values of what is quantised, also from its middle on.
    Each matrix of an expert is quantised by itself: however a block is cut."""
    place.use(run.built("models/gpt2" if kind == "gpt2" else "models/moe"))
    before, model, names = weights(kind, dtype)
    folder = hf.write(place.folder / "in", before, model)
    c = {**LORA, **run.typed(dtype), "run.eval_batches": 1, "lora.export": export,
         "model": {"seq": 16, "import": str(folder)}, **more}
    quantised, values = {**c, "model.base_dtype": form}, place.folder / "values"
    place.good(1, {**quantised, "run.export": str(values), "lora.export": "merged",
                   "run.steps": 1, "optimizer.params.lr": 0.0})
    after = hf.read(values)
    assert {k for k, t in before.items() if t != after[k]} == names
    for k in names if dtype == "fp32" else ():
        was, now = (array.array("f", x[k][2]) for x in (before, after))
        error = sum((a - b)**2 for a, b in zip(was, now)) / sum(a * a for a in was)
        assert error**0.5 < ERROR[form], k
    want = place.good(ranks, {**c, "run.save_interval": 0, "run.save_mode": "auto",
                              "model.import": str(values),
                              "run.export": str(place.folder / "a")})
    quantised |= {**run.offload(*zero, nvme), "run.save": True, "run.inject_delay_us": 300}
    have = place.halves(ranks, {**quantised, "run.steps": 2},
                        {**quantised, "run.export": str(place.folder / "b")})
    assert have.bits == want.bits
    run.ckpt("export", have.output, "--out", place.folder / "tool",
             *["--adapter"][:export == "adapter"])
    a, b, tool = ({x.name: x.read_bytes() for x in (place.folder / y).glob("*.safetensors")}
                  for y in ("a", "b", "tool"))
    assert a and a == b == tool


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


@pytest.mark.parametrize("form", GROUP_BYTES)
def test_bytes_are_those_of_the_arithmetic(form, place):
    """Whole groups to each rank, in memory, on the wire and in a checkpoint."""
    width, layers = MODEL["width"], MODEL["layers"]
    n = sum(-(-width * k * width // GROUP) for k in (3, 1, 4, 4))  # groups of a block
    each = n // 2 * GROUP_BYTES[form]
    place.use(run.PROGRAM, MODEL)
    c = {**LORA, "run.save": True, "run.steps": 1, "run.ring": 9,
         "zero_optimization.stage": 3}
    r, plain = (place.good(2, {**c, **more})
                for more in ({"model.base_dtype": form}, {}))
    weights, others = 12 * width * width, 13 * width
    less = 4 * (run.padded(weights + others, 2) - run.padded(others, 2)) // 2
    assert plain.bytes_of("parameters") - r.bytes_of("parameters") == \
        layers * (less - each)
    assert r.bytes_of("staging") - plain.bytes_of("staging") == 2 * 2 * each
    # Each block is gathered once; the scales' sums are 8 bytes for each group.
    sent = plain.summary["sent_bytes"] - r.summary["sent_bytes"]
    assert abs(sent - layers * (less - each)) < 1024
    size, was = (sum(map(len, x.files.values())) for x in (r, plain))
    assert abs(was - size - layers * (4 * weights - n * GROUP_BYTES[form])) < 4096
    assert f"h.0.base/{form}".encode() in r.files[
        "step-00000001/rank-00000-of-00002.safetensors"]
    run.ckpt("verify", r.output)


def test_ckpt_exports_a_base_without_adapters(place):
    """Those with them: tests/e2e/hf/test_lora.py."""
    out = place.folder / "run"
    place.use(run.PROGRAM, MODEL)
    r = place.good(3, {**LORA, **NF4, **run.typed("fp16"), "run.save": True, "lora": {},
                       "run.export": str(out), "parameters": [
                           {"match": "*", "frozen": True},
                           {"match": "ln_f.*", "frozen": False}]})
    run.ckpt("export", r.output, "--out", place.folder / "tool")
    assert hf.read(place.folder / "tool") == hf.read(out)


@pytest.mark.parametrize("size, blocks, width, ffn", (
    ("8b", 32, 4096, 14336), ("70b", 80, 8192, 28672)))
def test_the_configs_fit_a_desktop(size, blocks, width, ffn):
    """A card of 24 GB, and a host of which 16 GB are used at most."""
    configs = run.ROOT / "configs"
    r = run.call(run.built("models/llama"), configs / f"llama-3-{size}-nf4.json",
                 "--plan", "--machine", configs / "machines/rtx4090-workstation.json")
    assert r.rc == 0, str(r)
    total = next(x.split() for x in r.out.splitlines() if x.startswith("  total"))
    assert float(total[1]) < 24 * 1024 and float(total[2]) < 13 * 1024
    n = blocks * width * (2 * width + 2 * 1024 + 3 * ffn)  # of q, o, k, v, gate, up, down
    assert f"{n / 1e6:.2f}M of the parameters are in nf4: " \
        f"{n // GROUP * GROUP_BYTES['nf4'] / 2**20:.2f} MiB on all ranks together, " \
        "4.13 bits each" in r.out, str(r)
