# SPDX-License-Identifier: Apache-2.0
"""usage: theirs.py [--write | --in=FOLDER | --adapters=FOLDER] [FAMILY...]
       theirs.py --loss FOLDER TOKENS [ADAPTER] [--end=TOKEN]

What transformers, PEFT and PyTorch's Muon compute with the models of families.py, as
families.json has it.  With --write it is computed again and written, else compared: that
of the seeded weights, or of the folders FOLDER/FAMILY.  "adapted" is the loss of PEFT with
a seeded adapter, or that of the adapters FOLDER/FAMILY the number in their file "loss".
--loss prints what transformers computes of the bytes of a file, and PEFT with an adapter.
With --end, documents that end with this token do not see each other: their mask, positions
and labels are given, as a data collator gives them."""
import array
import copy
import json
import pathlib
import sys
import tempfile

import torch
import transformers

import families
from families import CLIP, GOLDEN, MUON, SCALES, STEPS, hf


def load(path, **more):
    """A folder's model, which lacks nothing and has nothing too many."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True,
        **{"dtype": torch.float32, "attn_implementation": "eager", **more})
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return model


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


def loss_of(model, x, end=None):
    """The mean cross-entropy of x [1, n] after its first, and what is learnt: with the
    router's own loss if the config asks for that."""
    more, labels = ({}, slice(None)) if end is None else documents(x[0, :-1], end)
    out = model(x[:, :-1], **more)
    loss = torch.nn.functional.cross_entropy(out.logits[0][labels], x[0, 1:][labels])
    return loss, loss + model.config.router_aux_loss_coef * out.aux_loss \
        if getattr(model.config, "output_router_logits", False) else loss


def read_loss(model, tokens, end=None):
    with torch.no_grad():
        return loss_of(model.eval(), torch.tensor([list(tokens)]), end)[0].item()


def adapted(base, path):
    """What PEFT computes with an adapter on a folder; it would save the same tensors."""
    import peft
    import safetensors.torch
    model = peft.PeftModel.from_pretrained(load(base), path)
    saved = peft.get_peft_model_state_dict(model)
    given = safetensors.torch.load_file(path / "adapter_model.safetensors")
    assert given.keys() <= saved.keys(), given.keys() - saved.keys()
    assert all(torch.equal(t, saved[name]) for name, t in given.items())
    return read_loss(model, families.SAMPLE)


def gradients(model):
    """{name: sketch} of the tensors that a folder has, which joins and ties some."""
    grads = copy.deepcopy(model)
    for p, g in zip(model.parameters(), grads.parameters()):
        g.data = p.data * 0 if p.grad is None else p.grad
    for b in grads.buffers():
        b.zero_()
    with tempfile.TemporaryDirectory() as path:
        grads.save_pretrained(path)
        return {k: [float(f"{x:.8g}") for x in families.sketch(k, array.array("f", t[2]))]
                for k, t in hf.read(pathlib.Path(path)).items()}


