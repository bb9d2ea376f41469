# SPDX-License-Identifier: Apache-2.0
"""Each family of models/families.c: the losses of a small model are those that
transformers computes (theirs.py), and a folder goes in and out bit for bit."""
import array
import json
import os

import pytest

import families
import run

GOLDEN = json.loads(families.GOLDEN.read_text())
PYTHON, THEIRS = os.environ.get("IZ_TEST_PYTHON"), run.ROOT / "tests/e2e/hf/theirs.py"


def is_mixture(family):
    return families.is_mixture(GOLDEN[family])


@pytest.fixture
def train(place):
    """Starts a family's program on the sample, for a step if nothing else is said: from
    the seeded weights, or from a folder."""
    def train(family, more=None, folder=None, ranks=1, good=True):
        place.use(run.built("models/gpt2" if family == "gpt2" else
                            "models/moe" if is_mixture(family) else "models/llama"))
        if folder is None:
            folder = place.folder / "in" / family
            if not folder.exists():
                families.write(family, GOLDEN, folder)
        sample = place.folder / "sample"
        sample.write_bytes(families.SAMPLE)
        # Without the routers' own losses, unless these are what is compared.
        alone = {"router_aux_loss_coef": 0} \
            if is_mixture(family) and not family.endswith(" router") else {}
        act = place.good if good else place.launch
        return act(ranks, {
            "train_batch_size": 1, "gradient_clipping": families.CLIP,
            "data.path": str(sample), "data.val_fraction": 0, "run.steps": 1,
            "optimizer": {"type": "AdamW", "params": families.ADAM},
            "scheduler": {"type": "WarmupCosineLR", "params": {
                "warmup_num_steps": families.WARM, "total_num_steps": families.TOTAL}},
            "model": {"import": str(folder), "seq": families.SEQ, **alone},
            **(more or {})})
    return train


# What the sanitizers run, too.
FEW = ("gpt2", "phi", "gemma3_text", "stablelm parallel", "mixtral", "glm4_moe", "gpt_oss")


@pytest.mark.parametrize("family", [
    pytest.param(k, marks=[pytest.mark.sanitized] * (k in FEW)) for k in GOLDEN])
def test_a_family_has_its_losses(family, train, place):
    """Before ten steps of AdamW, after each, and exported as it came; with a schedule,
    clipping and decay."""
    out = place.folder / "out"
    r = train(family, {"run.steps": families.STEPS + 1})
    want = GOLDEN[family]["losses"]
    assert abs(r.losses[0] - want[0]) < 1e-6 * want[0], (r.losses, want)
    for a, b in zip(r.losses, want):
        assert abs(a - b) < 1e-5 * max(1, b), (r.losses, want)
    for t, (got, norm) in enumerate(zip(r.steps, GOLDEN[family]["norms"])):
        assert got["grad_norm"] == pytest.approx(norm, rel=1e-3), t
        assert got["lr"] == pytest.approx(families.learning_rate(t), rel=1e-12), t
    train(family, {"run.steps": 0, "run.export": str(out)})
    assert families.hf.read(out) == \
        families.tensors(GOLDEN[family]["shapes"], family)


# A first step of Adam goes RATE g / (|g| + eps): so far that what a weight was before it
# is nothing beside it.
RATE = 1e6
ONE_STEP = {"gradient_clipping": 0, "scheduler": None, "optimizer": {
    "type": "AdamW", "params": {"lr": RATE, "eps": 1, "weight_decay": 0}}}


@pytest.mark.parametrize("family", GOLDEN)
def test_each_tensor_has_its_gradient(family, train, place):
    out = place.folder / "out"
    train(family, {**ONE_STEP, "run.export": str(out)})
    before = families.tensors(GOLDEN[family]["shapes"], family)
    for name, tensor in families.hf.read(out).items():
        steps = [(a - b) / RATE for a, b in zip(
            *(array.array("f", t[2]) for t in (before[name], tensor)))]
        norm, dot = GOLDEN[family]["gradients"][name]
        assert families.sketch(name, [u / (1 - abs(u)) for u in steps]) == \
            pytest.approx((norm, dot), rel=0, abs=1e-4 * norm + 1e-8), name


