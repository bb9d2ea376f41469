# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters: what they cost, what they compute, how they leave."""
import array
import json
import random
import re

import pytest

import run
from run import STILL, ckpt, hf
from test_hf import content, model, written

RANK, ALPHA = 4, 6.0
# All linear layers of the blocks; without the rest nothing else is trained.
LORA = {"lora": {"rank": RANK, "alpha": ALPHA, "targets": "*"}}
SOME = {"lora": {"rank": RANK, "alpha": ALPHA,
                 "targets": "*.c_attn.weight, h.2.mlp.*"}}
# Ranks and scales of their own: of a name, of a module, of a part of a stacked weight.
SEVERAL = {"use_rslora": True, "rank_pattern": {"c_attn": 2, "h.2.*": 6},
           "alpha_pattern": {"h.3.*": 1.5, "c_fc": 20}}
ADAPTER = {"lora.export": "adapter"}


def floats(t):
    assert t[0] == "F32"
    return array.array("f", t[2])


def adapters(folder):
    """{module: {matrix: tensor}} of a folder of PEFT, and its config."""
    assert sorted(p.name for p in folder.iterdir()) == \
        ["adapter_config.json", "adapter_model.safetensors"]
    tensors = hf.read_file(folder / "adapter_model.safetensors")
    head, out = "base_model.model.", {}
    for name, t in tensors.items():
        assert name.startswith(head)
        if ".lora_" in name:
            module, matrix = name[len(head):].removesuffix(".weight").rsplit(".", 1)
        else:
            module, matrix = name[len(head):].rsplit(".", 1)
        out.setdefault(module, {})[matrix] = t
    for tensors in out.values():
        assert sorted(tensors)[:2] in (["lora_A", "lora_B"], ["weight"], ["bias", "weight"])
    c = json.loads((folder / "adapter_config.json").read_text())
    assert sorted(c["target_modules"]) == sorted(m for m in out if "lora_A" in out[m])
    return out, c


# ---- dropout ----

def test_dropout_is_for_training_alone(place):
    """Evaluated and exported as they are: the weights of step 0 have one loss, those
    of later steps another training.  A probability that drops nearly all leaves
    adapters nearly as they are."""
    def go(p, **more):
        return place.good(1, {**LORA, "lora.dropout": p, "run.eval_batches": 4,
                              "run.eval_interval": 1, "run.steps": 3,
                              "run.recompute": "none", **more})
    plain, some, again, most = (go(p) for p in (0.0, 0.3, 0.3, 0.999))
    assert plain.losses[0] == some.losses[0]  # b is zero
    assert plain.hash != some.hash == again.hash != most.hash
    assert plain.validation != some.validation == again.validation
    full = go(0.3, **{"run.recompute": "full"})
    assert full.numbers == some.numbers
    other = go(0.3, **{"run.seed": 7})
    assert other.hash != some.hash


# ---- what it costs ----

def test_bytes_are_those_of_the_arithmetic(place):
    r = place.good(2, {**LORA, "zero_optimization.stage": 3,
                       "bf16.enabled": True})
    adapter = sum(RANK * sum(shape) for name, shape in hf.gpt2_shapes(run.MODEL).items()
                  if ".h.0." in name and len(shape) == 2)
    trained = run.MODEL["layers"] * run.padded(adapter, 2)
    frozen = sum(run.units(run.MODEL, 2))
    assert r.bytes_of("optimizer") == 12 * trained // 2
    assert r.bytes_of("gradients") == 2 * trained // 2
    assert r.bytes_of("parameters") == 2 * (trained + frozen) // 2


# ---- what it computes ----

def test_adapters_begin_with_a_alone(place):
    """As PEFT has it: B is zero."""
    out = place.folder / "out"
    r = place.good(1, {**LORA, **ADAPTER, **STILL, "run.export": str(out)})
    assert r.losses == place.good(1, STILL).losses
    a = floats(adapters(out)[0]["transformer.h.0.attn.c_attn"]["lora_A"])
    assert 0.5 < sum(x * x for x in a) / RANK * 3 < 2


# ---- the layout of PEFT ----

