# SPDX-License-Identifier: Apache-2.0
"""Weights from and to folders in the layout of Hugging Face."""
import json
import pathlib
import sys

import pytest

import run

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "runtime/hf"))
import folder as hf  # noqa: E402

TYPE = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}

# Nothing moves: the loss of a step is that of the weights at the start.
STILL = {"optimizer.params.lr": 0.0, "optimizer.params.weight_decay": 0.0,
         "run.eval_batches": 2}


def model(dtype, home=(0, "none", "none"), nvme=None, **more):
    c = {**run.offload(*home, nvme), **more}
    if dtype != "fp32":
        c[f"{dtype}.enabled"] = True
    return c


def validation(r):
    return [x["validation_loss"] for x in r.lines
            if "validation_loss" in x]


def without_model(place, overrides):
    """A config whose shape comes from the folder alone."""
    path = place.config(overrides)
    c = json.loads(path.read_text())
    c["model"] = {"import": c["model"]["import"]}
    path.write_text(json.dumps(c))
    r = run.Run(None, path).finish()
    assert r.rc == 0, str(r)
    return r


@pytest.fixture(scope="module")
def trained(workplace, text):
    """Per type: a run of three steps and the folder that it exported."""
    done = {}
    place = run.Place(workplace / "trained", text)
    place.folder.mkdir()

    def get(dtype):
        if dtype not in done:
            out = place.folder / dtype
            r = place.good(None, {**model(dtype), "run.eval_batches": 2,
                                  "run.export": str(out)})
            done[dtype] = r, out
        return done[dtype]
    yield get
    place.clear()


@pytest.mark.parametrize("dtype", ("fp32", "bf16", "fp16"))
def test_an_export_is_what_transformers_reads(dtype, trained):
    r, out = trained(dtype)
    assert "exported step 3 to" in r.out
    assert sorted(p.name for p in out.iterdir()) == \
        ["config.json", "model.safetensors"]
    tensors = hf.read(out)
    assert {k: t[1] for k, t in tensors.items()} == hf.gpt2_shapes(run.MODEL)
    assert {t[0] for t in tensors.values()} == {TYPE[dtype]}
    c = json.loads((out / "config.json").read_text())
    want = hf.gpt2_config(run.MODEL)
    for key in ("architectures", "model_type", "n_layer", "n_head", "n_embd",
                "n_positions", "vocab_size", "activation_function",
                "layer_norm_epsilon"):
        assert c[key] == want[key], key
    assert c["torch_dtype"] == {"fp32": "float32", "bf16": "bfloat16",
                                "fp16": "float16"}[dtype]
    assert c["tie_word_embeddings"] is True


@pytest.mark.parametrize("dtype, ranks, home", [
    ("fp32", None, (0, "none", "none")), ("bf16", None, (3, "nvme", "nvme")),
    ("fp16", None, (3, "cpu", "none")), ("fp32", 3, (0, "none", "none")),
    ("bf16", 2, (1, "cpu", "none")), ("fp16", 2, (3, "none", "none")),
    ("fp32", 3, (3, "nvme", "nvme"))])
def test_an_import_has_the_loss_of_the_run_that_exported(
        dtype, ranks, home, trained, place, nvme):
    """At any number of ranks; the loss bit for bit on one, where the sums of
    the samples are the same; the tensors everywhere."""
    a, folder = trained(dtype)
    again = place.folder / "again"
    n = ranks or 1
    b = place.good(ranks, {**model(dtype, home, nvme), **STILL,
                           "train_batch_size": 4 * n,
                           "model.import": str(folder), "run.steps": 1,
                           "run.export": str(again)})
    if n == 1:
        assert validation(a) == validation(b) and validation(a)
    else:
        assert len(validation(b)) == 1
    if dtype == "fp32":
        assert a.hash == b.hash
    if dtype != "fp16":  # whose -0 from small numbers is 0 after the step
        assert hf.read(folder) == hf.read(again)


@pytest.mark.parametrize("dtype, ranks, files, prefix, pad", [
    ("fp16", None, 1, "transformer.", b""), ("bf16", 2, 4, "", b" "),
    ("fp32", 3, 5, "transformer.", b"   "), ("bf16", None, 1, "", b" ")])
