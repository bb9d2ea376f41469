# SPDX-License-Identifier: Apache-2.0
"""Weights of the Llama family from and to folders in the layout of Hugging
Face: the four types of config.json and what they must and must not say."""
import json
import pathlib
import shutil
import subprocess
import sys

import pytest

import run

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "runtime/hf"))
import folder as hf  # noqa: E402

TYPE = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
TOOL = str(pathlib.Path(run.PROGRAM).resolve().parents[1] / "tools" / "ckpt")

# Written by every reader of a checkpoint; the rest of config.json is the same.
CHANGED = {"architectures", "transformers_version", "torch_dtype"}


@pytest.fixture(autouse=True)
def llama(monkeypatch):
    run.use_program(monkeypatch, "llama")


def model(folder, dtype="fp32", home=(3, "none", "none"), nvme=None, **more):
    c = {**run.offload(*home, nvme), "model": {"import": str(folder), "seq": 16},
         **more}
    if dtype != "fp32":
        c[f"{dtype}.enabled"] = True
    return c


def written(place, kind, dtype="F32", files=1, prefix="model.", pad=b"",
            change=None):
    """A folder of this type with random weights; its path, tensors, config."""
    c = hf.llama_config(kind, **(change or {}))
    t = hf.random_tensors(hf.llama_shapes(c, prefix), dtype)
    return hf.write(place.folder / "in", t, c, files, pad), t, c


@pytest.mark.parametrize("kind, dtype, ranks, files, prefix, pad", [
    ("llama", "bf16", None, 1, "model.", b" "), ("llama", "fp32", 3, 4, "", b""),
    ("mistral", "fp16", 2, 3, "model.", b"   "),
    ("qwen2", "bf16", 3, 5, "model.", b""), ("qwen2", "fp32", None, 1, "", b" "),
    ("qwen3", "fp16", None, 2, "model.", b""),
    ("qwen3", "bf16", 2, 1, "model.", b"  ")])
def test_untouched_tensors_come_back_bit_by_bit(kind, dtype, ranks, files,
                                                prefix, pad, place):
    """And config.json too, with what means nothing to this program."""
    folder, t, c = written(place, kind, TYPE[dtype], files, prefix, pad)
    out = place.folder / "out"
    place.good(ranks, model(folder, dtype, **{
        "run.steps": 0, "run.export": str(out), "train_batch_size": 12,
        "run.export_shard_bytes": 9000 if files > 1 else 5e9}))
    assert hf.read(out) == {
        k if k == "lm_head.weight" else "model." + k.removeprefix("model."): x
        for k, x in t.items()}
    assert (len(list(out.glob("*.safetensors"))) > 1) == (files > 1)
    got = json.loads((out / "config.json").read_text())
    assert got["architectures"] == c["architectures"]
    want = {k: v for k, v in c.items() if k not in CHANGED}
    if want.get("head_dim") is None:
        want["head_dim"] = 4
    if not want.get("rope_scaling"):
        want.pop("rope_scaling", None)
    for key, value in want.items():
        assert got.get(key) == value, key
    assert got["torch_dtype"] == {"fp32": "float32", "bf16": "bfloat16",
                                  "fp16": "float16"}[dtype]


@pytest.mark.parametrize("kind", hf.LLAMA)
def test_an_import_has_the_loss_of_the_run_that_exported(kind, place, nvme):
    """Trained, exported, imported on other ranks with everything on disk."""
    folder, _, _ = written(place, kind)
    out = place.folder / "trained"
    ev = {"run.eval_batches": 2, "run.workers": 1}
    a = place.good(None, model(folder, **ev, **{"run.export": str(out)}))
    still = {"optimizer.params.lr": 0.0, "optimizer.params.weight_decay": 0.0,
             "run.steps": 1}
    b = place.good(None, model(out, "fp32", (3, "nvme", "nvme"), nvme, **ev,
                               **still))
    losses = [[x["validation_loss"] for x in r.lines if "validation_loss" in x]
              for r in (a, b)]
    assert losses[0] and losses[0] == losses[1]
    assert a.hash == b.hash and a.losses[-1] < a.losses[0]
    c = place.good(2, model(out, "fp32", (3, "cpu", "cpu"), **still))
    assert c.hash == a.hash


def export(output, out):
    return subprocess.run([TOOL, "export", output, "--out", out], text=True,
                          env=run.environment(), capture_output=True)


def content(folder):
    """All of its files, byte by byte."""
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.single
def test_a_checkpoint_is_exported_by_the_tool(place):
    folder, _, c = written(place, "qwen3")
    out = place.folder / "out"
    r = place.good(None, model(folder, **{"run.save": True,
                                          "run.export": str(out)}))
    p = export(r.output, place.folder / "again")
    assert p.returncode == 0, p.stderr
    assert content(place.folder / "again") == content(out)
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == \
        c["eos_token_id"]


@pytest.mark.single
def test_an_export_does_not_need_the_folder_any_more(place):
    """What it had beyond the model's own keys is in the run's output: by the
    tool, and at the end of a run that goes on without the folder."""
    folder, _, c = written(place, "qwen3")
    saved = {"run.save": True, "run.steps": 2}
    r = place.good(None, model(folder, **saved))
    assert json.loads((r.output / "imported.json").read_text()) == c
    want = place.folder / "want"
    assert export(r.output, want).returncode == 0
    config = json.loads((r.output / "config.json").read_text())
    shutil.rmtree(folder)
    p = export(r.output, place.folder / "gone")
    assert p.returncode == 0 and not p.stderr, p.stderr
    assert content(place.folder / "gone") == content(want)
    del config["model"]["import"]
    config["run"]["export"] = str(place.folder / "resumed")
    path = place.folder / "resumed.json"
    path.write_text(json.dumps(config))
    again = run.Run(None, path, ["--resume"]).finish()
    assert again.rc == 0, str(again)
    assert content(place.folder / "resumed") == content(want)


