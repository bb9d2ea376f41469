# SPDX-License-Identifier: Apache-2.0
"""The commands of "A 70B on a desktop" in docs/finetune.md, with a small model in the
place of the download."""
import json
import re
import sys

from test_adding import BUILD, ROOT, check
from test_guides import save_tokenizer

sys.path.insert(0, str(ROOT / "tests/runtime/hf"))
import folder as hf  # noqa: E402

SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
           "<|end_of_text|>")
TEMPLATE = """{% set start = '<|start_header_id|>' %}{% set end = '<|end_header_id|>\n\n' %}\
<|begin_of_text|>{% for m in messages %}{{ start + m.role + end + m.content | trim }}<|eot_id|>\
{% endfor %}{% if add_generation_prompt %}{{ start + 'assistant' + end }}{% endif %}"""
SMALL = {"hidden_size": 48, "head_dim": 8, "intermediate_size": 72, "rope_theta": 5e5,
         "vocab_size": 272, "rope_scaling": None}


def commands():
    text = (ROOT / "docs/finetune.md").read_text().partition("## A 70B on a desktop")[2]
    block = re.search(r"```sh\n(.*?)```", text, re.S)[1]
    return block.replace("\\\n", " ").splitlines()


def write_model(path):
    """With a tokenizer of bytes, and Llama 3's marks and template."""
    c = hf.llama_config("llama", **SMALL)
    tensors = hf.random_tensors(hf.llama_shapes(c), "BF16")
    hf.write(path, tensors, c)
    save_tokenizer(path, SPECIAL)
    (path / "tokenizer_config.json").write_text(json.dumps(
        {"eos_token": SPECIAL[-1], "chat_template": TEMPLATE}))
    return tensors


def test_the_commands_fine_tune_a_small_one(tmp_path):
    first, *rest = commands()
    assert first.startswith("hf download ")
    before = write_model(tmp_path / "models/llama-3-70b")
    talk = {"messages": [{"role": "user", "content": "What is two and two?"},
                         {"role": "assistant", "content": "It is four. " * 4}]}
    (tmp_path / "chat.jsonl").write_text((json.dumps(talk) + "\n") * 40)
    c = json.loads((ROOT / "configs/llama-3-70b-nf4.json").read_text())
    assert {k for k in c["model"]} == {"layers", "heads", "kv_heads", "width", "ffn",
                                       "vocab", "rope_theta", "seq", "base_dtype"}
    c["model"] = {"seq": 32, "base_dtype": "nf4"}
    c["run"].update(steps=3, device="cpu")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/llama-3-70b-nf4.json").write_text(json.dumps(c))
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / "build").symlink_to(BUILD)
    out = [check("bash", "-c", line, cwd=tmp_path, STARPU_HOME=str(tmp_path),
                 STARPU_SILENT="1") for line in rest]
    assert "are in nf4" in out[2] and "step 3/3" in out[3]
    adapter = json.loads((tmp_path / "models/mine-adapter/adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "models/llama-3-70b"
    mine = tmp_path / "models/mine"
    assert {p.name for p in mine.iterdir()} >= {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    after = hf.read(mine)
    assert {k: t[:2] for k, t in after.items()} == {k: t[:2] for k, t in before.items()}
    same = {k for k in after if after[k] == before[k]}
    assert {k for k in after if "proj" in k}.isdisjoint(same) and len(same) > 3