@pytest.mark.sanitized
def test_a_stacked_weight_shares_its_a(place):
    """Queries, keys and values are one product here and three modules there."""
    c, out = model(written(place, "llama")), place.folder / "out"
    place.good(1, {**c, "lora": {"rank": 2, "targets": "*qkv*,*down*"}, **ADAPTER,
                   "run.export": str(out), "run.steps": 2})
    pairs, config = adapters(out)
    attn = "model.layers.1.self_attn."
    q, k, v = (pairs[f"{attn}{x}_proj"] for x in "qkv")
    assert q["lora_A"] == k["lora_A"] == v["lora_A"]
    assert [x["lora_B"][1] for x in (q, k, v)] == [(48, 2), (24, 2), (24, 2)]
    assert k["lora_B"] != v["lora_B"] and len(pairs) == 12
    assert (config["r"], config["lora_alpha"]) == (2, 2.0)
    file, missing = out / "adapter_model.safetensors", f"{attn}k_proj.lora_A.weight"
    hf.write_file(file, {k: t for k, t in hf.read_file(file).items() if missing not in k})
    r = place.launch(1, {**c, "lora": {"import": str(out), "targets": "*qkv*,*down*"}})
    run.refused(r, "lora.import", missing, "missing")


# ---- an adapter as a start ----

SHARDED = {"zero_optimization.stage": 3, "zero_optimization.offload_optimizer": {
    "device": "cpu"}, "zero_optimization.offload_param": {"device": "cpu"}}


def write_adapter(folder, tensors, **config):
    """As PEFT writes one."""
    folder.mkdir()
    hf.write_file(folder / "adapter_model.safetensors", tensors)
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "bias": "none",
        "lora_alpha": ALPHA, "lora_dropout": 0.05, "target_modules": ["any"],
        "use_dora": False, "modules_to_save": None, "rank_pattern": {}, **config}))
    return folder


def random_adapter(modules, size=0.3):
    """{module: (inputs, outputs)} with random matrices."""
    rng, out = random.Random(5), {}
    for name, (n_in, n_out) in modules.items():
        for matrix, shape in (("A", (RANK, n_in)), ("B", (n_out, RANK))):
            values = [rng.gauss(0, size) for _ in range(shape[0] * shape[1])]
            out[f"base_model.model.{name}.lora_{matrix}.weight"] = \
                ("F32", shape, hf.encode("F32", values))
    return out


def linear(kind, *parts):
    """{module: (inputs, outputs)} of the linear layers whose names have one of these."""
    return {name.removesuffix(".weight"): shape[::-1]
            for name, shape in hf.model_of(kind)[0].items()
            if any(p in name for p in parts)}


# Of a type of model: adapters, other settings, ranks.
PARTS = "gate_proj, up_proj, down_proj, q_proj"
LEAVE = [
    ("gpt2", {"targets": SOME["lora"]["targets"], **SEVERAL}, {}, 1),
    ("gpt2", {"targets": SOME["lora"]["targets"], **SEVERAL}, {"bf16.enabled": True}, 2),
    ("gpt2", {"targets": "*"}, {
        "parameters": [{"match": "h.3.ln_1.*", "frozen": False}], "run.slices": 2}, 1),
    ("gpt2", {"targets": "c_fc, c_attn", "use_dora": True, **SEVERAL}, {}, 1),
    ("gpt2", {"targets": "*", "use_dora": True}, {}, 3),
    ("gpt2", {"targets": "c_attn", "modules_to_save": "wpe"}, {}, 1),
    ("gpt2", {"targets": "*"}, {"model.base_dtype": "nf4"}, 1),
    ("gpt2", {"targets": "*"}, {"model.base_dtype": "int8", "bf16.enabled": True}, 2),
    ("llama", {"targets": "q_proj,v_proj,down_proj", "alpha_pattern": {
        "v_proj": 9, "*1*down*": 2}, "rank_pattern": {"layers.0.self_attn.v_proj": 1}}, {}, 1),
    ("llama", {"targets": "*gate_proj.weight,down_proj,qkv_proj", "dropout": 0.25}, {}, 3),
    ("llama", {"targets": "q_proj, up_proj", "use_dora": True}, {"model.base_dtype": "int8"}, 2),
    ("llama", {"targets": "q_proj", "modules_to_save": "embed_tokens, *norm*, lm_head, 1.mlp"},
     {}, 1),
    ("qwen3_moe", {"targets": PARTS}, {"model.experts_per_unit": 4}, 2),
    ("qwen3_moe", {"targets": "*experts*"}, {}, 1),
    ("mixtral", {"targets": "w1, w2, w3"}, {"model.experts_per_unit": 4}, 1)]