def trained(path, x=families.SAMPLE, adam=families.ADAM, steps=STEPS, clip=CLIP,
            rate=families.learning_rate, **more):
    """What transformers computes with a folder: losses, norms of gradients, and sketches
    of the first."""
    model, x = load(path, **more).train(), torch.tensor([list(x)])
    adam = torch.optim.AdamW(model.parameters(), **adam)
    out = {"losses": [], "norms": []}
    for t in range(steps + 1):
        loss, learnt = loss_of(model, x)
        adam.zero_grad()
        learnt.backward()
        if t == 0:
            out["gradients"] = gradients(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        out["losses"].append(loss.item())
        out["norms"].append(norm.item())
        adam.param_groups[0]["lr"] = rate(t)
        adam.step()
    return out


# ---- Muon ----

def leaves(p, turned):
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


def iterate_in_double(code):
    """PyTorch's own iteration on numbers that are not rounded to bf16."""
    class Wide:  # what it asks of torch
        bfloat16, addmm = torch.double, torch.addmm

    def wide(*args):
        return type(code)(code.__code__, {**code.__globals__, "torch": Wide})(*args)
    return wide


def muon_losses(family, folder):
    """Of steps by PyTorch's own Muon (2.9 or newer), and AdamW for what is no matrix of
    a block, in double."""
    model = load(folder, dtype=torch.double, experts_implementation="eager")
    matrices, others, whole = leaves(dict(model.named_parameters()), family == "gpt2")
    o, x, out = MUON, torch.tensor([list(families.SAMPLE)]), []
    muon = torch.optim.Muon(matrices, lr=o["muon_lr"], momentum=o["momentum"],
                            weight_decay=o["weight_decay"],
                            adjust_lr_fn=SCALES[family])
    adam = torch.optim.AdamW(others, lr=o["adam_lr"], betas=o["betas"],
                             eps=o["eps"], weight_decay=o["weight_decay"])
    for _ in range(families.MUON_STEPS):
        logits = torch.func.functional_call(model, whole(), (x[:, :-1],)).logits
        loss = torch.nn.functional.cross_entropy(logits[0], x[0, 1:])
        muon.zero_grad()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(matrices + others, CLIP)
        muon.step()
        adam.step()
        out.append(float(loss.detach()))
    return out


def by_muon(family, folder):
    """With its iteration in double, which that in bf16, as it is, comes near."""
    module = __import__("torch.optim._muon", fromlist=["muon"])
    own, in_bf16 = module._zeropower_via_newtonschulz, muon_losses(family, folder)
    module._zeropower_via_newtonschulz = iterate_in_double(own)
    now = muon_losses(family, folder)
    module._zeropower_via_newtonschulz = own
    assert all(abs(a - b) < 3e-4 * b for a, b in zip(in_bf16, now)), family
    return now


# ---- all of it ----

def shapes_of(family, path):
    """Saves a model and returns its config and its shapes."""
    config = transformers.AutoConfig.for_model(
        family.split()[0], **{**families.SHAPE, **families.FAMILIES[family]})
    for k in [k for k in vars(config) if "dropout" in k or "pdrop" in k]:
        setattr(config, k, 0.0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    saved = json.loads((path / "config.json").read_text())
    return {"config": {k: v for k, v in saved.items() if k != "transformers_version"},
            "shapes": {k: t[1] for k, t in hf.read(path).items()}}


def near(name, was, now, bound):
    assert len(was) == len(now) and all(
        abs(a - b) < bound * max(1, a) for a, b in zip(was, now)), (name, was, now)


def check(name, golden, given, path):
    """What is computed now is what golden has, or becomes that where it has nothing."""
    seeded = given or families.write(name, golden, path / "seeded")
    now = trained(seeded)
    if not given:
        now["adapted"] = adapted(seeded, families.write_adapter(
            name, golden, path / "adapter"))
        if name in SCALES:
            now["muon"] = by_muon(name, seeded)
    was = {k: golden[name].setdefault(k, v) for k, v in now.items()}
    for key, bound in (("losses", 1e-5), ("norms", 1e-3), ("adapted", 1e-5), ("muon", 1e-4)):
        if key in now:
            near((name, key), *(x if isinstance(x, list) else [x]
                                for x in (was[key], now[key])), bound)
    for k, (norm, dot) in now["gradients"].items():
        a, b = was["gradients"][k]
        assert max(abs(norm - a), abs(dot - b)) <= 1e-4 * norm, (name, k)
    print(name, now["losses"][0], now["losses"][-1], flush=True)


def main(*words, write=False, **options):
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    given, theirs = (pathlib.Path(options[k]) if k in options else None
                     for k in ("in", "adapters"))
    for name in words or families.FAMILIES:
        with tempfile.TemporaryDirectory() as temporary:
            path = pathlib.Path(temporary)
            if theirs:
                now = adapted(families.write(name, golden, path / "seeded"), theirs / name)
                was = float((theirs / name / "loss").read_text())
                assert abs(was - now) < 2e-5 * was, (name, was, now)
                continue
            if write:
                golden[name] = shapes_of(name, path / "saved")
            check(name, golden, given and given / name, path)
    if write:
        GOLDEN.write_text("{" + ",\n".join(
            f"{json.dumps(k)}: {json.dumps(golden[k])}"
            for k in families.FAMILIES if k in golden) + "}\n")


def print_loss(folder, tokens, adapter=None, end=None, **_):
    model = load(folder)
    if adapter:
        import peft
        model = peft.PeftModel.from_pretrained(model, adapter)
    print(f"\n{read_loss(model, pathlib.Path(tokens).read_bytes(), end and int(end))}")


if __name__ == "__main__":
    flags = {k: v or True for k, _, v in (
        a[2:].partition("=") for a in sys.argv[1:] if a.startswith("--"))}
    (print_loss if "loss" in flags else main)(
        *(a for a in sys.argv[1:] if not a.startswith("--")), **flags)
