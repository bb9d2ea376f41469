# SPDX-License-Identifier: Apache-2.0
"""usage: loss.py FOLDER TOKENS [ADAPTER]

What transformers computes, in fp32, with a folder of weights that we wrote, and PEFT
with an adapter on it: the mean cross-entropy of each byte of the file TOKENS after those before it.  Prints
a JSON object with it and the names of parameters that the folder lacks or has too
many."""
import json
import pathlib
import sys

import torch
import transformers


def main():
    folder, tokens, *adapter = sys.argv[1:]
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True,
        attn_implementation="eager")
    if adapter:
        import peft
        model = peft.PeftModel.from_pretrained(model, adapter[0])
    x = torch.tensor([list(pathlib.Path(tokens).read_bytes())])
    with torch.no_grad():
        logits = model.eval()(x[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits[0], x[0, 1:])
    print("\n" + json.dumps({
        "loss": float(loss), "missing": sorted(map(str, info["missing_keys"])),
        "unexpected": sorted(map(str, info["unexpected_keys"])),
        "transformers": transformers.__version__}))


if __name__ == "__main__":
    main()