@pytest.mark.parametrize("kind, lora, more, ranks", LEAVE)
def test_adapters_leave_and_come(kind, lora, more, ranks, place):
    """The tool writes the same files as the run, merged and alone.  From both the next
    step has the loss of the run that goes on; and those alone are exported again."""
    run_, merged, alone = (place.folder / x for x in ("run", "merged", "alone"))
    c = {**model(written(place, kind)), "train_batch_size": 12, **more}
    trained = {**c, "lora": {"rank": RANK, "alpha": ALPHA, **lora}, "run.save": True,
               "optimizer.params.lr": 0.1}
    r = place.good(ranks, {**trained, "run.export": str(merged)}, output=run_)
    assert re.search(r"\nexport: loss \S+, run \S+ \((equal|\w+ rounding)", r.out), str(r)
    resume = ["--resume"], run_
    place.good(ranks, {**trained, **ADAPTER, "run.export": str(alone)}, *resume)
    for ours, option in (merged, []), (alone, ["--adapter"]):
        out = place.folder / f"tool-{ours.name}"
        refused = "use_dora" in lora and not option
        p = ckpt("export", run_, "--out", out, *option, rc=1 if refused else 0)
        assert "lora.use_dora" in p.err if refused else content(out) == content(ours)
    want = place.good(ranks, {**trained, "run.steps": 4}, *resume).losses
    assert len(want) == 4 and want[3] != want[0]
    if not {"bf16.enabled", "model.base_dtype", "dropout"} & {*more, *lora}:
        r = place.good(1, {**c, **STILL, "run.steps": 4, "model.import": str(merged)})
        assert abs(r.losses[3] - want[3]) < 2e-6
    for n, home in (1, {}), (2, SHARDED):
        again = place.folder / f"again{n}"
        r = place.good(n, {**c, **STILL, **home, **ADAPTER, "run.steps": 4,
                           "lora.import": str(alone), "run.export": str(again),
                           "lora.dropout": lora.get("dropout", 0.0)})
        assert r.losses[3] == want[3] if n == ranks else abs(r.losses[3] - want[3]) < 1e-6
        tensors, config = adapters(again)
        assert (tensors, config) == adapters(alone)
        assert config["lora_dropout"] == lora.get("dropout", 0)
        assert config["base_model_name_or_path"] == c["model"]["import"]
        assert r.config["lora"]["rank"] == RANK and r.config["lora"]["alpha"] == ALPHA


@pytest.mark.sanitized
def test_a_resumed_run_does_not_begin_again(place):
    c = {**LORA, "run.steps": 4, "run.save": True}
    folder = place.folder / "adapter"
    place.good(1, {**LORA, **ADAPTER, "run.steps": 2, "run.export": str(folder)})
    c["lora.import"] = str(folder)
    whole = place.good(1, c)
    out = place.folder / "halves"
    place.good(1, {**c, "run.steps": 2}, output=out)
    # Its values are of no use any more.
    tensors = hf.read_file(folder / "adapter_model.safetensors")
    hf.write_file(folder / "adapter_model.safetensors", {
        k: (t, shape, bytes(len(x))) for k, (t, shape, x) in tensors.items()})
    assert place.good(1, c, ["--resume"], output=out).numbers == whole.numbers


def test_adapters_that_a_rule_freezes_are_imported_too(place):
    folder = place.folder / "adapter"
    c = {**LORA, "optimizer.params.lr": 0.02}
    place.good(1, {**c, **ADAPTER, "run.export": str(folder)})
    want = place.good(1, {**c, "run.steps": 4})
    r = place.good(2, {**c, **SHARDED, "lora.import": str(folder), "parameters": [
        {"match": "h.[0-3].*lora_?.*", "frozen": True}], **STILL, "run.steps": 4})
    assert abs(r.losses[3] - want.losses[3]) < 1e-6


# ---- refusals ----

