# SPDX-License-Identifier: Apache-2.0
"""What is told of a folder in the layout of Hugging Face before anybody uses it: of
our exports by the run and by the tool, which read them again, and of those of others
by `ckpt check`."""
import contextlib
import pathlib
import re
import shutil
import signal
import subprocess

import pytest

import run
from run import STILL, ckpt, hf
from test_hf import EVAL, config_of, model, tensors_of, written

# ---- what was written is read again ----

LORA = {"lora.rank": 2, "lora.alpha": 8, "lora.targets": "*",
        "optimizer.params.lr": 0.01}
ALONE = {**LORA, "lora.export": "adapter"}
# Settings beside the type and ranks; what is said of the two losses.
PROVEN = [
    ("gpt2", "fp32", 2, {}, "equal"), ("gpt2", "bf16", 1, EVAL, "equal"),
    ("mistral", "fp16", 3, {"run.export_dtype": "fp32", **EVAL}, "equal"),
    ("qwen3_moe", "fp32", 1, {"run.export_dtype": "bf16", **EVAL}, "bf16 rounding"),
    ("llama", "bf16", 2, {"zero_optimization.stage": 1, **LORA}, "bf16 rounding"),
    ("llama", "bf16", 2, {"model.base_dtype": "nf4", **LORA, **EVAL}, "bf16 rounding"),
    ("gpt2", "fp32", 1, {"model.base_dtype": "int8", **LORA}, "fp32 rounding"),
    ("gpt2", "fp16", 2, {"model.base_dtype": "int8", **ALONE, **EVAL}, "equal"),
    ("mixtral", "bf16", 1, {**ALONE, "run.export_dtype": "fp16"}, "bf16 rounding")]


@pytest.mark.parametrize("kind, dtype, ranks, more, said", PROVEN)
def test_an_export_has_the_loss_of_the_run(kind, dtype, ranks, more, said, place):
    """Merged adapters, those on their base, of a base in fewer bits, too; the tool
    compares each value."""
    out = place.folder / "out"
    r = place.good(ranks, {**model(written(place, kind), dtype), "run.save": True,
                           "train_batch_size": 12, **more, "run.export": str(out)})
    a, b, how = re.search(r"\nexport: loss (\S+), run (\S+) \((.*)\)\nexported", r.out
                          ).groups()
    assert how.startswith(said) and abs(float(a) - float(b)) < 0.02
    assert (a == b) or how != "equal"
    alone = ["--adapter"] if "lora.export" in more else []
    p = ckpt("export", r.output, "--out", place.folder / "tool", *alone)
    assert re.search(r"^export: [1-9]\d* values read again, equal as ", p.out), p.out
    losses = re.search(r"\nexport: loss (\S+), run (\S+) \(", p.out)
    assert bool(losses) == (EVAL.items() <= more.items()), str(p)
    assert losses or "\nexport: no loss: the run told none of this step\n" in p.out
    if losses:
        assert abs(float(losses[1]) - float(losses[2])) < 0.02
        assert losses[2] == f"{r.validation[-1]:.4f}"


def test_another_loss_is_no_export(place):
    """What the metrics say of the step is not what the program finds."""
    data, out = place.folder / "text", place.folder / "out"
    data.write_bytes(place.data.read_bytes())
    r = place.good(1, {"run.save": True, **EVAL, "data.path": str(data)})
    metrics = r.output / "metrics.jsonl"
    told = f'"validation_loss": {r.validation[-1]}'
    assert told[:25] in metrics.read_text()
    metrics.write_text(re.sub(r'("validation_loss": \d)', r"\g<1>1", metrics.read_text()))
    p = ckpt("export", r.output, "--out", out, rc=1)
    assert "what was written has loss" in p.err and not out.exists()
    # what the program cannot read: the export is there, without a loss
    data.unlink()
    p = ckpt("export", r.output, "--out", out)
    assert str(data) in p.err and "no loss: the program cannot, see above" in p.out


def test_what_was_written_wrongly_is_no_export(place):
    """One byte of a tensor, or of the config, by the run and by the tool; the next
    export takes the place of what is left.  The last shard is the first rank's."""
    out, left = place.folder / "out", place.folder / "out.tmp"
    good = place.good(2, {"run.save": True})
    for name, byte, said in (("model.safetensors", 7, ["export", "ln_f.bias", "written"]),
                             ("config.json", 123, ["out.tmp/config.json", "not a JSON"])):
        env = {"LD_PRELOAD": run.built("tests/libslow.so"), "SLOW_NAME": f"tmp/{name}",
               "SLOW_RANK": "0", "SLOW_BYTE": str(byte)}
        r = place.launch(2, {"run.export": str(out)}, env=env)
        run.refused(r, str(left), *said, everyone=True)
        assert "failed after 3 steps" in r.out
        run.refused(r, str(left), "keeps this name")
        assert not out.exists() and (left / "izar-unfinished").exists()
    p = ckpt("export", good.output, "--out", out, rc=1,
             env={**env, "SLOW_NAME": "tmp/model", "OMPI_COMM_WORLD_RANK": "0"})
    assert "ln_f.bias" in p.err and "keeps this name" in p.err and not out.exists()
    place.good(1, {"run.export": str(out)})
    assert not left.exists()


