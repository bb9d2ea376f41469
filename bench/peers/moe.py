# SPDX-License-Identifier: Apache-2.0
"""usage: moe.py EXPERTS_IMPLEMENTATION LAYERS HEADS KV_HEADS WIDTH EXPERTS PER_TOKEN
           EXPERT_WIDTH SEQ VOCAB BATCH STEPS THREADS

Trains transformers' own Qwen3-MoE with PyTorch in fp32: the shapes of models/moe.c, AdamW,
gradient clipping, the balance loss, random tokens.  EXPERTS_IMPLEMENTATION is that of
transformers (eager, grouped_mm).  Prints a JSON object: seconds of each step,
parameters, and versions.
"""
import json
import sys
import time

import torch
import transformers


def config(how, layers, heads, kv_heads, width, experts, per_token, expert_width, seq,
           vocab):
    return transformers.Qwen3MoeConfig(
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        head_dim=width // heads, hidden_size=width, num_experts=experts,
        num_experts_per_tok=per_token, moe_intermediate_size=expert_width,
        intermediate_size=expert_width, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[], output_router_logits=True, router_aux_loss_coef=0.001,
        max_position_embeddings=seq, vocab_size=vocab, tie_word_embeddings=True,
        attn_implementation="sdpa", experts_implementation=how)


def main():
    how, (*shape, batch, steps, threads) = sys.argv[1], map(int, sys.argv[2:])
    seq, vocab = shape[-2:]
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    model = transformers.Qwen3MoeForCausalLM(config(how, *shape)).float().train()
    parameters = list(model.parameters())
    adam = torch.optim.AdamW(parameters, lr=3e-4, fused=True)
    seconds = []
    for _ in range(steps):
        x = torch.randint(vocab, (batch, seq))
        begin = time.perf_counter()
        loss = model(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        loss.item()
        seconds.append(time.perf_counter() - begin)
    print(json.dumps({"torch": torch.__version__,
                      "transformers": transformers.__version__,
                      "parameters": sum(p.numel() for p in parameters),
                      "seconds": seconds}))


if __name__ == "__main__":
    main()