def test_untouched_tensors_come_back_bit_by_bit(dtype, ranks, files, prefix,
                                                pad, place):
    """From one file or several, with prefix or without, at odd addresses."""
    t = hf.gpt2_tensors(run.MODEL, TYPE[dtype], prefix)
    folder = hf.write(place.folder / "in", t, hf.gpt2_config(run.MODEL), files,
                      pad)
    out = place.folder / "a" / "b" / "out"
    c = {**model(dtype, (3, "none", "none")), "model.import": str(folder),
         "run.steps": 0, "run.export": f"{out}/", "train_batch_size": 12,
         "run.export_shard_bytes": 10000 if files > 1 else 5e9}
    place.good(ranks, c)
    got = hf.read(out)
    assert got == {"transformer." + k.removeprefix("transformer."): x
                   for k, x in t.items()}
    assert (len(list(out.glob("*.safetensors"))) > 1) == (files > 1)
    for f in out.glob("*.safetensors"):
        assert len(hf.read_file(f)) == 1 or \
            sum(len(x[2]) for x in hf.read_file(f).values()) <= \
            c["run.export_shard_bytes"]


@pytest.mark.single
def test_the_shape_comes_from_the_folder(place):
    m = {"layers": 2, "heads": 2, "width": 16, "seq": 8, "vocab": 256}
    t = hf.gpt2_tensors(m, "BF16")
    folder = hf.write(place.folder / "in", t, hf.gpt2_config(m))
    r = without_model(place, {"model.import": str(folder)})
    c = json.loads((r.output / "config.json").read_text())["model"]
    assert c == {**m, "import": str(folder)}


@pytest.mark.single
@pytest.mark.parametrize("dtype", ("fp32", "fp16"))
def test_export_type_is_a_choice(dtype, place):
    """What two types hold exactly is the same in both."""
    t = hf.gpt2_tensors(run.MODEL, "BF16")
    folder = hf.write(place.folder / "in", t, hf.gpt2_config(run.MODEL))
    out = place.folder / "out"
    place.good(None, {**model("bf16"), "model.import": str(folder),
                      "run.steps": 0, "run.export": str(out),
                      "run.export_dtype": dtype})
    assert hf.read(out) == hf.gpt2_tensors(run.MODEL, TYPE[dtype])


@pytest.mark.single
def test_what_means_nothing_may_be_there(place):
    """The head's second name, and the masks of old files."""
    t = hf.gpt2_tensors(run.MODEL, "F32")
    plain = dict(t)
    t["lm_head.weight"] = t["transformer.wte.weight"]
    for i in range(run.MODEL["layers"]):
        t[f"transformer.h.{i}.attn.bias"] = ("U8", (1, 1, 16, 16), bytes(256))
        t[f"transformer.h.{i}.attn.masked_bias"] = ("F32", (), bytes(4))
    folder = hf.write(place.folder / "in", t, hf.gpt2_config(run.MODEL), 2)
    out = place.folder / "out"
    place.good(None, {"model.import": str(folder), "run.steps": 0,
                      "run.export": str(out)})
    assert hf.read(out) == plain


# ---- refusals ----

@pytest.mark.parametrize("ranks", (None, 2))
def test_all_wrong_tensors_are_listed(ranks, place):
    t = hf.gpt2_tensors(run.MODEL, "F32")
    c = run.MODEL["width"]
    del t["transformer.h.1.ln_1.bias"], t["transformer.ln_f.weight"]
    t["transformer.wpe.weight"] = ("F32", (17, c), bytes(4 * 17 * c))
    t["transformer.h.0.attn.c_attn.weight"] = \
        ("F32", (3 * c, c), bytes(12 * c * c))
    t["transformer.h.2.ln_1.weight"] = ("F64", (c,), bytes(8 * c))
    t["transformer.h.9.ln_1.weight"] = ("F32", (c,), bytes(4 * c))
    t["score.weight"] = ("F32", (2, c), bytes(8 * c))
    folder = hf.write(place.folder / "in", t, hf.gpt2_config(run.MODEL))
    r = place.launch(ranks, {"model.import": str(folder)})
    for words in (("transformer.h.1.ln_1.bias", "missing"),
                  ("transformer.ln_f.weight", "missing"),
                  ("transformer.wpe.weight", "[17, 24]", "[16, 24]"),
                  ("transformer.h.0.attn.c_attn.weight", "[72, 24]",
                   "[24, 72]"),
                  ("transformer.h.2.ln_1.weight", "F64"),
                  ("transformer.h.9.ln_1.weight", "no tensor"),
                  ("score.weight", "no tensor"), (str(folder), "7 faults")):
        run.refused(r, "model.import", *words)