@pytest.mark.parametrize("family", GOLDEN)
def test_an_adapter_of_a_family_has_its_loss(family, train, place):
    """As PEFT has it, with ranks and scales of their own and modules in full; and it
    leaves as it came."""
    adapter = families.write_adapter(family, GOLDEN, place.folder / "adapter")
    out = place.folder / "out"
    r = train(family, {"optimizer.params.lr": 0.0, "run.export": str(out),
                       "lora": {"import": str(adapter), "export": "adapter"}})
    want = GOLDEN[family]["adapted"]
    assert abs(r.losses[0] - want) < 2e-6 * want, (r.losses, want)
    given, told = (json.loads((x / "adapter_config.json").read_text()) for x in (adapter, out))
    named = {"target_modules", "rank_pattern", "alpha_pattern", "modules_to_save"}
    assert {k: told[k] for k in given.keys() - named} == {k: given[k] for k in given.keys() - named}
    assert told["bias"] == "none" and told["fan_in_fan_out"] == (family == "gpt2")
    name = "adapter_model.safetensors"
    assert families.hf.read_file(out / name) == \
        families.adapter_tensors(family, GOLDEN)


@pytest.mark.parametrize("family, ranks, home", [
    (k, *[(1, (0, "none", "none")), (2, (3, "cpu", "cpu"))][i % 2])
    for i, k in enumerate(families.SCALES)])
def test_losses_are_those_of_pytorchs_muon(family, ranks, home, train):
    """Each matrix of a stacked weight by itself."""
    r = train(family, {
        "run.steps": families.MUON_STEPS, "train_batch_size": 2, "scheduler": None,
        **run.offload(*home, None), "optimizer": {"type": "Muon", "params": {
            **families.MUON, "adjust_lr_fn": families.SCALES[family]}}}, ranks=ranks)
    want = GOLDEN[family]["muon"]
    assert want[-1] < 0.95 * want[0]
    assert r.losses == pytest.approx(want, rel=2e-5)


@pytest.mark.skipif(not PYTHON, reason="IZ_TEST_PYTHON: a Python with transformers and peft")
def test_pytorchs_muon_has_these_losses():
    r = run.call(PYTHON, THEIRS, *families.SCALES, timeout_s=600)
    assert r.rc == 0, str(r)


def empty(t):
    return {**t, "model.norm.weight": ("F32", (0,), b"")}


def one_bit(t):
    """A head beside the embedding that it is tied to, but for one bit."""
    data = bytearray(t["model.embed_tokens.weight"][2])
    data[-4] ^= 1
    return {**t, "lm_head.weight": (*t["model.embed_tokens.weight"][:2], bytes(data))}


def rows_of(n):
    """A vocabulary of other rows than config.json says."""
    return lambda t: {k: ("F32", (n, v[1][1]), (v[2] * 2)[:4 * n * v[1][1]])
                      if v[1][0] == 256 else v for k, v in t.items()}