@pytest.mark.single
def test_an_export_that_would_lose_keys_is_refused(place):
    """Of a run that kept nothing; {} in its place says that they may go."""
    folder, _, _ = written(place, "qwen3")
    r = place.good(None, model(folder, **{"run.save": True, "run.steps": 1}))
    kept, out = r.output / "imported.json", place.folder / "lost"
    kept.unlink()
    assert export(r.output, place.folder / "there").returncode == 0
    shutil.rmtree(folder)
    p = export(r.output, out)
    assert p.returncode == 1 and str(kept) in p.stderr and not out.exists()
    kept.write_text("[")
    p = export(r.output, out)
    assert p.returncode == 1 and str(kept) in p.stderr and not out.exists()
    kept.write_text("{}")
    assert export(r.output, out).returncode == 0
    assert "eos_token_id" not in json.loads((out / "config.json").read_text())
    # Another model's run in the same place does not inherit them.
    shutil.rmtree(r.output / "checkpoints")
    place.good(None, {"model": {"preset": "tiny"}}, output=r.output)
    assert not kept.exists()


@pytest.mark.single
def test_rope_parameters_are_the_newer_place(place):
    """The same frequencies, told in either way, train alike."""
    folder, t, c = written(place, "llama")
    newer = dict(c)
    newer["rope_parameters"] = {**newer.pop("rope_scaling"),
                                "rope_theta": newer.pop("rope_theta")}
    other = hf.write(place.folder / "newer", t, newer)
    a = place.good(None, model(folder))
    b = place.good(None, model(other))
    assert a.bits == b.bits and a.hash == b.hash
    plain = dict(c)
    del plain["rope_scaling"]
    d = place.good(None, model(hf.write(place.folder / "plain", t, plain)))
    assert d.losses[0] != a.losses[0]


@pytest.mark.single
@pytest.mark.parametrize("kind, change, word", [
    ("mistral", {"sliding_window": 15}, "window"),
    ("mistral", {"sliding_window": None}, None),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
    ("llama", {"attention_bias": True}, "attention_bias"),
    ("llama", {"mlp_bias": True}, "mlp_bias"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
    ("llama", {"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor"),
    ("llama", {"rope_scaling": {"rope_type": "default", "factor": 2.0}},
     "rope_scaling.factor"),
    ("llama", {"rope_scaling": {"type": "llama3", "factor": 2.0}}, None),
    ("llama", {"rope_scaling": {"rope_type": "default"}}, None),
    ("llama", {"rope_scaling": None, "rope_parameters": {"factor": 2.0}},
     "rope_parameters.factor"),
    ("llama", {"rope_scaling": None, "rope_parameters": {
        "rope_type": "yarn", "factor": 2.0}}, "yarn"),
    ("llama", {"model_type": "gemma"}, "model_type"),
    ("llama", {"max_position_embeddings": 15}, "context"),
    ("qwen3", {"head_dim": 5}, "head_dim"),
    ("llama", {"hidden_size": None}, "width")])
def test_what_computes_something_else_is_refused(kind, change, word, place):
    folder, t, c = written(place, kind)
    (folder / "config.json").write_text(json.dumps({**c, **change}))
    r = place.launch(None, model(folder, **{"run.steps": 1}))
    if word is None:
        assert r.rc == 0, str(r)
        return
    assert r.rc == 1 and word in r.err and not r.steps, str(r)
    assert not run.DUMPS.search(r.out + r.err), str(r)


@pytest.mark.single
def test_tensors_that_do_not_fit_are_listed(place):
    folder, t, c = written(place, "qwen2")
    del t["model.layers.1.self_attn.k_proj.bias"]
    t["model.layers.2.mlp.up_proj.weight"] = ("F32", (21, 24), bytes(4 * 21 * 24))
    t["model.layers.0.self_attn.o_proj.bias"] = ("F32", (24,), bytes(96))
    t["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", (2,), bytes(8))
    folder = hf.write(place.folder / "wrong", t, c)
    r = place.launch(None, model(folder))
    for words in (("layers.1.self_attn.k_proj.bias", "missing"),
                  ("layers.2.mlp.up_proj.weight", "[21, 24]", "[20, 24]"),
                  ("layers.0.self_attn.o_proj.bias", "no tensor"),
                  (str(folder), "3 faults")):
        run.refused(r, "model.import", *words)


@pytest.mark.single
def test_a_shape_that_nobody_publishes_is_not_exported(place):
    out = place.folder / "out"
    r = place.launch(None, {"model": {
        "layers": 1, "heads": 2, "width": 8, "ffn": 8, "seq": 16, "vocab": 256,
        "qkv_bias": True, "qk_norm": True}, "run.export": str(out)})
    run.refused(r, "run.export", "no published type")
    assert not r.steps and not out.exists()


@pytest.mark.single
def test_a_family_that_contradicts_is_refused(place):
    folder, _, _ = written(place, "qwen2")
    c = model(folder)
    c["model"]["qkv_bias"] = False
    run.refused(place.launch(None, c), "model.qkv_bias", "config.json")
