# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of experts: an adapter has matrices of its own for each expert,
and leaves and comes as PEFT has them, one adapter of each expert's linear layer."""
import pytest

import run
from run import STILL, hf
from test_hf import model, written
from test_lora import ADAPTER, ALPHA, RANK, adapters, floats, linear, \
    random_adapter, write_adapter


def lora(targets, **more):
    return {"lora": {"rank": RANK, "alpha": ALPHA, "targets": targets}, **more}


@pytest.mark.parametrize("kind, size, parts", (
    ("qwen3_moe", 4, ".experts."), ("mixtral", 1, ".experts."), ("qwen3_moe", 4, ".q_proj")))
def test_a_block_in_several_units_learns_the_same(kind, size, parts, place):
    """From adapters in a folder: of experts, or of attention, whose gradients units of
    frozen experts hand on."""
    base = written(place, kind)
    start = write_adapter(place.folder / "adapter", random_adapter(linear(kind, parts), 1.5))
    runs = []
    for per_unit in (0, size):
        out = place.folder / f"adapter{per_unit}"
        r = place.good(1, {**model(base), **ADAPTER, "lora.import": str(start),
                           "gradient_clipping": 0, "run.export": str(out),
                           "model.experts_per_unit": per_unit})
        runs.append((r.losses, adapters(out)[0]))
    assert runs[0] == runs[1]


def test_adapters_of_some_experts_alone_are_refused(place):
    base = written(place, "qwen3_moe")
    r = place.launch(1, {**model(base), **lora("*experts.1.gate_proj.weight")})
    run.refused(r, "lora.targets", "1 of the", "experts", "gate_proj")
    some = random_adapter({k: v for k, v in linear("qwen3_moe", ".experts.").items()
                           if ".experts.0." not in k})
    folder = write_adapter(place.folder / "adapter", some)
    r = place.launch(1, {**model(base), "lora.import": str(folder)})
    run.refused(r, "lora.import", "of the", "experts")
    for key, value in (("dropout", 0.1), ("use_dora", True)):
        r = place.launch(1, {**model(base), **lora("*experts*", **{f"lora.{key}": value})})
        run.refused(r, f"lora.{key}: {value:g}", "experts", "PEFT")


def fused(pairs, tail, parts):
    """The matrices of all experts of a block as PEFT has them for one tensor: rows of A
    by expert, columns of B by rank and then by expert."""
    each = [[pairs[f"{tail}.{e}.{part}"] for part in parts] for e in range(len(
        {k for k in pairs if k.startswith(f"{tail}.") and k.endswith(parts[0])}))]
    a = [x for e in each for x in floats(e[0]["lora_A"])]
    b = [[x for part in e for x in floats(part["lora_B"])] for e in each]
    rows, n_in = len(b[0]) // RANK, each[0][0]["lora_A"][1][1]
    b = [b[e][o * RANK + r] for o in range(rows) for r in range(RANK)
         for e in range(len(each))]
    return {"A": ("F32", (len(each) * RANK, n_in), hf.encode("F32", a)),
            "B": ("F32", (rows, len(each) * RANK), hf.encode("F32", b))}


FUSED = {"qwen3_moe": ("model.layers.{}.mlp.experts", "gate_proj", "up_proj", "down_proj"),
         "mixtral": ("model.layers.{}.block_sparse_moe.experts", "w1", "w3", "w2")}


@pytest.mark.parametrize("kind, targets", (
    ("qwen3_moe", "*experts*"), ("mixtral", "*experts*"),
    ("qwen3_moe", "*experts.down_proj*"), ("mixtral", "*experts.gate_up_proj*")))
def test_adapters_of_fused_experts_are_read(kind, targets, place):
    """What the same adapters of each expert are."""
    base, first = written(place, kind), place.folder / "first"
    c = {**model(base), "train_batch_size": 12}
    trained = {**c, **lora(targets), "optimizer.params.lr": 0.02, **ADAPTER}
    place.good(1, {**trained, "run.export": str(first)})
    pairs, _ = adapters(first)
    at, gate, up, down = FUSED[kind]
    has = {"gate_up_proj": (gate, up), "down_proj": (down,)}
    has = {k: v for k, v in has.items() if k in targets or targets == "*experts*"}
    tensors = {}
    for layer in range(3):
        for name, parts in has.items():
            if f"{at.format(layer)}.0.{parts[0]}" not in pairs:
                continue
            inner = ".base_layer" if len(has) == 2 and name == "gate_up_proj" else ""
            for matrix, t in fused(pairs, at.format(layer), parts).items():
                tensors[f"base_model.model.model.layers.{layer}.mlp.experts{inner}"
                        f".lora_{matrix}.weight"] = t
    folder = write_adapter(place.folder / "fused", tensors, target_modules=None,
                           target_parameters=[f"mlp.experts.{k}" for k in has])
    again = place.folder / "again"
    place.good(2, {**c, **STILL, **ADAPTER, "lora.import": str(folder),
                   "run.steps": 1, "run.export": str(again)})
    assert adapters(again)[0] == pairs
    r = place.launch(1, {**c, "lora.import": str(folder), "model.experts_per_unit": 2})
    run.refused(r, "lora.import", "one tensor", "experts_per_unit")