FLAT = {"rope_theta": 1e4, "rope_type": "default"}
SORTED = {"full_attention": FLAT, "sliding_attention": FLAT}
LLAMA3 = families.FAMILIES["llama llama3"]["rope_parameters"]
NO_THETA = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
ORIGINAL = "original_max_position_embeddings"
# A family, what config.json has otherwise, what the tensors have, and who is named by
# the refusal; None: the loss is as before.
TRAPS = [
    ("gemma3_text", {"rope_parameters": FLAT}, None, "rope_parameters.rope_theta"),
    ("llama", {"rope_parameters": SORTED}, None, "rope_parameters.full_attention"),
    ("llama", {"rope_theta": 5e5}, None, "rope_parameters.rope_theta"),
    ("gemma3_text", {"rope_local_base_freq": 5e5}, None,
     "rope_parameters.sliding_attention.rope_theta"),
    ("gemma3_text", {"sliding_window_pattern": 5}, None, "sliding_window_pattern"),
    ("exaone4", {"sliding_window_pattern": 2, "layer_types": None}, None,
     "sliding_window_pattern"),
    ("olmo", {}, one_bit, "lm_head.weight"),
    ("vaultgemma", {"tie_word_embeddings": ...}, None, None),  # not there at all
    ("olmo", {"head_dim": None}, None, None), ("qwen3", {"head_dim": None}, None, "head_dim"),
    ("llama", {"vocab_size": 250}, None, "model.embed_tokens.weight"),
    ("llama", {}, rows_of(250), "model.embed_tokens.weight"),
    ("llama", {}, rows_of(320), "model.embed_tokens.weight"),
    ("llama", {}, empty, "model.norm.weight"),
    ("llama", {"time_step_limit": [0.0, float("inf")], "x": float("nan")}, None, None),
    ("llama", {"rms_norm_eps": float("inf")}, None, "rms_norm_eps"),
    ("llama", {"num_key_value_heads": float("nan")}, None, "num_key_value_heads"),
    ("granite", {"attention_multiplier": float("-inf")}, None, "attention_multiplier"),
    ("gemma2", {"final_logit_softcapping": 0.0}, None, "final_logit_softcapping"),
    ("granite", {"attention_multiplier": 0.0}, None, "attention_multiplier"),
    ("gpt_neox", {"rotary_pct": 0.2}, None, "partial_rotary_factor"),
    ("ministral3", {"rope_parameters": {"mscale": 1.0, **families.YARN}}, None,
     "rope_parameters.mscale"),
    ("glm4_moe", {"routed_scaling_factor": 0.0}, None, "routed_scaling_factor"),
    # What transformers takes where these say nothing is not what they computed.
    *((k, {"rope_parameters": None}, None, "rope_scaling.rope_type")
      for k in ("cwm", "ministral3", "gpt_oss")),
    # The newer place, the older one, and both at once; at the top the original context
    # wins, and it is the context where it is not told.
    *(("llama llama3", {"rope_parameters": ..., **change}, None, None) for change in (
        {"rope_parameters": LLAMA3}, {"rope_theta": 1e4, "rope_scaling": NO_THETA},
        {"rope_scaling": LLAMA3}, {"rope_theta": 1e4, "rope_scaling": {
            **NO_THETA, ORIGINAL: 32}},
        {"rope_parameters": {**LLAMA3, ORIGINAL: 8192}, ORIGINAL: 32}))]


@pytest.mark.parametrize("family, change, spoil, named", TRAPS)
def test_a_trap_has_the_same_loss_or_is_named(family, change, spoil, named, train, place):
    one, out = GOLDEN[family], place.folder / "out"
    tensors = families.tensors(one["shapes"], family)
    config = {k: v for k, v in {**one["config"], **change}.items() if v is not ...}
    folder = families.hf.write(place.folder / "in", spoil(tensors) if spoil else tensors,
                               config)
    r = train(family, {"run.export": str(out)}, folder, good=False)
    if named:
        run.refused(r, "model.import", named)
        assert not r.steps
        return
    for x in (r, train(family, folder=out)):
        assert x.rc == 0 and abs(x.losses[0] - one["losses"][0]) < 1e-6 * x.losses[0], str(x)
    written = json.loads((out / "config.json").read_text())
    assert all(str(written[k]) == str(change[k]) for k in {"time_step_limit", "x"} & {*change})