# Of an adapter of PEFT: what its config says, what the run's, what is told.
FOREIGN = [
    ({"bias": "all",
      "rank_pattern": {"q_proj": 2.5}, "alpha_pattern": {"(?:q)": 4},
      "init_lora_weights": "pissa", "layer_replication": [[0, 1]],
      "of_a_later_version": "on", "peft_type": "IA3"}, {},
     [["lora.import", "bias", "all", '"none"'],
      ["rank_pattern", "q_proj"], ["alpha_pattern", "only Python"],
      ["init_lora_weights", "pissa"], ["layer_replication"], ["of_a_later_version"],
      ["peft_type", "IA3"]]),
    ({"target_parameters": "gate_up_proj"}, {}, [["target_parameters", "no list"]]),
    ({"target_parameters": [["down_proj"]]}, {}, [["target_parameters"]]),
    pytest.param({"target_parameters": ["gate_up_proj", "mlp.gate.weight"]}, {},
                 [["target_parameters", "mlp.gate.weight"]], marks=pytest.mark.sanitized),
    ({"r": 0}, {}, [["r is no rank"]]), ({"r": "4"}, {}, [["r is no rank"]]),
    ({"lora_alpha": None}, {}, [["lora_alpha"]]),
    ({}, {"lora.rank": 8}, [["lora.rank: 8", "r is 4"]]),
    ({}, {"lora.alpha": 8.0, "lora.use_rslora": True, "lora.use_dora": True,
          "lora.alpha_pattern.q_proj": 2, "lora.modules_to_save": "*norm*"},
     [["lora.alpha: 8", "lora_alpha is 6"], ["has no use_rslora"], ["has no use_dora"],
      ["lora.rank_pattern: those of"], ["lora.modules_to_save: those of"]]),
    ({"r": 2}, {}, [["layers.1.self_attn.q_proj.lora_A.weight", "[4, 32]", "[2, 32]"]]),
    ({}, {"lora.targets": "q_proj"},
     [["layers.1.self_attn.v_proj.lora_A.weight", "no tensor"]]),
    ({}, {"lora.targets": "*"}, [["layers.0.self_attn.o_proj.lora_B.weight", "missing"]])]


@pytest.mark.parametrize("theirs, ours, faults", FOREIGN)
def test_an_adapter_of_another_kind_is_refused(theirs, ours, faults, place):
    base = written(place, "llama")
    folder = write_adapter(place.folder / "adapter", random_adapter(
        linear("llama", "q_proj", "v_proj")), **theirs)
    r = place.launch(1, {**model(base), "lora.import": str(folder), **ours})
    for words in faults:
        run.refused(r, *words)
    assert not r.steps


@pytest.mark.sanitized
def test_tensors_that_are_none_of_the_adapters_are_named(place):
    c = model(written(place, "llama"))
    tensors = random_adapter(linear("llama", "q_proj", "v_proj"))
    head = "base_model.model.model."
    missing = head + "layers.1.self_attn.v_proj.lora_B.weight"
    del tensors[missing]
    surplus = {"embed_tokens.lora_embedding_A": (4, 256), "nom.weight": (24,),
               "layers.0.mlp.down_proj.lora_magnitude_vector": (24,)}
    for name, shape in surplus.items():
        n = shape[0] * (shape[1] if len(shape) > 1 else 1)
        tensors[head + name] = ("F32", shape, bytes(4 * n))
    folder = write_adapter(place.folder / "adapter", tensors)
    r = place.launch(1, {**c, "lora.import": str(folder)})
    run.refused(r, "lora.import", missing, "missing")
    for name in surplus:
        run.refused(r, "lora.import", head + name, "no tensor")
    run.refused(r, str(folder), "4 faults")
    r = place.launch(1, {**c, "lora.import": str(place.folder / "none")})
    run.refused(r, "none/adapter_config.json", "No such file")
    run.refused(r, "lora.import", "none cannot be imported")
    (folder / "adapter_model.safetensors").unlink()
    r = place.launch(1, {**c, "lora.import": str(folder)})
    run.refused(r, "lora.import", "adapter_model.safetensors", "No such file")


def test_frozen_adapters_are_not_exported(place):
    rule = {"match": "h.0.*lora_A*", "frozen": True}
    c = {**LORA, "parameters": [rule]}
    for more in ({}, ADAPTER):
        r = place.launch(1, {**c, **more, "run.export": str(place.folder / "out")})
        run.refused(r, "run.export", "lora_A", "freezes")
    place.good(1, c)