@pytest.mark.sanitized
def test_what_a_crash_left_of_an_export_is_replaced(place):
    out, left = place.folder / "out", place.folder / "out.tmp"
    left.mkdir()
    (left / "izar-unfinished").touch()
    (left / "model.safetensors").write_bytes(b"half")
    out.mkdir()  # empty
    place.good(1, {"run.export": str(out)})
    assert len(hf.read(out)) == 4 + 12 * run.MODEL["layers"]
    assert not left.exists() and not (out / "izar-unfinished").exists()


# ---- folders of others ----

CHECKED = [  # a folder with changes: what is said of it, and what contradicts
    ("qwen2", {"logits_scaling": 8.0}, {},
     ["model_type qwen2, read by llama", "not read: logits_scaling",
      "model.layers.2.self_attn.k_proj.bias [16] F32  is layers.2.self_attn.qkv_proj.bias,"
      " columns 32 to 47", "rotary_emb.inv_freq [2] F32  means nothing here",
      "38688 parameters in 5 units, all finite"], []),
    ("gpt2", {}, {}, ["h.1.mlp.c_fc.weight [24, 96] F32  is h.1.mlp.c_fc.weight"], []),
    ("mixtral", {}, {"model.extra": ("F32", (1,), bytes(4)),
                     "model.norm.weight": ("F32", (32,), b"\0\0\xc0\x7f" * 32)},
     ["model.extra [1] F32  is unknown"], ["model.extra: is no tensor of this model"]),
    ("llama", {}, {"model.norm.weight": ("F32", (32,), b"\0\0\xc0\x7f" * 32)}, [],
     ["model.norm.weight: has a value that is not finite"]),
    ("llama", {"vocab_size": 255, "hidden_act": "relu"}, {}, [], ['hidden_act is "relu"']),
    ("mistral", {"model_type": "rwkv"}, {}, [], ['model_type "rwkv" is read by none'])]


@pytest.mark.sanitized
@pytest.mark.parametrize("kind, change, tensors, said, faults", CHECKED)
def test_a_foreign_folder_is_checked_without_a_run(kind, change, tensors, said, faults,
                                                   place):
    ignored = {"model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (2,), bytes(8))}
    folder = written(place, kind, config={**config_of(kind), **change}, tensors={
        **tensors_of(kind), **tensors, **(ignored if kind == "qwen2" else {})})
    p = ckpt("check", folder, rc=1 if faults else 0)
    assert all(x in p.out for x in said), str(p)
    assert all(x in p.err for x in faults) and bool(p.err) == bool(faults), str(p)
    assert f"{folder} {'cannot' if faults else 'can'} be imported" in p.out


def test_one_command_has_the_loss_of_a_text(place):
    folder, data = written(place, "qwen3"), place.folder / "text"
    data.write_bytes(place.data.read_bytes()[:16 * 5 + 1])
    settings = ["--data", data, "--set", "model.seq=16"]
    p = ckpt("check", folder, *settings, "--set", "data.bytes=true")
    loss, = re.findall(rf"^loss (\S+) nats per token of {data}$", p.out, re.M)
    mean = place.good(1, {**model(folder), **STILL, "train_batch_size": 5,
                          "data.path": str(data), "data.val_fraction": 0}).losses[0]
    assert abs(float(loss) - mean) < 1e-6
    p = ckpt("check", folder, *settings, rc=1)
    assert "data.bytes" in p.err and "can be imported" in p.out


def test_ctrl_c_ends_the_search_for_a_loss(place):
    folder, data = written(place, "qwen3"), place.folder / "text"
    data.write_bytes(bytes(16 * 20000))
    p = subprocess.Popen(
        [run.built("tools/ckpt"), "check", folder, "--data", data, "--set",
         "model.seq=16", "--set", "data.bytes=true"], stdout=subprocess.DEVNULL,
        # what starts the tests may have turned Ctrl-C off
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    begun = []
    while not begun and p.poll() is None:
        with contextlib.suppress(OSError):  # it closes some meanwhile
            begun = [f for f in map(pathlib.Path.resolve, pathlib.Path(
                f"/proc/{p.pid}/fd").iterdir()) if f.name == "metrics.jsonl" and f.stat().st_size]
    p.send_signal(signal.SIGINT)
    assert p.wait(run.TIMEOUT_S) == -signal.SIGINT
    shutil.rmtree(begun[0].parent)