@pytest.mark.parametrize("family, more", (
    ("cwm", {}), ("gpt_oss", {}), ("ministral3", {
        "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.0})))
def test_what_transformers_would_scale_is_said_to_be_plain(family, more, train, place):
    out = place.folder / "out"
    train(family, {"run.export": str(out)}, families.hf.write(
        place.folder / "in", families.tensors(GOLDEN[family]["shapes"], family),
        {**GOLDEN[family]["config"], "rope_parameters": {**FLAT, **more}}))
    written = json.loads((out / "config.json").read_text())
    assert written["rope_scaling"] == {"rope_type": "default", **more}


def of(family, **keys):
    """A model of ours that a family is to publish."""
    return {"model": {"family": family, "layers": 2, "heads": 4, "width": 32, "ffn": 28,
                      "vocab": 256, "seq": 16, "rope_theta": 1e4, **keys}}


@pytest.mark.parametrize("c, named", (
    (of("granite", residual_multiplier=0.5, mlp_bias=True), "residual_multiplier"),
    (of("gemma2"), "window"), (of("cwm", window=8), "layer_types"),
    (of("smollm3"), "no_rope_layer_interval"), (of("llama", window=4), "window"),
    (of("cohere2", window=4, no_rope_layers="1,0"), "no_rope_layers"),
    (of("mistral", window=4, layer_types="full_attention,sliding_attention"), "layer_types"),
    (of("phi3", rope_scaling_type="linear", rope_scaling_factor=2), "longrope"),
    (of("jais2", qkv_bias=True, mlp_bias=True), "proj_bias is true"),
    (of("olmo", norm_eps=1e-6), "norm_eps"),
    (of("gpt_neox", kv_heads=2, qkv_bias=True, proj_bias=True), "kv_heads"),
    (of("stablelm", head_dim=6), "head_dim"), (of("helium", head_dim=6), "head_dim"),
    (of("dots1", qk_norm=True, n_shared_experts=1, shared_expert_intermediate_size=12,
        router_aux_loss_coef=0), "shared_expert_intermediate_size"),
    (of("smollm3", layers=513, no_rope_layer_interval=2), "too many blocks"),
    *((of("auto", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
          norm_topk_prob=True, **own), "no published type") for own in (
        {"n_shared_experts": 1}, {"first_k_dense_replace": 1},
        {"routed_scaling_factor": 2, "qk_norm": True}))))
def test_what_no_folder_of_a_family_could_say_is_refused(c, named, place):
    mixture = {"n_shared_experts", "num_experts"} & c["model"].keys()
    place.use(run.built("models/moe" if mixture else "models/llama"))
    r = place.launch(1, {**c, "run.export": str(place.folder / "out")})
    run.refused(r, named)
    assert not r.steps


def test_what_transformers_would_take_from_its_defaults_is_written(place):
    place.use(run.built("models/llama"))
    out = place.folder / "out"
    place.good(1, {**of("smollm3", no_rope_layer_interval=2), "run.export": str(out)})
    written = json.loads((out / "config.json").read_text())
    assert all(written[k] is None for k in ("no_rope_layers", "pad_token_id"))


# What others take from config.json without a default (llama.cpp and vLLM), or with another
# one (transformers) than the published file has.
@pytest.mark.parametrize("family, change, member", (
    ("phi3", {"original_max_position_embeddings": 32},
     {"original_max_position_embeddings": 32}),
    ("minimax_m2", {}, {"rotary_dim": 12}), ("minimax_m2 released", {}, {"rotary_dim": 6}),
    ("ministral3", {}, {"rope_scaling": {
        "rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16,
        "beta_fast": 32, "beta_slow": 1, "truncate": True, "attention_factor": 1,
        "llama_4_scaling_beta": 0.3, "mscale": 1, "mscale_all_dim": 1}})))
def test_what_servers_ask_for_is_written(family, change, member, train, place):
    one = {**GOLDEN[family], "config": {**GOLDEN[family]["config"], **change}}
    folder = families.write(family, {family: one}, place.folder / "in")
    out = place.folder / "out"
    train(family, {"run.steps": 0, "run.export": str(out)}, folder=folder)
    assert json.loads((out / "config.json").read_text()).items() >= member.items()


@pytest.mark.parametrize("data", (b"null", b"{}"))
def test_metadata_of_weights_may_be_nothing(data, train, place):
    folder = families.write("llama", GOLDEN, place.folder / "in")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    was = b'{"format": "pt"}'
    file.write_bytes(whole.replace(was, data + b" " * (len(was) - len(data)), 1))
    r = train("llama", folder=folder)
    assert abs(r.losses[0] - GOLDEN["llama"]["losses"][0]) < 1e-6 * r.losses[0]


@pytest.mark.skipif(not PYTHON, reason="IZ_TEST_PYTHON: a Python with transformers")
def test_transformers_has_these_losses_of_what_is_written(train, place):
    for family in GOLDEN:
        train(family, {"run.steps": 0, "run.export": str(place.folder / "out" / family)})
    r = run.call(PYTHON, THEIRS, f"--in={place.folder / 'out'}",
                 timeout_s=1200)
    assert r.rc == 0, str(r)


@pytest.mark.skipif(not PYTHON, reason="IZ_TEST_PYTHON: a Python with peft")
def test_peft_has_the_loss_of_our_adapters(train, place):
    """Trained, of whole stacked weights, with the last norm or the embeddings."""
    for i, family in enumerate(GOLDEN):
        out = place.folder / "out" / family
        some, other = ("c_fc", "c_attn") if family == "gpt2" else ("down_proj", "o_proj")
        c = {"optimizer.params.lr": 1e-2, "lora": {
            "rank": 3, "alpha": 7.0,
            "targets": "*self_attn*" if is_mixture(family) else "*",
            "use_rslora": i % 2 == 1,
            "use_dora": i % 3 == 2,
            "rank_pattern": {"*.1.*": 2, some: 5}, "alpha_pattern": {other: 2},
            "modules_to_save": ("*norm*", "embed_tokens", "")[i % 3 if family != "olmo" else 1]}}
        train(family, {**c, "lora.export": "adapter", "run.steps": 3,
                       "run.export": str(out)})
        r = train(family, {**c, "run.steps": 4})
        (out / "loss").write_text(str(r.losses[3]))
    r = run.call(PYTHON, THEIRS, f"--adapters={place.folder / 'out'}",
                 timeout_s=1200)
    assert r.rc == 0, str(r)


def test_a_bias_of_choice_is_never_learnt(train, place):
    """Whatever a rule says."""
    out = place.folder / "out"
    train("glm4_moe", {"run.steps": 3, "parameters": [{"match": "*", "frozen": False}],
                       "run.export": str(out)})
    before = families.tensors(GOLDEN["glm4_moe"]["shapes"], "glm4_moe")
    after = families.hf.read(out)
    same = {k.split(".", 3)[-1] for k in before if before[k] == after[k]}
    assert same == {"mlp.gate.e_score_correction_bias"}


@pytest.mark.parametrize("family, left_out", (("glm4_moe", True), ("dots1", False)))
def test_layers_that_predict_more_tokens_are_left_out(family, left_out, train, place):
    out = place.folder / "out"
    folder = families.hf.write(place.folder / "in", {
        **families.tensors(GOLDEN[family]["shapes"], family),
        "model.layers.3.eh_proj.weight": ("F32", (2, 3), bytes(24))}, GOLDEN[family]["config"])
    r = train(family, {"run.export": str(out)}, folder, good=left_out)
    if not left_out:
        run.refused(r, "model.layers.3.eh_proj.weight", "no tensor of this model")
        return
    assert abs(r.losses[0] - GOLDEN[family]["losses"][0]) < 1e-5 and "left out" in r.out
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize("family, changes, words", (
    ("gpt_oss", {"model.experts_per_unit": 2}, ("experts_per_unit", "one tensor")),
    ("gpt_oss", {"lora": {"rank": 2, "targets": "q_proj", "export": "adapter"},
                 "parameters": [{"match": "*sinks*", "frozen": False}],
                 "run.export": "/tmp/none"},
     ("lora.export", "self_attn.sinks", "PEFT has modules in full")),
    ("granitemoe", {"lora": {"rank": 2, "targets": "*"}}, ("lora.targets", "one tensor")),
    ("glm4_moe", {"model.router_aux_loss_coef": 0.1}, ("router_aux_loss_coef", "none")),
    ("dots1", {"model.router_z_loss_coef": 0.1}, ("router_z_loss_coef", "sigmoid")),
    ("olmoe", {"model.experts_per_unit": 2, "model.n_shared_experts": 1},
     ("shared_expert_intermediate_size", "olmoe"))))
def test_what_a_mixture_cannot_have_is_refused(family, changes, words, train):
    run.refused(train(family, changes, good=False), *words)


def test_what_is_generated_has_the_bias_of_logits(place):
    """Which makes one token the likeliest by far."""
    place.use(run.built("models/llama"))
    tensors = families.tensors(GOLDEN["phi"]["shapes"], "phi")
    bias = array.array("f", [100.0 * (i == ord("A")) for i in range(256)])
    tensors["lm_head.bias"] = ("F32", (256,), bias.tobytes())
    folder = families.hf.write(place.folder / "in", tensors, GOLDEN["phi"]["config"])
    r = place.good(1, {"model": {"import": str(folder), "seq": 16}, "run.steps": 0,
                       "run.sample_tokens": 9, "run.sample_prompt": "b"})
    assert run.sampled(r).strip().endswith("A" * 9), run.sampled(r)
