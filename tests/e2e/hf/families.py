# SPDX-License-Identifier: Apache-2.0
"""A small model of each family of models/families.c, its weights by a seed.  What others
compute with it (theirs.py) is in families.json: the config.json that transformers saves, the
shapes of its tensors, the losses of SAMPLE before each of ten steps of AdamW and
after them, the norms of its gradients, a sketch of the first gradient of each tensor,
PEFT's loss with a seeded adapter, and the losses of twenty steps of some by Muon."""
import array
import json
import math
import pathlib
import random
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "runtime/hf"))
import folder as hf  # noqa: E402

GOLDEN = hf.FAMILIES
SEQ, STEPS = 24, 10
ADAM = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
CLIP, WARM, TOTAL = 0.5, 4, 14
MUON_STEPS = 20
MUON = {"muon_lr": 2e-3, "adam_lr": 1e-3, "momentum": 0.9, "betas": [0.9, 0.95],
        "eps": 1e-8, "weight_decay": 0.1}
# Of the run, and of torch.optim.Muon.
SCALES = {"gpt2": "original", "llama": "match_rms_adamw", "mistral": "original",
          "qwen2": "match_rms_adamw", "qwen3": "original", "qwen3_moe": "match_rms_adamw",
          "mixtral": "original"}
SAMPLE = random.Random(7).randbytes(SEQ + 1)

SHAPE = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 44,
         "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 64}
WINDOW = {"sliding_window": 7}
SORTS = {**WINDOW, "layer_types": ["sliding_attention", "full_attention",
                                   "sliding_attention"]}
WIDE = {"head_dim": 12}
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 16}
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "pad_token_id": None}
GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
          "n_shared_experts": 2, "moe_intermediate_size": 20, "first_k_dense_replace": 1,
          "routed_scaling_factor": 1.4}
