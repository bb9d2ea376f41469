# SPDX-License-Identifier: Apache-2.0
"""Conversations as text, by the chat template that a model's folder has, and which of
that text is to be learnt.  A template gets what transformers gives it."""
import datetime
import json
import os.path
import pathlib

from tokenizing.shards import Refused, map_file
from tokenizing.tokens import package

# Around what {% generation %} has; noncharacters, which no text has.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
LONGEST = 64  # characters of a special token
# What transformers gives a template under the first two names.
REASONING = ("reasoning_content", "thinking", "reasoning")


class Faulty(Exception):
    """What a template does not take."""


# ---- a folder's templates ----

def read_text(path, encoding="utf-8-sig"):
    try:
        return bytes(map_file(str(path))).decode(encoding)
    except ValueError as e:
        raise Refused(f"{path}: {e}") from e


def read_json(path):
    try:
        found = json.loads(read_text(path, "utf-8"))
    except ValueError as e:
        raise Refused(f"{path}: {e}") from e
    if not isinstance(found, dict):
        raise Refused(f"{path} is no object")
    return found


def folder_has(folder):
    """Its templates by name, and what they call the tokens."""
    config, marks = {}, {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).exists() and "added_tokens_decoder" not in config:
            config |= read_json(folder / name)
    for name, value in config.items():
        value = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(value, str):
            marks[name] = value
    files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: read_text(path) for name, path in files.items()}, marks
    found = config.get("chat_template") or {}
    try:
        found = {"default": found} if isinstance(found, str) else \
            {t["name"]: t["template"] for t in found}
    except (KeyError, TypeError) as e:
        raise Refused(f"{folder}: chat_template is neither a text nor a list of names "
                      "with templates") from e
    return found, marks


def open_templates(tokenizer, name, chat):
    """Of the folder of the tokenizer called `name`, those that a record may choose
    from; chat: a file, or the name of one of them; None: as transformers chooses.
    None: there is none."""
    found, marks = {}, {}
    if name != "bytes":
        found, marks = folder_has(pathlib.Path(name).parent)
    if tokenizer.end_text:
        marks.setdefault("eos_token", tokenizer.end_text)
    if chat is not None:
        if chat not in found and not os.path.exists(chat):
            raise Refused(
                f"--chat: {chat} is neither a file nor a template of the tokenizer's "
                f"folder, which has {', '.join(found) or 'none'} (the styles plain, "
                "chatml and llama3 are gone: a model's folder has its own)")
        found = {"default": found.get(chat) or read_text(chat)}
    return Templates(tokenizer, found, marks) if found else None


# ---- rendering ----

def environment(now):
    jinja2 = package("jinja2", "a chat template")
    sandbox, ext = package("jinja2.sandbox"), package("jinja2.ext")

    class Generation(ext.Extension):
        """{% generation %}: its text between OPEN and CLOSE."""
        tags = {"generation"}

        def parse(self, parser):
            self.environment.marked = True
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)

            def mark(text):
                return jinja2.nodes.Output([jinja2.nodes.TemplateData(text)], lineno=line)
            return [mark(OPEN), *body, mark(CLOSE)]

    def refuse(message):
        raise jinja2.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent,
                          separators=separators, sort_keys=sort_keys)

    found = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    found.filters["tojson"] = tojson
    found.globals.update(raise_exception=refuse, strftime_now=now.strftime)
    return found


def common(a, b):
    """How many characters both begin with."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a.startswith(b[:middle]):
            low = middle
        else:
            high = middle - 1
    return low


def reasoned(message):
    """A message with its reasoning under the names that templates read."""
    given = [message[name] for name in REASONING if message.get(name) is not None]
    if not given:
        return message
    return {**message, REASONING[0]: given[0], REASONING[1]: message.get(REASONING[1], given[0])}


class Templates:
    def __init__(self, tokenizer, sources, marks):
        made = environment(datetime.datetime.now())
        self.special, self.marks = tokenizer.special, marks
        self.templates, self.marked = {}, set()
        for name, source in sources.items():
            made.marked = False
            try:
                self.templates[name] = made.from_string(source)
            except Exception as e:
                raise Refused(f"the chat template {name}: line "
                              f"{getattr(e, 'lineno', '?')}: {e}") from e
            if made.marked:
                self.marked.add(name)

    def choose(self, tools):
        for name in ("tool_use",) * (tools is not None) + ("default",):
            if name in self.templates:
                return name
        raise Faulty(f"the folder has the templates {', '.join(self.templates)}: choose "
                     "one with --chat")

    def render(self, messages, given, prompt=False):
        """given: tools, documents and what a record gives besides; prompt: with what
        stands in front of an answer."""
        template = self.templates[self.choose(given.get("tools"))]
        try:
            return template.render(**{
                **self.marks, "tools": None, "documents": None, **given,
                "messages": [reasoned(m) for m in messages],
                "add_generation_prompt": prompt})
        except Exception as e:
            raise Faulty(f"the chat template says: {e}") from e

    def text(self, messages, learnt_from, given):
        """The text, (start, end) of what is to be learnt of it, from message
        learnt_from on, the numbers of the answers that are not because the template
        writes them otherwise when they are the last, and how many do not begin as
        its prompt says."""
        text = self.render(messages, given)
        if self.choose(given.get("tools")) not in self.marked:
            return self.by_difference(text, messages, learnt_from, given)
        parts, spans, at = text.replace(CLOSE, OPEN).split(OPEN), [], 0
        for i, part in enumerate(parts):
            if i % 2:
                spans.append((at, at + len(part)))
            at += len(part)
        if learnt_from:
            before = self.plain(messages[:learnt_from], given)
            spans = [s for s in spans if s[0] >= common("".join(parts), before)]
        return "".join(parts), spans, [], 0

    def plain(self, messages, given, prompt=False):
        text = self.render(messages, given, prompt)
        return text.replace(OPEN, "").replace(CLOSE, "")

    def by_difference(self, text, messages, learnt_from, given):
        spans, other, unlike = [], [], 0
        for i, m in enumerate(messages):
            if i < learnt_from or m.get("role") != "assistant":
                continue
            span, like = self.answer(text, messages, i, given)
            if span:
                spans.append(self.closed(text, *span))
            else:
                other.append(i)
            unlike += not like
        return text, spans, other, unlike

    def answer(self, text, messages, i, given):
        """Where answer i is in the text of all messages, which begins with that of
        those up to it: behind the prompt that the template makes for it, and before
        what stands there because it is the last.  None: the text has another one.
        And whether it begins as the prompt says."""
        last = i + 1 == len(messages)
        try:
            full = text if last else self.plain(messages[:i + 1], given)
            prompt = self.plain(messages[:i], given, True)
            bare = self.plain(messages[:i], given)
            more = full if last else self.plain(messages[:i + 1], given, True)
        except Faulty:
            return None, True
        start, end = (self.whole(full, common(full, x)) for x in (prompt, more))
        if not text.startswith(full[:end]) or start >= end or \
                start < self.whole(prompt, common(prompt, bare)):
            return None, True
        return (start, end), start == len(prompt)

    def whole(self, text, at):
        """The place, or where a special token begins that is cut there."""
        near = (max(0, at - LONGEST), at + LONGEST)
        return next((m.start() for m in self.special.finditer(text, *near)
                     if m.start() < at < m.end()), at)

    def closed(self, text, start, end):
        """Without blanks behind the special token that ends an answer: nothing is
        generated there."""
        answer = text[start:end].rstrip()
        if any(m.end() == len(answer) for m in self.special.finditer(answer)):
            end = start + len(answer)
        return start, end

