# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts of 0.33B parameters, of which a token uses 0.05B, beside
transformers' own on PyTorch, on the same cores, alternating."""
import os
import statistics

from cases.peers import PEERS, PYTHON, absent, median_s, python_runs

ABOUT = "tokens per second of a mixture of experts against transformers' own"

MODEL = {"layers": 12, "heads": 8, "kv_heads": 4, "width": 512, "num_experts": 64,
         "num_experts_per_tok": 4, "moe_intermediate_size": 256, "seq": 256,
         "vocab": 32000}
SAMPLES, STEPS = 4, 5
WAY = "grouped_mm"  # transformers' own choice; eager takes five times as long


def ours(b):
    return b.train({"train_micro_batch_size_per_gpu": SAMPLES, "gradient_clipping": 1.0,
                    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
                    "model": {**MODEL, "qk_norm": True, "rope_theta": 10000,
                              "tie_embeddings": True},
                    "run": {"steps": STEPS}}, program="models/moe").median("tokens_per_s")


def theirs(b):
    threads = len(os.sched_getaffinity(0))
    return b.call_json([PYTHON, PEERS / "moe.py", WAY, *MODEL.values(), SAMPLES, STEPS,
                        threads], timeout=1800)[0]


def run(b):
    if not python_runs("import transformers; transformers.Qwen3MoeForCausalLM"):
        absent(b, "transformers", "pip install torch transformers in the Python of "
               "IZ_BENCH_PYTHON")
        return
    pairs, row = [], {}
    for _ in range(2 if b.quick else 5):
        row = theirs(b)
        pairs.append((ours(b), SAMPLES * MODEL["seq"] / median_s(row["seconds"])))
    b.figure(f"izar / transformers, {row['parameters'] / 1e9:.2f}B",
             [o / p for o, p in pairs], "ratio", 2.0,
             note=f"{statistics.median(o for o, _ in pairs):.0f} and "
             f"{statistics.median(p for _, p in pairs):.0f} tokens/s, "
             f"transformers {row['transformers']}, torch {row['torch']}")
