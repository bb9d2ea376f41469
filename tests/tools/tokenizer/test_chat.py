# SPDX-License-Identifier: Apache-2.0
"""Conversations are what a model's own template makes of them, and the answers are
learnt.  The templates have the shapes of eight public families."""
import datetime
import json
import os
import pathlib
import re
import subprocess

import pytest

from place import HERE, flat, jsonl, read_mask, shards

from tokenizing import chat, tokens

pytest.importorskip("jinja2")
TURNS = [{"role": "user", "content": "Who? "}, {"role": "assistant", "content": "He. "},
         {"role": "user", "content": "When?"}, {"role": "assistant", "content": "Then \u00e9\u4f60"}]
SYSTEM = [{"role": "system", "content": "Be brief."}]
TOOL = {"type": "function", "function": {"name": "when", "description": "<a> & b \u00e9",
        "parameters": {"type": "object", "properties": {"day": {"type": "string"}}}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "when", "arguments": {"day": "M\u00e4rz"}}}]}
CALLS = [TURNS[0], CALL, {"role": "tool", "content": "13"}, TURNS[1]]
THOUGHT = [*TURNS[:3], {**TURNS[3], "reasoning": "Hm."}]
IM = ["<|im_start|>", "<|im_end|>"]
# Template: special tokens, begin, end; conversations with what a record gives besides.
FAMILIES = {
    "chatml": (IM, None, "<|im_end|>", [(SYSTEM + TURNS, {})]),
    "llama3": (["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
               "<|begin_of_text|>", "<|eot_id|>",
               [(SYSTEM + TURNS, {"date_string": "1 Jan"}), (CALLS, {"date_string": "2"})]),
    "qwen3": (IM, None, "<|im_end|>", [
        (THOUGHT, {}), (CALLS, {"tools": [TOOL]}), (TURNS[:2], {"enable_thinking": False})]),
    "gemma": (["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<eos>", [
        (SYSTEM + TURNS, {}),
        ([{"role": "user", "content": [{"type": "text", "text": "Who?"}]}, TURNS[1]], {})]),
    "mistral": (["<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
                "<s>", "</s>", [(TURNS, {}), (TURNS, {"tools": [TOOL]})]),
    "phi3": (["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"],
             None, "<|endoftext|>", [(SYSTEM + TURNS, {})]),
    "gpt-oss": (["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>"],
                None, "<|return|>", [(THOUGHT, {"reasoning_effort": "low"}),
                                     (TURNS[:2], {"tools": [TOOL]})]),
    "deepseek": (["<s>", "</s>", "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"], "<s>", "</s>", [
        (SYSTEM + TURNS[:1] + [{"role": "assistant", "content": "<think>a</think>So."}] +
         TURNS[2:], {})]),
}


def model(place, name):
    """A folder with a small tokenizer that has the tokens of a template."""
    return folder(place, *FAMILIES[name][:3], (HERE / f"templates/{name}.jinja").read_text())


def folder(place, special, begin, end, template):
    def change(spec):
        add = spec["added_tokens"]
        for s in special:
            if s not in [a["content"] for a in add]:
                add.append({**add[0], "id": add[-1]["id"] + 1, "content": s})
    path = place.tokenizer("qwen2", change)
    (path.parent / "chat_template.jinja").write_text(template)
    (path.parent / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin,
         "eos_token": {"__type": "AddedToken", "content": end}}))
    return path


def rendered(path, messages, given, learnt_from=0):
    """Text in which what is learnt stands in brackets; ids, their mask; answers that
    are not learnt, and that begin otherwise."""
    one = tokens.open_tokenizer(str(path), False)
    found = chat.open_templates(one, str(path), None)
    text, spans, other, unlike = found.text(messages, learnt_from, given)
    marked, at = "", 0
    for start, end in spans:
        marked += text[at:start] + "[[" + text[start:end] + "]]"
        at = end
    return marked + text[at:], *map(list, one.chat(text, spans)), [len(other), unlike]


def cases():
    return [(name, i) for name, family in FAMILIES.items() for i in range(len(family[3]))]


def today(text):
    return text.replace(datetime.date.today().isoformat(), "TODAY")


def test_answers_are_learnt_as_templates_write_them(place):
    """Where a template writes an old answer otherwise, not: its text would not be what
    is generated."""
    golden = json.loads((HERE / "templates/golden.json").read_text())
    for name, i in cases():
        path = model(place, name)
        marked, ids, mask, told = rendered(path, *FAMILIES[name][3][i])
        assert [today(marked), *told] == golden[name][i]
        one = tokens.open_tokenizer(str(path), True)
        assert one.text(ids).decode() == marked.replace("[[", "").replace("]]", "")
        assert one.text([t for t, m in zip(ids, mask) if m]).decode() == "".join(
            part.partition("]]")[0] for part in marked.split("[[")[1:])
        for s in FAMILIES[name][0]:
            assert ids.count(one.find(s)) == marked.count(s)


THEIRS = """
import importlib.util, json, pathlib, sys, transformers
out = []
for folder, messages, given, marked in json.load(sys.stdin):
    t = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    try:
        found = t.apply_chat_template(messages, return_dict=True,
                                      return_assistant_tokens_mask=marked, **given)
        out.append([found["input_ids"], found["assistant_masks"] if marked else None])
    except Exception:
        out.append(None)
print(json.dumps(out))
"""
TRL = "import importlib.util as u; print(*u.find_spec('trl').submodule_search_locations)"


def public(python):
    """The templates that the package trl has, by name."""
    r = subprocess.run([python, "-c", TRL], text=True, capture_output=True)
    files = pathlib.Path(r.stdout.strip(), "chat_templates").glob("*.jinja") \
        if r.returncode == 0 else ()
    return {f.stem: f.read_text() for f in files}


def test_ids_and_marks_are_those_of_transformers(place):
    """Of the templates here, and of the public ones that TRL has, some of which refuse a
    system's or a tool's message."""
    python = os.environ.get("IZ_TEST_PYTHON")
    if not python or subprocess.run([python, "-c", "import transformers, jinja2"]).returncode:
        pytest.skip("IZ_TEST_PYTHON: a Python with transformers and jinja2")
    asked = [[model(place, name), *FAMILIES[name][3][i], name == "chatml"]
             for name, i in cases()]
    for text in public(python).values():
        path = folder(place, [*set(re.findall("<[|\uff5c][^<> \n]*[|\uff5c]>", text)), "<s>", "</s>"],
                      "<s>", "</s>", text)
        asked += [[path, *talk, re.search(r"\{%-?\s*generation", text) is not None]
                  for talk in ((SYSTEM + TURNS, {}), (THOUGHT, {}), (CALLS, {"tools": [TOOL]}))]
    ours = []
    for path, messages, given, marked in asked:
        try:
            _, ids, mask, _ = rendered(path, messages, given)
            ours.append([ids, mask if marked else None])
        except chat.Faulty:
            ours.append(None)
    r = subprocess.run([python, "-c", THEIRS], text=True, capture_output=True,
                       input=json.dumps([[str(a[0].parent), *a[1:]] for a in asked]))
    assert r.returncode == 0, r.stderr
    assert json.loads(r.stdout) == ours and None not in ours[:len(cases())]


# ---- through the program ----

TALK = jsonl([{"messages": TURNS}])
SAYS = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("beside, options, words", [
    ({}, (), ["need a chat template"]),
    ({}, ("--chat", "llama3"), ["llama3 is neither a file", "none", "are gone"]),
    ({"chat_template.jinja": "{% for %}"}, (), ["the chat template default: line 1"]),
    ({"chat_template.jinja": b"\xff"}, (), ["chat_template.jinja: ", "decode byte"]),
    ({"chat_template.jinja": "{{ raise_exception('not so') }}"}, (),
     ["t.jsonl, line 1", "not so"]),
    ({"chat_template.jinja": "{{ messages.append(1) }}"}, (), ["line 1", "unsafe"]),
    ({"chat_template.jinja": SAYS}, ("--begin", "a"), ["--begin: the template"]),
    ({"tokenizer_config.json": "[]"}, (), ["no object"]),
    ({"tokenizer_config.json": '{"chat_template": [1]}'}, (), ["neither a text nor"]),
    ({"additional_chat_templates/rag.jinja": SAYS}, (), ["templates rag: choose one"])])
def test_what_is_wrong_with_a_template_is_named(beside, options, words, place):
    path = place.tokenizer("qwen2")
    for name, text in beside.items():
        (path.parent / name).parent.mkdir(exist_ok=True)
        (path.parent / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    place.refuse(path, TALK, *options, name="t.jsonl", words=words)


def test_templates_are_chosen_as_transformers_does(place):
    """tool_use where there are tools; others by name, or a file.  Where there are files
    of templates, those of the configuration do not count."""
    path = place.tokenizer("qwen2")
    (path.parent / "tokenizer_config.json").write_text(json.dumps({"chat_template": [
        {"name": n, "template": f"{n} {SAYS}"} for n in ("default", "tool_use")]}))
    (path.parent / "own.jinja").write_text("own " + SAYS)
    talk = {"messages": TURNS}
    for record, options, want in (
            (talk, (), "default"), ({**talk, "tools": [TOOL]}, (), "tool_use"),
            ({**talk, "chat_template_kwargs": {"tools": [TOOL]}}, (), "tool_use"),
            ({**talk, "tools": json.dumps([TOOL])}, (), "tool_use"),
            (talk, ("--chat", "tool_use"), "tool_use"),
            (talk, ("--chat", path.parent / "own.jinja"), "own")):
        out = place.encode(path, {"t.jsonl": jsonl([record])}, *options)
        said = tokens.open_tokenizer(str(path), True).text(flat(shards(out))).decode()
        assert said == want + " Who? He. When?Then \u00e9\u4f60"
    assert flat(shards(out, ending="mask", read=read_mask)).count(1) > 5
    (path.parent / "additional_chat_templates").mkdir()
    (path.parent / "additional_chat_templates/rag.jinja").write_text("rag " + SAYS)
    place.encode(path, {"t.jsonl": jsonl([talk])}, "--chat", "rag")
    place.refuse(path, jsonl([talk]), name="t.jsonl", words=["the templates rag: choose"])


def test_old_names_of_tokens_win_unless_the_configuration_has_all_tokens(tmp_path):
    """As in transformers."""
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "old"}}')
    for config, want in (({}, "old"), ({"added_tokens_decoder": {}}, "new")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "new", **config}))
        assert chat.folder_has(tmp_path)[1] == {"eos_token": want}


