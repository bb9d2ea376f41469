# SPDX-License-Identifier: Apache-2.0
"""usage: loss.py FOLDER TOKENS [ADAPTER] [--end=TOKEN]

What transformers computes, in fp32, with a folder of weights that we wrote, and PEFT
with an adapter on it: the mean cross-entropy of each byte of the file TOKENS after those before it.  Prints
a JSON object with it and the names of parameters that the folder lacks or has too
many.  With --end, documents that end with this token do not see each other: their
mask, positions and labels are given, as a data collator gives them."""
import json
import pathlib
import sys

import torch
import transformers


def documents(x, end):
    """What the model is given of tokens x [n], and which are labels."""
    begins, at = [], 0
    for i, token in enumerate(x.tolist()):
        begins.append(at)
        at = i + 1 if token == end else at
    i, first = torch.arange(len(x)), torch.tensor(begins)
    sees = (i[None, :] <= i[:, None]) & (i[None, :] >= first[:, None])
    mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)
    return {"attention_mask": mask[None, None], "position_ids": (i - first)[None]}, \
        x != end


def main():
    folder, tokens, *adapter = [x for x in sys.argv[1:] if not x.startswith("--end=")]
    end = [int(x[6:]) for x in sys.argv[1:] if x.startswith("--end=")]
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True,
        attn_implementation="eager")
    if adapter:
        import peft
        model = peft.PeftModel.from_pretrained(model, adapter[0])
    x = torch.tensor([list(pathlib.Path(tokens).read_bytes())])
    more, labels = documents(x[0, :-1], *end) if end else ({}, slice(None))
    with torch.no_grad():
        logits = model.eval()(x[:, :-1], **more).logits
        loss = torch.nn.functional.cross_entropy(logits[0][labels], x[0, 1:][labels])
    print("\n" + json.dumps({
        "loss": float(loss), "missing": sorted(map(str, info["missing_keys"])),
        "unexpected": sorted(map(str, info["unexpected_keys"])),
        "transformers": transformers.__version__}))


if __name__ == "__main__":
    main()
