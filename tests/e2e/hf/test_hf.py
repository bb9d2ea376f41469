# SPDX-License-Identifier: Apache-2.0
"""Weights from and to folders in the layout of Hugging Face: GPT-2, the four types of
the Llama family and its two mixtures of experts, with what their config.json must and
must not say."""
import array
import json
import shutil

import pytest

import rows
import run
from run import STILL, ckpt, hf

TYPE = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Written by every reader of a checkpoint; the rest of config.json is the same.
CHANGED = {"architectures", "transformers_version", "torch_dtype"}
EVAL = {"run.eval_batches": 2}
# What configs of transformers 4 have of their own.
OWN = {"llama": {"eos_token_id": [2, 3], "rope_scaling": {
           "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
       "mistral": {"sliding_window": 16, "rope_theta": 1e6},
       "qwen2": {"sliding_window": 8, "max_window_layers": 2},
       "qwen3": {"rope_scaling": None, "eos_token_id": 7},
       "qwen3_moe": {"num_experts": 6},
       "mixtral": {"num_local_experts": 6, "sliding_window": None}}
KINDS = ("gpt2", *OWN)
NEWER = {"dtype", "layer_types", "rope_parameters", "num_local_experts"}


def config_of(kind):
    if kind == "gpt2":
        return hf.gpt2_config(run.MODEL)
    _, c = hf.model_of(kind)
    return {**{k: v for k, v in c.items() if k not in NEWER}, "torch_dtype": "float64",
            "rope_theta": c["rope_parameters"]["rope_theta"], **OWN[kind]}


def tensors_of(kind, dtype="F32", prefix=None):
    shapes = hf.gpt2_shapes(run.MODEL) if kind == "gpt2" else hf.model_of(kind)[0]
    head = "transformer." if kind == "gpt2" else "model."
    return {k if prefix is None else k.removeprefix(head): t
            for k, t in hf.random_tensors(shapes, dtype).items()}


def written(place, kind, dtype="F32", files=1, prefix=None, pad=b"", tensors=None,
            config=None, name="in"):
    """A folder of this type with random weights, and its program."""
    place.use(rows.program_of(kind))
    return hf.write(place.folder / name, tensors or tensors_of(kind, dtype, prefix),
                    config or config_of(kind), files, pad)


def model(folder, dtype="fp32", home=(3, "none", "none"), nvme=None, **more):
    return {**run.offload(*home, nvme), **run.typed(dtype),
            "model": {"import": str(folder), "seq": 16}, **more}


def test_an_export_is_what_transformers_reads(place):
    """Of a model that nobody has published; what it computes is in test_proof.py."""
    out = place.folder / "out"
    r = place.good(1, {**run.typed("bf16"), "run.export": str(out)})
    assert "exported step 3 to" in r.out
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    assert {k: t[1] for k, t in hf.read(out).items()} == hf.gpt2_shapes(run.MODEL)
    c, want = json.loads((out / "config.json").read_text()), config_of("gpt2")
    for key in ("architectures", "model_type", "n_layer", "n_head", "n_embd",
                "n_positions", "vocab_size", "activation_function",
                "layer_norm_epsilon"):
        assert c[key] == want[key], key
    assert c["tie_word_embeddings"] is True


# By ranks.
HOMES = {1: (3, "nvme", "nvme"), 2: (1, "cpu", "none"), 3: (3, "cpu", "cpu")}


@pytest.mark.parametrize("kind, dtype, ranks, files, prefix, pad", [
    ("gpt2", "fp16", 1, 1, None, b""), ("gpt2", "bf16", 2, 4, "", b" "),
    ("gpt2", "fp32", 3, 5, None, b"   "), ("llama", "bf16", 1, 1, None, b" "),
    ("llama", "fp32", 3, 4, "", b""), ("mistral", "fp16", 2, 3, None, b"   "),
    ("qwen2", "bf16", 1, 5, "", b""), ("qwen3", "fp16", 1, 2, None, b""),
    ("qwen3_moe", "bf16", 3, 4, None, b" "), ("mixtral", "fp32", 1, 1, "", b"")])
def test_untouched_tensors_come_back_bit_by_bit(kind, dtype, ranks, files, prefix,
                                                pad, place, nvme):
    """From one file or several, with prefix or without, at odd addresses, to any home;
    and config.json too, with what means nothing to this program."""
    folder = written(place, kind, TYPE[dtype], files, prefix, pad)
    out = place.folder / "a" / "b" / "out"
    most = 9000 if files > 1 else 5e9
    place.good(ranks, model(folder, dtype, HOMES[ranks], nvme, **{
        "run.steps": 0, "run.export": f"{out}/", "train_batch_size": 12,
        "run.export_shard_bytes": most}))
    assert hf.read(out) == tensors_of(kind, TYPE[dtype])
    assert (len(list(out.glob("*.safetensors"))) > 1) == (files > 1)
    for f in out.glob("*.safetensors"):
        tensors = hf.read_file(f).values()
        assert len(tensors) == 1 or sum(len(x[2]) for x in tensors) <= most
    text, c = (out / "config.json").read_text(), config_of(kind)
    got = json.loads(text)
    assert got["architectures"] == c["architectures"]
    want = {k: v for k, v in c.items() if k not in CHANGED}
    if kind != "gpt2" and want.get("head_dim") is None:
        want["head_dim"] = 8
    for key, value in want.items():
        assert got.get(key) == value, key
    assert got["torch_dtype"] == TORCH[dtype] and text.count('"torch_dtype"') == 1


@pytest.mark.sanitized
def test_what_means_nothing_may_be_there(place):
    """The head's second name, and the masks of old files."""
    plain = tensors_of("gpt2")
    t = {**plain, "lm_head.weight": plain["transformer.wte.weight"]}
    for i in range(run.MODEL["layers"]):
        t[f"transformer.h.{i}.attn.bias"] = ("U8", (1, 1, 16, 16), bytes(256))
        t[f"transformer.h.{i}.attn.masked_bias"] = ("F32", (), bytes(4))
    out = place.folder / "out"
    folder = str(written(place, "gpt2", files=2, tensors=t))
    r = place.good(1, {"model": {"import": folder}, "run.export": str(out)},
                   ["--steps", "0"])
    assert hf.read(out) == plain
    assert r.config["model"] == {**run.MODEL, "base_dtype": None, "import": folder}


def test_fewer_positions_than_published(place, nvme):
    """The first rows of the table, no other number changed; more are refused."""
    wide = {**run.MODEL, "seq": 21}
    tensors = hf.random_tensors(hf.gpt2_shapes(wide), "F32")
    folder = written(place, "gpt2", tensors=tensors, config=hf.gpt2_config(wide),
                     files=3)
    out = place.folder / "out"
    r = place.good(2, model(folder, home=(3, "nvme", "nvme"), nvme=nvme, **{
        "run.steps": 0, "run.export": str(out)}))
    name = "transformer.wpe.weight"
    kind, _, data = tensors[name]
    tensors[name] = (kind, (16, 24), data[:16 * ROW])
    assert hf.read(out) == tensors and r.config["model"]["seq"] == 16
    assert json.loads((out / "config.json").read_text())["n_positions"] == 16
    run.refused(place.launch(1, {**model(folder), "model.seq": 22}),
                "model.seq", "22", "21")


@pytest.mark.parametrize("kind, ranks", (("gpt2", 1), ("gpt2", 3), ("qwen3", 2)))
def test_more_tokens_than_published(kind, ranks, place):
    """Each row more is the mean of theirs, of embeddings and of a head; all else is as
    it came, and fewer are refused."""
    tensors, out = tensors_of(kind), place.folder / "out"
    folder = written(place, kind, tensors=tensors, files=2)
    r = place.good(ranks, model(folder, **{
        **STILL, "train_batch_size": 6, "model.vocab": 300, "run.export": str(out)}))
    assert "model.vocab: 300, the folder has 256 tokens" in r.out
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 300
    grown = 0
    for name, (dtype, shape, data) in hf.read(out).items():
        _, (n, *_), was = tensors[name]
        assert data[:len(was)] == was, name
        if shape[0] > n:
            grown += 1
            cols = shape[1]
            rows, more = array.array("f", was), array.array("f", data[len(was):])
            assert shape == (300, cols)
            for i in range(cols):
                mean = sum(rows[i::cols]) / 256
                assert all(abs(x - mean) < 1e-8 for x in more[i::cols]), name
    assert grown == (2 if "lm_head.weight" in tensors else 1)
    run.refused(place.launch(1, {**model(folder), "model.vocab": 255}),
                "model.vocab", "255", "256")


def test_a_router_of_one_expert_is_a_matrix(place):
    place.use(rows.program_of("mixtral"))
    out = place.folder / "out"
    place.good(1, {"model": {"preset": "tiny", "num_experts": 1,
                             "num_experts_per_tok": 1}, "run.export": str(out)})
    assert hf.read(out)["model.layers.1.block_sparse_moe.gate.weight"][1] == (1, 32)


# ---- what a run keeps of an import ----

def content(folder):
    """All of its files, byte by byte."""
    return {p.name: p.read_bytes() for p in folder.iterdir()}


# Files beside the weights that an export has too; the model's bytes are any.
BESIDE = {"tokenizer.json": b"{}", "tokenizer_config.json": b"{ }\n",
          "tokenizer.model": b"\0\1\n" * 50000, "generation_config.json": b"{}",
          "chat_template.jinja": "{{ \N{BULLET} }}".encode(), "merges.txt": b"",
          "modeling_own.py": b"# auto_map names it\n"}


def put_beside(folder):
    """One of them as the Hub's cache has it, and files that stay where they are."""
    for name, data in BESIDE.items():
        (folder / name).write_bytes(data)
    (folder / "blob").write_bytes(BESIDE["tokenizer.json"])
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("blob")
    (folder / "README.md").write_text("of theirs")


@pytest.mark.sanitized
def test_an_export_does_not_need_the_folder_any_more(place):
    """What it had beyond the model's own keys is in the run's output: by the
    tool, and at the end of a run that goes on without the folder."""
    folder, want = written(place, "qwen3"), place.folder / "want"
    put_beside(folder)
    r = place.good(1, model(folder, **{"run.save": True, "run.steps": 2,
                                       "run.export": str(want)}))
    kept = content(r.output / "imported")
    assert kept == {**BESIDE, "config.json": (folder / "config.json").read_bytes()}
    assert content(want).items() >= BESIDE.items() and "tokenizer" not in r.out
    assert set(content(want)) == {*kept, "model.safetensors"}
    eos = json.loads((want / "config.json").read_text())["eos_token_id"]
    assert eos == config_of("qwen3")["eos_token_id"]
    ckpt("export", r.output, "--out", place.folder / "again")
    config = r.config
    shutil.rmtree(folder)
    assert not ckpt("export", r.output, "--out", place.folder / "gone").err
    del config["model"]["import"]
    config["run"]["export"] = str(place.folder / "resumed")
    place.as_it_is(config, ["--resume"])
    for name in ("again", "gone", "resumed"):
        assert content(place.folder / name) == content(want), name


@pytest.mark.sanitized
def test_an_export_that_would_lose_keys_is_refused(place):
    """Of a run that kept nothing; {} in its place says that they may go."""
    folder = written(place, "qwen3")
    r = place.good(1, model(folder, **{"run.save": True, "run.steps": 1}))
    kept, out = r.output / "imported/config.json", place.folder / "lost"
    kept.unlink()
    ckpt("export", r.output, "--out", place.folder / "there")
    shutil.rmtree(folder)
    for text in (None, "["):
        if text:
            kept.write_text(text)
        p = ckpt("export", r.output, "--out", out, rc=1)
        assert str(kept.parent) in p.err and not out.exists()
    kept.write_text("{}")
    told = ckpt("export", r.output, "--out", out).out
    assert "eos_token_id" not in json.loads((out / "config.json").read_text())
    assert "lost has no tokenizer" in told
    # Another model's run in the same place does not inherit them.
    shutil.rmtree(r.output / "checkpoints")
    r = place.good(1, {"model": {"preset": "tiny"}, "run.export": str(out / "x")},
                   output=r.output)
    assert not kept.exists()
    assert "lost/x has no tokenizer" in r.out
    # What is no file of ours is not removed, and what cannot be read not left out.
    kept.parent.mkdir()
    (kept.parent / "mine").touch()
    r = place.launch(1, {"model": {"preset": "tiny"}}, output=r.output)
    run.refused(r, "run.output", "imported", "mine")
    folder = written(place, "qwen3", name="other")
    (folder / "vocab.json").mkdir()
    run.refused(place.launch(1, model(folder)), "vocab.json", "cannot read")


def test_an_import_is_resumed_without_its_folder(place):
    """Once there is a checkpoint, the folder only says the shape."""
    folder = written(place, "gpt2")
    c = model(folder, **{"run.save": True, "run.steps": 4})
    whole = place.good(1, c)
    out = place.good(1, {**c, "run.steps": 2}).output
    (folder / "model.safetensors").unlink()
    assert place.good(1, c, ["--resume"], output=out).numbers == whole.numbers


# ---- refusals ----

ROW = 4 * 24  # bytes of a row in fp32
# Tensors that are changed, or missing; what is said.
WRONG = {"transformer.h.1.ln_1.bias": None, "transformer.ln_f.weight": None,
         "transformer.wpe.weight": ("F32", (17, 24), bytes(17 * ROW)),
         "transformer.h.0.attn.c_attn.weight": ("F32", (72, 24), bytes(72 * ROW)),
         "transformer.h.2.ln_1.weight": ("F64", (24,), bytes(2 * ROW)),
         "transformer.h.9.ln_1.weight": ("F32", (24,), bytes(ROW)),
         "score.weight": ("F32", (2, 24), bytes(2 * ROW))}
SAID = (["missing"], ["missing"], ["[17, 24]", "[16, 24]"], ["[72, 24]", "[24, 72]"],
        ["F64"], ["no tensor"], ["no tensor"])


def test_all_wrong_tensors_are_listed(place):
    t = {k: x for k, x in {**tensors_of("gpt2"), **WRONG}.items() if x}
    folder = written(place, "gpt2", tensors=t)
    r = place.launch(2, model(folder))
    for name, words in zip(WRONG, SAID):
        run.refused(r, "model.import", name, *words)
    run.refused(r, "model.import", str(folder), "7 faults")


@pytest.mark.parametrize("ranks, dtype, bits", [
    (1, "F32", b"\0\0\xc0\x7f"), (2, "BF16", b"\x80\xff"), (1, "F16", b"\0\x7c")])
def test_what_is_not_finite_is_refused(ranks, dtype, bits, place):
    """In the last element of a tensor that is transposed, and of one that is not;
    NaN and both infinities."""
    for kind, name in (("gpt2", "transformer.h.2.mlp.c_fc.weight"),
                       ("llama", "model.layers.1.self_attn.k_proj.weight")):
        t = tensors_of(kind, dtype)
        t[name] = (*t[name][:2], t[name][2][:-len(bits)] + bits)
        folder = written(place, kind, tensors=t, name=kind)
        r = place.launch(ranks, {**model(folder), "train_batch_size": 4})
        run.refused(r, "model.import", name, "not finite")
        assert not r.steps


# A config of a type with changes, beside settings: what is said of it, if it is
# refused.
SCALING, PARAMETERS = "rope_scaling", "rope_parameters"
CONFIGS = [
    ("gpt2", {"n_layer": 4, "vocab_size": 512}, {"model.layers": 5, "model.vocab": 256},
     [["model.layers", "5", "4", "config.json"], ["model.vocab", "256", "512"]]),
    ("gpt2", {"n_ctx": 8, "model_type": "llama", "activation_function": "relu",
              "layer_norm_epsilon": 0.25}, {},
     [["n_ctx", "8", "n_positions"], ["model_type", "llama", "gpt2"],
      ["activation_function", "relu"], ["layer_norm_epsilon", "0.25", "1e-05"]]),
    ("gpt2", {"n_head": ..., "vocab_size": ...}, {},
     [["in/config.json", "n_head", "missing"], ["vocab_size", "missing"]]),
    ("gpt2", {"n_head": None}, {}, [["in/config.json: n_head", "null"]]),
    ("gpt2", {"n_embd": "24"}, {}, [["in/config.json: n_embd", "24"]]),
    ("qwen2", {}, {"model.qkv_bias": False}, [["model.qkv_bias", "config.json"]]),
    ("qwen2", {"use_sliding_window": True}, {}, [["use_sliding_window"]]),
    ("mistral", {"sliding_window": None}, {}, None),
    ("llama", {"partial_rotary_factor": 0.5, "hidden_act": "gelu", "model_type": "rwkv"},
     {}, [["partial_rotary_factor"], ["hidden_act"], ["model_type"]]),
    ("llama", {"hidden_size": None}, {}, [["in/config.json: hidden_size"]]),
    *(("llama", {SCALING: theirs}, {}, words) for theirs, words in (
        ({"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}, [["mscale"]]),
        ({"type": "dynamic", "factor": 2.0}, [["rope_scaling.factor", "yarn"]]),
        ({"type": "linear", "factor": 2.0, "beta_fast": 16}, [["beta_fast", "yarn"]]),
        ({"factor": 2.0}, [["rope_scaling.factor"]]),
        ({"rope_type": "default", "factor": 2.0}, [["rope_scaling.factor"]]),
        ({"type": "llama3", "factor": 2.0, "high_freq_factor": 4.0},
         [["low_freq_factor", "missing"]]),
        ({"type": "llama3", "rope_type": "default"}, [["rope_scaling.type", "llama3"]]),
        ({"rope_type": "default", "rope_theta": 5e5}, [["rope_theta", "500000"]]),
        ({"rope_type": "default", "rope_theta": 10000}, None))),
    *(("llama", {SCALING: None, PARAMETERS: theirs}, {}, words) for theirs, words in (
        ({"factor": 2.0}, [["rope_parameters.factor"]]),
        ({"rope_type": "yarn"}, [["rope_parameters.factor"]]),
        ({"type": "longrope"}, [["longrope"]]))),
    ("llama", {PARAMETERS: {"rope_type": "default"}}, {},
     [["rope_parameters is", "not rope_scaling"]]),
    ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, {},
     [["layer_types", "sliding"]]),
    ("mistral", {"sliding_window": 0}, {}, [["sliding_window is 0", "null"]]),
    ("llama", {"model_type": "deepseek_v3"}, {},
     [["model_type", "deepseek_v3", "latent attention"]]),
    ("mistral", {"model_type": ...}, {}, [["model_type is missing", "mistral"]]),
    ("gpt2", {"model_type": ...}, {}, [["model_type is missing", "gpt2"]]),
    ("llama", {"max_position_embeddings": 15}, {}, [["context"]]),
    ("llama", {}, {"model.seq": 1024}, [["model.seq: 1024", "model.context, 64"]]),
    ("qwen3", {"head_dim": 5}, {}, [["head_dim"]])]


@pytest.mark.parametrize("kind, change, settings, faults", CONFIGS)
def test_a_config_that_computes_something_else_is_refused(kind, change, settings,
                                                          faults, place):
    folder = written(place, kind)
    c = {k: v for k, v in {**config_of(kind), **change}.items() if v is not ...}
    (folder / "config.json").write_text(json.dumps(c))
    r = place.launch(1, {**model(folder), "run.steps": 1, **settings})
    if faults is None:
        assert r.rc == 0, str(r)
        return
    assert r.rc == 1 and not r.steps and not run.DUMPS.search(r.out + r.err), str(r)
    for words in faults:
        assert [x for x in r.err.splitlines() if all(w in x for w in words)], str(r)


@pytest.mark.parametrize("kind, change, said", [
    ("llama", {"logits_scaling": 8.0, "x": None, "residual_multiplier": 0.2},
     "config.json: keys that are not read: logits_scaling, residual_multiplier\n"),
    ("mixtral", {"output_router_logits": False}, "output_router_logits is not true"),
    ("qwen3_moe", {"output_router_logits": True, "eos_token_id": 3}, None),
    ("gpt2", {"n_positions": 16}, None)])
def test_what_is_not_read_is_told(kind, change, said, place):
    folder = written(place, kind, config={**config_of(kind), **change})
    r = place.launch(1, model(folder), ["--plan"])
    assert r.rc == 0 and (said in r.out if said else "model.import: " not in r.out), str(r)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
LFS, FAR = "is a Git LFS pointer", "has a vocabulary of 256"
# A file beside the weights: its bytes (None: a link that leads nowhere), what is said.
FILES = [
    ("tokenizer.json", POINTER, [LFS]), ("model.safetensors", POINTER, [LFS]),
    ("config.json", POINTER, [LFS]), ("config.json", b"{", ["not a JSON object"]),
    ("config.json", b'{"a": -Infinit}', ["line 1, invalid token near '-'"]),
    ("config.json", b'{"a": Infinity,\n"b": }', ["line 2, unexpected token near '}'"]),
    ("generation_config.json", None, ["cannot read"]),
    ("tokenizer.json", b'{"model": {"vocab": {"a": 0, "b\\n": 256}}}', ['"b?" is 256', FAR]),
    ("tokenizer.json", b'{"added_tokens": [{"id": 400, "content": "x"}]}', ['"x" is 400']),
    ("tokenizer.json", json.dumps({"model": {"vocab": [[f"{i}", 0.0] for i in range(
        257)]}}).encode(), ['"256" is 256']),
    ("vocab.json", b'{"a": 300}', ['"a" is 300']),
    ("tokenizer_config.json", b'{"model_max_length": 1000000000000000019884624838656,'
     b' "added_tokens_decoder": {"256": {"content": "p"}}}', ['"p" is 256'])]


@pytest.mark.parametrize("name, data, said", FILES)
def test_a_file_that_is_another_is_refused(name, data, said, place):
    path = written(place, "llama") / name
    path.unlink(missing_ok=True)
    path.write_bytes(data) if data else path.symlink_to("nothing")
    r = place.launch(2, model(path.parent))
    run.refused(r, name, *said)
    assert not r.steps


def test_data_that_is_a_pointer_is_refused(place):
    data = place.folder / "data"
    data.write_bytes(POINTER * 20)
    run.refused(place.launch(1, {"data.path": str(data)}), "data: ", LFS)


@pytest.mark.sanitized
def test_a_folder_without_weights_or_with_damaged_ones_is_named(place):
    run.refused(place.launch(1, model(place.folder / "none")),
                "none/config.json", "No such file")
    folder = written(place, "gpt2", files=2)
    file = folder / "model-00002-of-00002.safetensors"
    data = file.read_bytes()
    for left, words in ((data[:-1], "truncated"), (data[:7], "not safetensors"),
                        (b"", "not safetensors"), (None, "No such file")):
        file.unlink() if left is None else file.write_bytes(left)
        run.refused(place.launch(1, model(folder)), file.name, words)
    (folder / "model.safetensors.index.json").unlink()
    run.refused(place.launch(1, model(folder)), str(folder), "has neither")