# Beside that, what decides something in this family.
FAMILIES = {
    "llama": WIDE, "mistral": {**WIDE, **WINDOW}, "qwen2": {}, "qwen3": WIDE,
    "phi3": {"pad_token_id": 0}, "ernie4_5": WIDE, "helium": {"head_dim": 8},
    "granite": {"attention_multiplier": 0.3, "embedding_multiplier": 3.0,
                "residual_multiplier": 0.4, "logits_scaling": 1.7},
    "seed_oss": WIDE, "ministral": {**WIDE, **SORTS},
    "smollm3": {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}, "arcee": WIDE,
    "olmo": {"tie_word_embeddings": True}, "olmo2": {}, "olmo3": SORTS, "gemma": WIDE,
    "gemma2": {**WIDE, **SORTS, "query_pre_attn_scalar": 20,
               "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {**WIDE, **SORTS, "query_pre_attn_scalar": 20},
    "glm": {"head_dim": 8, "pad_token_id": 0},
    "glm4": {"head_dim": 12, "attention_bias": False, "pad_token_id": 0,
             "partial_rotary_factor": 0.5},
    "cohere": {}, "cohere2": SORTS, "stablelm": {"use_qkv_bias": True},
    "starcoder2": WINDOW, "nemotron": WIDE, "exaone4": SORTS,
    "hunyuan_v1_dense": {**WIDE, "rms_norm_eps": 0.1}, "jais2": WIDE, "cwm": {**WIDE, **SORTS},
    "vaultgemma": {**WIDE, **SORTS, "query_pre_attn_scalar": 20,
                   "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "hyperclovax": {"attention_multiplier": 0.3, "embedding_multiplier": 3.0,
                    "residual_multiplier": 0.4, "logits_scaling": 1.7},
    "internlm3": WIDE, "iquestcoder": WIDE,
    # Frequencies for more positions than there were.
    "llama linear": {**WIDE, "rope_parameters": {
        "rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}},
    "qwen2 yarn": {"rope_parameters": {**YARN, "beta_fast": 8, "truncate": False}},
    "glm4 yarn": {"head_dim": 12, "attention_bias": False, "pad_token_id": 0,
                  "rope_parameters": {**YARN, "partial_rotary_factor": 0.5,
                                      "attention_factor": 1.3}},
    "olmo3 yarn": {**SORTS, "rope_parameters": {
        "full_attention": {**YARN, "rope_theta": 5e5},
        "sliding_attention": {"rope_theta": 5e5, "rope_type": "default"}}},
    "gemma3_text linear": {**WIDE, **SORTS, "rope_parameters": {
        "full_attention": {"rope_theta": 1e5, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}},
    "gpt_neox": {"rotary_pct": 0.5},
    "ministral3": {**WIDE, "rope_parameters": {
        **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}},
    # What a family may have or not.
    "llama biases": {**WIDE, "attention_bias": True, "mlp_bias": True},
    "phi": {}, "olmo2 biases": {"attention_bias": True},
    "gemma3_text biases": {**WIDE, **SORTS, "attention_bias": True},
    "gpt_neox sequential": {"use_parallel_residual": False, "attention_bias": False},
    "starcoder2 bare": {"use_bias": False}, "ernie4_5 biases": {**WIDE, "use_bias": True},
    "cwm biases": {**WIDE, **SORTS, "mlp_bias": True},
    "seed_oss biases": {**WIDE, "attention_out_bias": True, "mlp_bias": True},
    "cohere2 biases": {**SORTS, "attention_bias": True},
    "stablelm parallel": {"use_parallel_residual": True},
    # Mixtures of experts.
    "olmoe": {**EXPERTS, "num_experts": 6, "norm_topk_prob": True},
    "qwen2_moe": {**EXPERTS, "num_experts": 6, "decoder_sparse_step": 2,
                  "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28},
    "granitemoe": {**EXPERTS, "attention_multiplier": 0.3, "embedding_multiplier": 3.0,
                   "residual_multiplier": 0.4, "logits_scaling": 1.7},
    "granitemoeshared": {**EXPERTS, "attention_multiplier": 0.3,
                         "residual_multiplier": 0.4, "shared_intermediate_size": 28},
    "glm4_moe": {**GROUPS, "use_qk_norm": True, "attention_bias": True},
    "dots1": {**GROUPS, "sliding_window": None, "norm_topk_prob": False},
    "solar_open": {**GROUPS, **WIDE},
    "ernie4_5_moe": {"moe_k": 2, "moe_num_experts": 6, "moe_intermediate_size": 20,
                     "moe_layer_end_index": 1},
    "minimax_m2": {**EXPERTS, **WIDE},
    "gpt_oss": {**EXPERTS, **WIDE, **SORTS, "rope_parameters": {**YARN, "truncate": False}},
    "minimax_m2 released": {**EXPERTS, **WIDE, "rotary_dim": 6},
    "gpt2": {"max_position_embeddings": SEQ},
    "qwen3_moe": {**EXPERTS, **WIDE, "num_experts": 6, "mlp_only_layers": [1],
                  "moe_intermediate_size": 20, "norm_topk_prob": True},
    "mixtral": {**EXPERTS, **WINDOW},
    # With the router's own loss, of the one that there is: of several theirs is another.
    "qwen2_moe router": {**EXPERTS, "num_experts": 6, "decoder_sparse_step": 2,
                         "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28,
                         "output_router_logits": True, "router_aux_loss_coef": 0.3},
    # Without the original context, which transformers then writes.
    "llama llama3": {**WIDE, "max_position_embeddings": 32, "rope_parameters": {
        "rope_theta": 1e4, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0}},
}


def tensors(shapes, seed):
    """Of norms and magnitudes near 1, others near 0."""
    rng, out = random.Random(seed), {}
    for name, shape in shapes.items():
        n = math.prod(shape)
        scale = 1 / 256 if len(shape) > 1 else 1 / 512
        norm = "norm" in name or ".ln_" in name
        base = norm and name.endswith("weight") or "magnitude" in name
        values = [base + (rng.randrange(-127, 128)) * scale for _ in range(n)]
        out[name] = ("F32", tuple(shape), array.array("f", values).tobytes())
    return out


def sketch(name, values):
    """The norm of a tensor, and its product with a vector of random signs."""
    signs = random.Random(name).choices((-1, 1), k=len(values))
    return math.hypot(*values), math.fsum(a * b for a, b in zip(signs, values))


def is_mixture(one):
    return any("expert" in k for k in one["config"])


def write(family, golden, path):
    one = golden[family]
    return hf.write(path, tensors(one["shapes"], family), one["config"])


# Of PEFT's rank_pattern and alpha_pattern.
RANKS = {r".*layers\.1\..*": 2, "(o|c)_proj": 3}
ALPHAS = {r".*\.[\d]+\.mlp\.down_proj|c_proj": 9}
HEAD = "base_model.model."
OTHERS = r"model.embed_tokens|lm_head|.*norm|.*\.(ln_.|w.e)|gpt_neox.embed_in|embed_out"


def adapter(family, golden):
    """The config of an adapter of all linear layers, and the shapes of its tensors.  In
    turn with the last norm, with embeddings and head, and with nothing else."""
    shapes, n = golden[family]["shapes"], list(FAMILIES).index(family)
    modules = [k[:-len(".weight")] for k in shapes if k.endswith(".weight")]
    ends = (["model.norm"], ["embed_tokens", "lm_head"], [])[n % 3]
    if "lm_head" not in modules:
        ends = [e for e in ends if e != "lm_head"]
    saved = [m for m in modules if any(m.endswith(e) for e in ends)]
    out = {HEAD + k: s for k, s in shapes.items() if k.rpartition(".")[0] in saved}
    dora = n % 5 in (0, 3)
    ties = len(ends) == 1 and ends[0] == "embed_tokens"
    linear = [m for m in modules if not re.fullmatch(OTHERS, m)]
    if is_mixture(golden[family]):  # PEFT takes names of other layers for all experts
        linear = [m for m in linear if "self_attn" in m]
    for m in [m for m in linear if len(shapes[m + ".weight"]) == 2]:
        r = next((v for k, v in RANKS.items() if re.match(rf"(.*\.)?({k})$", m)), 4)
        rows, cols = shapes[m + ".weight"][::-1 if family == "gpt2" else 1]
        out |= {f"{HEAD}{m}.lora_A.weight": [r, cols], f"{HEAD}{m}.lora_B.weight": [rows, r]}
        if dora:
            out[f"{HEAD}{m}.lora_magnitude_vector"] = [rows]
    return {"r": 4, "lora_alpha": 3.0, "use_rslora": n % 2 == 1, "rank_pattern": RANKS,
            "alpha_pattern": ALPHAS, "modules_to_save": ends or None,
            "ensure_weight_tying": ties, "use_dora": dora,
            "fan_in_fan_out": family == "gpt2",
            "target_modules": sorted({k.split(".")[-3] for k in out if "lora_A" in k}),
            "peft_type": "LORA", "task_type": "CAUSAL_LM"}, out, ties


def adapter_tensors(family, golden):
    """What is tied has both its names."""
    _, shapes, ties = adapter(family, golden)
    out = tensors(shapes, family + " adapter")
    if ties:
        out[HEAD + "lm_head.weight"] = out[HEAD + "model.embed_tokens.weight"]
    return out


def write_adapter(family, golden, path):
    path.mkdir(parents=True)
    hf.write_file(path / "adapter_model.safetensors", adapter_tensors(family, golden))
    config = adapter(family, golden)[0]
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def learning_rate(t):
    """Of update t (0-based): the log warm-up and the cosine, as DeepSpeed has
    them, whose first update runs before its schedule does."""
    if t < 1:
        return 0.0
    if t <= WARM:
        return ADAM["lr"] * math.log(t) / math.log(WARM)
    x = (t - WARM) / (TOTAL - WARM)
    return ADAM["lr"] * (1e-4 + (1 - 1e-4) * (1 + math.cos(math.pi * x)) / 2)