def test_an_old_answer_gets_a_document_of_its_own(place):
    """Of which it is the end, as the template writes it there."""
    path = model(place, "qwen3")
    talk = {"t.jsonl": jsonl([{"messages": THOUGHT + TURNS[:2]}])}
    one = tokens.open_tokenizer(str(path), True)

    def learnt(*options):
        out = place.encode(path, talk, *options)
        ids, mask = flat(shards(out)), flat(shards(out, ending="mask", read=read_mask))
        return one.text([t for t, m in zip(ids, mask) if m]).decode()

    thought, end = "<think>\n{}\n</think>\n\n{}<|im_end|>", ""
    last, first, second = (thought.format(*x) for x in (
        (end, "He. "), (end, "He. "), ("Hm.", "Then \u00e9\u4f60")))
    assert learnt() == last and "2 times, first" in place.said
    assert learnt("--unroll") == last + first + second and "times" not in place.said
    assert "3 documents" in place.said


def test_a_message_cannot_forge_a_token(place):
    path = model(place, "phi3")
    bad = jsonl([{"messages": [{**TURNS[0], "content": "Who?<|end|>"}, TURNS[1]]}])
    place.refuse(path, bad, name="t.jsonl", words=["line 1", "<|end|> in a message"])
    for more in ({"tools": [{"<|end|>": 1}]}, {"chat_template_kwargs": {"a": "<|end|>"}}):
        place.refuse(path, jsonl([{"messages": TURNS[:2], **more}]), name="t.jsonl",
                     words=["line 1", "<|end|> in a message"])
    out = place.encode(path, {"t.jsonl": bad}, "--special")
    end = tokens.open_tokenizer(str(path), True).find("<|end|>")
    assert flat(shards(out)).count(end) == 3


def test_half_a_pair_of_surrogates_is_named_or_left_out(place):
    half = jsonl([{"messages": [{**TURNS[0], "content": "\ud800"}, TURNS[1]]}])
    path = model(place, "phi3")
    place.refuse(path, half, name="t.jsonl", words=["line 1", "surrogates"])
    place.encode(path, {"t.jsonl": half + jsonl([{"messages": TURNS[:2]}])}, "--skip-bad")
    assert "1 faulty" in place.said
