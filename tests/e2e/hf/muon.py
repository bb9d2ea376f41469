# SPDX-License-Identifier: Apache-2.0
"""usage: muon.py [--write]

The losses of twenty steps of some of families.py's models by PyTorch's own Muon (2.9
or newer), and AdamW for what is no matrix of a block, in double: with its iteration in
bf16, as it is, and in double.  The latter are compared with muon.json, or written to
it, and the former with the latter."""
import json
import pathlib
import sys
import tempfile

import families

FILE = pathlib.Path(__file__).with_suffix(".json")
STEPS = 20
PARAMS = {"muon_lr": 2e-3, "adam_lr": 1e-3, "momentum": 0.9, "betas": [0.9, 0.95],
          "eps": 1e-8, "weight_decay": 0.1}
# Of the run, and of torch.optim.Muon.
SCALES = {"gpt2": "original", "llama": "match_rms_adamw", "mistral": "original",
          "qwen2": "match_rms_adamw", "qwen3": "original", "qwen3_moe": "match_rms_adamw",
          "mixtral": "original"}


def leaves(torch, p, turned):
    """The matrices [out, in] that Muon updates and the other parameters; a
    function that makes a model's dictionary of them."""
    stacked = {}
    for name, a in p.items():
        if ".layers." in name and a.dim() == 3:  # of all experts
            each = [x for e in a for x in e.chunk(2 if "gate_up" in name else 1)]
        elif (".h." in name or ".layers." in name) and a.dim() == 2 and \
                not name.endswith("mlp.gate.weight"):
            each = (a.T if turned else a).chunk(3 if "c_attn" in name else 1)
        else:
            continue
        stacked[name] = [x.detach().clone().requires_grad_() for x in each]
    others = {k: a for k, a in p.items() if k not in stacked}

    def whole():
        made = {k: torch.cat(x) for k, x in stacked.items()}
        return {**others, **{k: a.T if turned else a.reshape(p[k].shape)
                             for k, a in made.items()}}
    return [x for parts in stacked.values() for x in parts], list(others.values()), \
        whole


def iterate_in_double(torch, code):
    """PyTorch's own iteration on numbers that are not rounded to bf16."""
    class Wide:  # what it asks of torch
        bfloat16, addmm = torch.double, torch.addmm

    def wide(*args):
        return type(code)(code.__code__, {**code.__globals__, "torch": Wide})(*args)
    return wide


def losses(torch, family, folder):
    import transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.double, attn_implementation="eager",
        experts_implementation="eager")
    matrices, others, whole = leaves(torch, dict(model.named_parameters()),
                                     family == "gpt2")
    o, x, out = PARAMS, torch.tensor([list(families.SAMPLE)]), []
    muon = torch.optim.Muon(matrices, lr=o["muon_lr"], momentum=o["momentum"],
                            weight_decay=o["weight_decay"],
                            adjust_lr_fn=SCALES[family])
    adam = torch.optim.AdamW(others, lr=o["adam_lr"], betas=o["betas"],
                             eps=o["eps"], weight_decay=o["weight_decay"])
    for _ in range(STEPS):
        logits = torch.func.functional_call(model, whole(), (x[:, :-1],)).logits
        loss = torch.nn.functional.cross_entropy(logits[0], x[0, 1:])
        muon.zero_grad()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(matrices + others, families.CLIP)
        muon.step()
        adam.step()
        out.append(float(loss.detach()))
    return out


def main():
    import torch
    module = __import__("torch.optim._muon", fromlist=["muon"])
    own, golden = module._zeropower_via_newtonschulz, json.loads(families.GOLDEN.read_text())
    now = {}
    for family in SCALES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = families.write(family, golden, pathlib.Path(temporary) / "in")
            in_bf16 = losses(torch, family, folder)
            module._zeropower_via_newtonschulz = iterate_in_double(torch, own)
            now[family] = losses(torch, family, folder)
            module._zeropower_via_newtonschulz = own
        assert all(abs(a - b) < 3e-4 * b for a, b in zip(in_bf16, now[family])), family
    if "--write" in sys.argv:
        families.write_golden(FILE, now)
    was = json.loads(FILE.read_text())
    for family, kept in was.items():
        for a, b in zip(now[family], kept):
            assert abs(a - b) < 1e-4 * b, (family, now[family], kept)


if __name__ == "__main__":
    main()