@pytest.mark.parametrize("ranks", (None, 2))
def test_a_head_of_its_own_is_refused(ranks, place):
    t = hf.gpt2_tensors(run.MODEL, "BF16")
    dtype, shape, data = t["transformer.wte.weight"]
    t["lm_head.weight"] = (dtype, shape, data[:-2] + b"\x00\x42")
    folder = hf.write(place.folder / "in", t, hf.gpt2_config(run.MODEL))
    run.refused(place.launch(ranks, {**model("bf16", (3, "none", "none")),
                                     "model.import": str(folder)}),
                "lm_head.weight", "not equal")


CONFIGS = [({"n_layer": 4}, "model.layers", ("5", "4", "config.json")),
           ({"vocab_size": 512}, "model.vocab", ("256", "512")),
           ({"n_ctx": 8}, "n_ctx", ("8", "n_positions")),
           ({"model_type": "llama"}, "model_type", ("llama", "gpt2")),
           ({"activation_function": "relu"}, "activation_function", ("relu",)),
           ({"layer_norm_epsilon": 0.25}, "layer_norm_epsilon", ("0.25", "1e-05")),
           ({"n_head": None}, "model.heads", ("null",)),
           ({"n_embd": "24"}, "model.width", ("24",))]


@pytest.mark.single
@pytest.mark.parametrize("change, key, words", CONFIGS)
def test_a_config_that_contradicts_is_refused(change, key, words, place):
    c = {**hf.gpt2_config(run.MODEL), **change}
    folder = hf.write(place.folder / "in", hf.gpt2_tensors(run.MODEL, "F32"), c)
    r = place.launch(None, {"model.import": str(folder)})
    assert r.rc == 1 and not run.DUMPS.search(r.err), str(r)
    lines = [x for x in r.err.splitlines()
             if key in x and all(w in x for w in words)]
    assert lines, str(r)


@pytest.mark.single
def test_a_missing_key_or_folder_is_named(place):
    c = hf.gpt2_config(run.MODEL)
    del c["n_head"], c["vocab_size"]
    folder = hf.write(place.folder / "in", {}, c)
    r = place.launch(None, {"model.import": str(folder)})
    run.refused(r, "n_head", "missing", str(folder))
    run.refused(r, "vocab_size", "missing", str(folder))
    r = place.launch(None, {"model.import": str(place.folder / "none")})
    run.refused(r, "none/config.json", "No such file")
    (folder / "config.json").write_text("{")
    r = place.launch(None, {"model.import": str(folder)})
    run.refused(r, "config.json", "not a JSON object")


@pytest.mark.single
def test_a_folder_without_weights_or_with_damaged_ones_is_named(place):
    t = hf.gpt2_tensors(run.MODEL, "F32")
    folder = hf.write(place.folder / "in", t, hf.gpt2_config(run.MODEL), 2)
    c = {"model.import": str(folder)}
    file = folder / "model-00002-of-00002.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    run.refused(place.launch(None, c), file.name, "truncated")
    file.write_bytes(data[:7])
    run.refused(place.launch(None, c), file.name, "not safetensors")
    file.unlink()
    run.refused(place.launch(None, c), file.name, "No such file")
    (folder / "model.safetensors.index.json").unlink()
    run.refused(place.launch(None, c), str(folder), "has neither")


@pytest.mark.single
def test_an_export_never_overwrites(place):
    out = place.folder / "taken"
    out.mkdir()
    (out / "notes").write_text("mine")
    r = place.launch(None, {"run.export": str(out)})
    run.refused(r, "export", str(out), "exists")
    assert not r.steps and (out / "notes").read_text() == "mine"


@pytest.mark.single
def test_what_a_crash_left_of_an_export_is_replaced(place):
    out = place.folder / "out"
    left = place.folder / "out.tmp"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    out.mkdir()  # empty
    place.good(None, {"run.export": str(out)})
    assert len(hf.read(out)) == 4 + 12 * run.MODEL["layers"]
    assert not left.exists()


@pytest.mark.single
def test_an_import_is_resumed_without_its_folder(place):
    """Once there is a checkpoint, the folder only says the shape."""
    t = hf.gpt2_tensors(run.MODEL, "F32")
    folder = hf.write(place.folder / "in", t, hf.gpt2_config(run.MODEL))
    c = {"model.import": str(folder), "run.save": True, "run.steps": 4}
    whole = place.good(None, c)
    out = place.folder / "halves"
    place.good(None, {**c, "run.steps": 2}, output=out)
    (folder / "model.safetensors").unlink()
    r = place.good(None, c, ["--resume"], output=out)
    assert r.bits == whole.bits and r.hash == whole.hash
