#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""Regenerates preferences.json: what TRL's DPOTrainer reports of some steps on a tiny GPT-2,
in double precision, for several losses, with a frozen copy as the reference.  The
tests need neither TRL nor PyTorch.

usage: PYTHON-WITH-TRL tests/e2e/step/preferences.py [OTHER-FILE]
       PYTHON-WITH-TRL tests/e2e/step/preferences.py OTHER-FILE MODEL ADAPTER

The second one trains PEFT's adapter of a folder, in whose place the reference has
none, with the first of the losses."""
import json
import pathlib
import random
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "runtime/hf"))
import folder as hf  # noqa: E402

FILE = pathlib.Path(__file__).with_name("preferences.json")
STEPS, SEQ, END, PAIRS = 6, 16, 0, 6
GPT2 = {"layers": 2, "heads": 3, "width": 24, "seq": SEQ, "vocab": 64}
ADAM = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
CLIP = 0.5
LOSSES = {"dpo": {"type": "dpo", "beta": 0.3}, "ipo": {"type": "ipo", "beta": 0.3},
          "dpo and sft": {"type": "dpo", "beta": 0.1, "sft": 0.5}}
NAMES = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins",
         "logps/chosen", "logps/rejected")


def pairs(seed=1):
    """(prompt, chosen, rejected) of tokens; the last ones end with END."""
    rng, out = random.Random(seed), []
    for _ in range(PAIRS):
        prompt = [rng.randrange(1, GPT2["vocab"]) for _ in range(rng.randrange(1, 7))]
        texts = [[rng.randrange(1, GPT2["vocab"])] for _ in range(2)]
        while texts[0][0] == texts[1][0]:
            texts[1] = [rng.randrange(1, GPT2["vocab"])]
        for t in texts:
            t += [rng.randrange(1, GPT2["vocab"])
                  for _ in range(rng.randrange(SEQ - len(prompt) - 1))] + [END]
        out.append((prompt, *texts))
    return out


def tensors():
    """Those of norms are near 1; the others are large enough to matter."""
    out = hf.random_tensors(hf.gpt2_shapes(GPT2), "F32")
    for name, (dtype, shape, data) in out.items():
        values = memoryview(data).cast("f").tolist()
        near_1 = ".ln_" in name and name.endswith("weight")
        out[name] = dtype, shape, hf.encode(dtype, [
            1 + x if near_1 else 4 * x if "wte" in name or "c_attn" in name else x
            for x in values])
    return out


def tokenizer(transformers):
    """Of words t0, t1, ...; TRL adds t0 at the end."""
    import tokenizers
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(
        {f"t{i}": i for i in range(GPT2["vocab"])}, unk_token="t1"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, eos_token="t0", pad_token="t0")


def in_double(torch):
    """TRL's fused loss makes fp32 of everything: here its fp32 is fp64."""
    import trl.kernels.chunked_logprob as module

    class Wide:
        float32 = torch.double

        def __getattr__(self, name):
            return getattr(torch, name)
    module.torch = Wide()
    torch.Tensor.float = torch.Tensor.double


def text(tokens):
    return "".join(f" t{i}" for i in tokens)


def train(folder, loss, adapter=None):
    import datasets
    import torch
    import transformers
    import trl

    in_double(torch)

    def model():
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.double, attn_pdrop=0,
            resid_pdrop=0, embd_pdrop=0)
    rows = [{"prompt": text(p), "chosen": text(a), "rejected": text(b)}
            for p, a, b in pairs()]
    sft = loss.get("sft", 0)
    types = ["sigmoid" if loss["type"] == "dpo" else loss["type"]] + ["sft"] * (sft > 0)
    args = trl.DPOConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=PAIRS,
        num_train_epochs=STEPS, logging_steps=1, report_to=[], save_strategy="no",
        learning_rate=ADAM["lr"], adam_beta1=ADAM["betas"][0],
        adam_beta2=ADAM["betas"][1], adam_epsilon=ADAM["eps"],
        weight_decay=ADAM["weight_decay"], max_grad_norm=CLIP,
        lr_scheduler_type="constant", beta=loss["beta"], loss_type=types,
        loss_weights=[1.0, sft][:len(types)], bf16=False, use_cpu=True,
        gradient_checkpointing=False, disable_dropout=True, max_length=SEQ)
    own = model()
    if adapter:
        import peft
        own = peft.PeftModel.from_pretrained(own, adapter, is_trainable=True,
                                             autocast_adapter_dtype=False).double()
    # Weight decay of every parameter, as izar has it.
    optimizer = torch.optim.AdamW(
        [p for p in own.parameters() if p.requires_grad], lr=ADAM["lr"],
        betas=ADAM["betas"], eps=ADAM["eps"], weight_decay=ADAM["weight_decay"])
    t = trl.DPOTrainer(
        model=own, ref_model=None if adapter else model(), args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(transformers),
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1, 0)))
    have = [(r["prompt_ids"], r["chosen_ids"], r["rejected_ids"])
            for r in t.train_dataset]
    assert [tuple(map(list, r)) for r in have] == [tuple(r) for r in pairs()]
    exact = []
    compute = t._compute_loss

    def kept(*args, **more):
        r = compute(*args, **more)
        exact.append(float(r))
        return r
    t._compute_loss = kept
    t.train()
    steps = [x for x in t.state.log_history if "loss" in x]
    figures = [{k: x[k] for k in NAMES} for x in steps]
    assert len(figures) == len(exact) == STEPS
    return [{"loss": e, **x} for e, x in zip(exact, figures)]


def main(file=FILE, model=None, adapter=None):
    if adapter:
        out = train(pathlib.Path(model), next(iter(LOSSES.values())), adapter)
        pathlib.Path(file).write_text(json.dumps(out))
        return
    with tempfile.TemporaryDirectory() as place:
        folder = hf.write(pathlib.Path(place) / "in", tensors(), hf.gpt2_config(GPT2))
        out = {name: train(folder, loss) for name, loss in LOSSES.items()}
    pathlib.Path(file).write_text("{" + ",\n".join(
        f"{json.dumps(k)}: {json.dumps(v)}" for k, v in out.items()) + "}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
