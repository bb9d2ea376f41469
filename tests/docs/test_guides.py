# SPDX-License-Identifier: Apache-2.0
"""The commands of "Fine-tune Gemma 3", "Fine-tune gpt-oss" and "A 70B on a desktop" in
docs/finetune.md, with small models in the place of the downloads; of Gemma one of text,
and one that sees images."""
import json
import os
import re
import sys

import pytest

from test_adding import BUILD, ROOT, check

sys.path[:0] = [str(ROOT / "tests/runtime/hf"), str(ROOT / "tests/e2e/hf")]
import families  # noqa: E402
import folder as hf  # noqa: E402

PYTHON = os.environ.get("IZ_TEST_PYTHON")
SPECIAL = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<image_soft_token>")
HARMONY = ("<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|channel|>",
           "<|message|>", "<|endoftext|>")
MARKS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
         "<|eot_id|>")
VOCAB = 256 + len(SPECIAL) - 1  # without the last one, as the 1B has it


def blocks(title):
    text = (ROOT / "docs/finetune.md").read_text().partition(f"\n## {title}\n")[2]
    return re.findall(r"```(?:sh|python)\n(.*?)```", text.partition("\n## ")[0], re.S)


def template_of(name):
    return (ROOT / f"tests/tools/tokenizer/templates/{name}.jinja").read_text()


def write_tokenizer(path, special, template, inside=False):
    """Of bytes, and these tokens; the template is in a file of its own or in the config."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    t = tokenizers.Tokenizer(tokenizers.models.BPE(
        {x: i for i, x in enumerate(alphabet)}, []))
    t.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = tokenizers.decoders.ByteLevel()
    t.add_special_tokens(list(special))
    t.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({
        "bos_token": special[0], "eos_token": special[1],
        "tokenizer_class": "PreTrainedTokenizerFast",
        **({"chat_template": template} if inside else {})}))
    if not inside:
        (path / "chat_template.jinja").write_text(template)
        (path / "additional_chat_templates").mkdir()
        (path / "additional_chat_templates/short.jinja").write_text("{{ messages[0].content }}")
    (path / "generation_config.json").write_text(json.dumps(
        {"eos_token_id": [257, 259], "bos_token_id": 256, "max_new_tokens": 8}))


def write_models(path):
    """Of text; and the same one that has eyes, as they lie there."""
    shapes, config = hf.model_of("gemma3_text", {256: VOCAB}, eos_token_id=[257, 259])
    tensors = families.tensors(shapes, 1)
    hf.write(path / "gemma-3", tensors, config)
    eyes = {"vision_tower.patch.weight": ("F32", (2, 2), bytes(16)),
            "multi_modal_projector.norm.weight": ("F32", (2,), bytes(8))}
    hf.write(path / "gemma-3-4b",
             {**{"language_model." + k: t for k, t in tensors.items()}, **eyes},
             {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
              "text_config": {k: v for k, v in config.items() if k != "eos_token_id"},
              "eos_token_id": [257, 259], "vision_config": {"hidden_size": 2}})
    for name in "gemma-3", "gemma-3-4b":
        write_tokenizer(path / name, SPECIAL, template_of("gemma"))
    return tensors


@pytest.fixture(name="bash")
def bash_of(tmp_path):
    """Runs lines where conversations and all programs are."""
    talk = {"messages": [{"role": "user", "content": "What is two and two?"},
                         {"role": "assistant", "content": "It is four. " * 2}]}
    (tmp_path / "chat.jsonl").write_text((json.dumps(talk) + "\n") * 40)
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / "build").symlink_to(BUILD)
    desktop = json.loads((ROOT / "configs/llama-3-70b-nf4.json").read_text())
    desktop["model"] = {"seq": 32, "base_dtype": desktop["model"]["base_dtype"]}
    desktop["run"].update(steps=3, device="cpu")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/llama-3-70b-nf4.json").write_text(json.dumps(desktop))

    def bash(script):
        small = re.sub("^hf download .*\n", "", script).replace("2048", "64").replace('"steps": 300', '"steps": 3')
        return check("bash", "-ec", small, cwd=tmp_path, STARPU_HOME=str(tmp_path),
                     STARPU_SILENT="1")
    return bash


def test_the_commands_fine_tune_a_small_one(tmp_path, bash):
    first, full, python, text = blocks("Fine-tune Gemma 3")
    assert first.startswith("hf download ")
    before = write_models(tmp_path / "models")
    out = bash(first)
    assert "models/gemma-3 can be imported" in out and "not read" not in out, out
    assert "step 3/3" in out and "step 3/3" in bash(full)
    assert "alone is read" in bash(text)
    assert "lora.export: models/gemma-3-4b is a model of text and images" in bash(
        "! build/models/llama gemma-3.json --set model.import=models/gemma-3-4b "
        "--set run.output=runs/eyes --set run.export=models/eyes")
    after = {k: hf.read(tmp_path / "models" / k) for k in
             ("mine", "mine-full", "gemma-3-text")}
    for name, tensors in after.items():
        assert {k: t[1] for k, t in tensors.items()} == \
            {k: t[1] for k, t in before.items()}, name
        for kept in "chat_template.jinja", "additional_chat_templates/short.jinja", \
                "generation_config.json", "tokenizer.json":
            assert (tmp_path / "models" / name / kept).read_bytes() == \
                (tmp_path / "models/gemma-3" / kept).read_bytes()
    for k, (_, shape, bf16) in after["gemma-3-text"].items():  # half of what fp32 has
        assert len(shape) == 1 or bf16[1::2] == before[k][2][3::4], k
    written = json.loads((tmp_path / "models/gemma-3-text/config.json").read_text())
    assert written["model_type"] == "gemma3_text" and \
        written["eos_token_id"] == [257, 259] and "vision_config" not in written
    if PYTHON:
        print(check(PYTHON, "-c", python, cwd=tmp_path))


def gpt_oss():
    shapes, config = hf.model_of("gpt_oss", {256: 256 + len(HARMONY)})
    return families.tensors(shapes, 1), config


def llama():
    shapes, c = hf.model_of("llama", {256: 272})
    return hf.random_tensors(shapes, "BF16"), c


@pytest.mark.parametrize("title, name, mine, model, special, template, targets", (
    ("Fine-tune gpt-oss", "gpt-oss", "harmony", gpt_oss, HARMONY,
     template_of("gpt-oss"), r"\.self_attn\."),
    ("A 70B on a desktop", "llama-3-70b", "mine", llama, MARKS, template_of("llama3"), "proj")))
def test_the_commands_fine_tune_one_in_4_bits(title, name, mine, model, special, template,
                                              targets, tmp_path, bash):
    commands, = blocks(title)
    before, config = model()
    models = tmp_path / "models"
    hf.write(models / name, before, config)
    write_tokenizer(models / name, special, template, inside=True)
    out = bash(commands)
    assert "are in nf4" in out and "step 3/3" in out
    assert (f"models/{name} can be imported" in out) == ("ckpt check" in commands)
    after = hf.read(models / mine)
    assert {k: t[1] for k, t in after.items()} == {k: t[1] for k, t in before.items()}
    told = json.loads((models / mine / "tokenizer_config.json").read_text())
    assert told["chat_template"] == template
    adapter = hf.read_file(models / f"{mine}-adapter/adapter_model.safetensors")
    assert adapter and all(re.search(targets, k) for k in adapter)
    told = json.loads((models / f"{mine}-adapter/adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == f"models/{name}"
