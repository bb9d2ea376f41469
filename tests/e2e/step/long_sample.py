# SPDX-License-Identifier: Apache-2.0
"""usage: long_sample.py

A sample of 65,536 tokens, a Llama of one block with seeded weights, and what
transformers computes with them: prints the losses before a step of AdamW and after it,
in some minutes.  LOSSES are those of transformers 5.24 and torch 2.15 on a CPU, whose
attention does not form the scores of all tokens.  What tests read needs neither."""
import math
import pathlib
import random
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "hf"))
import families  # noqa: E402

SEQ = 1 << 16
ADAM = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
SHAPES, CONFIG = families.hf.model_of(
    "llama", {256: 64, 32: 16, 44: 1024, 12: 8, 48: 8, 24: 8}, 1, num_attention_heads=1,
    num_key_value_heads=1, max_position_embeddings=SEQ,
    rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
ORDER = "embed l.norm head input post q_ k_ v_ o_ gate up_ down".split()  # as LOSSES had it
LOSSES = [4.661716461181641, 4.582863807678223]


def write(path):
    """A folder, and the sample beside it."""
    rng = random.Random(11)
    sample = path.with_name("sample")
    sample.write_bytes(bytes(min(int(rng.expovariate(0.1)), 63) for _ in range(SEQ + 1)))
    shapes = {k: s for part in ORDER for k, s in SHAPES.items() if part in k}
    families.hf.write(path, families.tensors(shapes, "long"), CONFIG)
    return path, sample


if __name__ == "__main__":
    import theirs
    with tempfile.TemporaryDirectory() as temporary:
        path, sample = write(pathlib.Path(temporary) / "in")
        print(theirs.trained(path, sample.read_bytes(), ADAM, 1, math.inf,
                             lambda t: ADAM["lr"], attn_implementation="sdpa")["losses"])
