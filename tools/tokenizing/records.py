# SPDX-License-Identifier: Apache-2.0
"""A document as tokens: plain text, a conversation of which only the answers are to be
learnt, or a pair of texts of which one is preferred."""
import json
import typing

from tokenizing.chat import CLOSE, OPEN, Faulty
from tokenizing.shards import Refused
from tokenizing.tokens import encode

# What one output has one of.
TEXT, CONVERSATION, PAIR = "text", "conversations", "preference pairs"


class Form(typing.NamedTuple):
    """A kind of record, known by its keys; the first that fits counts."""
    name: str
    keys: tuple
    kind: str


FORMS = (
    Form("preference pairs", ("chosen", "rejected"), PAIR),
    Form("messages", ("messages",), CONVERSATION),
    Form("ShareGPT", ("conversations",), CONVERSATION),
    Form("Alpaca", ("instruction", "output"), CONVERSATION),
    Form("prompt and completion", ("prompt", "completion"), CONVERSATION),
    Form("text", ("text",), TEXT),
)
PROSE = FORMS[-1]  # of what is no record
# What a record's keys may be, and those that go to the template.
GIVEN = ("tools", "documents")
KEYS = {k for f in FORMS for k in f.keys} | {
    "system", "input", "history", "chat_template_kwargs", *GIVEN}
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
         "model": "assistant", "system": "system", "tool": "tool",
         "observation": "tool"}


class BadRecord(Refused):
    """--skip-bad leaves it out."""


# ---- what a record is ----

def unique(pairs):
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)


def no_constant(name):
    raise ValueError(f"{name} is no number")


def form_of(value):
    return next((f for f in FORMS if all(value.get(k) is not None for k in f.keys)), None)


def parse_json(text, what=""):
    try:
        return json.loads(text if isinstance(text, str) else text.decode(),
                          object_pairs_hook=unique, parse_constant=no_constant)
    except (ValueError, RecursionError) as e:
        raise BadRecord(f"{what} is not JSON: {e}".lstrip()) from e


def parse(line):
    """The value of a line of JSON, and its form."""
    value = parse_json(line)
    if not isinstance(value, dict):
        raise BadRecord("is no object of JSON")
    form = form_of(value)
    if not form:
        raise BadRecord(f"has the keys {', '.join(value) or 'none'}; a record has " +
                        ", or ".join(" and ".join(f.keys) for f in FORMS))
    return value, form


def texts(value, *keys):
    found = [value.get(k) for k in keys]
    if not all(isinstance(t, str) for t in found):
        raise BadRecord(f"{' or '.join(keys)} is missing or no string")
    return found


def message(m):
    """With ShareGPT's names, or with role and content as a template reads them."""
    if not isinstance(m, dict):
        raise BadRecord("a message is no object")
    if "from" in m and "role" not in m:
        role, content = texts(m, "from", "value")
        if role not in ROLES:
            raise BadRecord(f"a message is from {role}; known are {', '.join(ROLES)}")
        return {"role": ROLES[role], "content": content}
    if not isinstance(m.get("role"), str):
        raise BadRecord("the role of a message is missing or no string")
    if not isinstance(m.get("content"), (str, list)) and not m.get("tool_calls"):
        raise BadRecord("a message has neither content nor tool_calls")
    return {k: v for k, v in m.items() if v is not None}  # as transformers


def messages_of(value, key):
    found = value.get(key)
    if not isinstance(found, list) or not found:
        raise BadRecord(f"{key} is not an array with something in it")
    return [message(m) for m in found]


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def alpaca(value):
    turns = value.get("history") or []
    if not isinstance(turns, list) or \
            not all(isinstance(t, list) and len(t) == 2 for t in turns):
        raise BadRecord("history is no array of pairs")
    before = [message(m) for q, a in turns for m in (user(q), assistant(a))]
    asked, answer, more = texts({**value, "input": value.get("input") or ""},
                                "instruction", "output", "input")
    return [*before, user(asked + "\n" * bool(more) + more), assistant(answer)]


def conversation_of(value, form):
    """Its messages, and from which on they are learnt."""
    if form.name == "prompt and completion":
        prompt = messages_of(value, "prompt")
        return prompt + messages_of(value, "completion"), len(prompt)
    found = alpaca(value) if form.name == "Alpaca" else messages_of(value, form.keys[0])
    if value.get("system") and found[0]["role"] != "system":
        found = [message({"role": "system", "content": value["system"]}), *found]
    return found, 0


def strings(value):
    """All that are in a value, also as keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for x in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from strings(x)


# ---- a record as tokens ----

# What is told of documents, with the place of the first.
NOTES = {
    "own": "a document brings its begin or end itself: none was added",
    "written": "a document begins or ends with the name of a special token, which is "
               "text like any other without --special",
    "blank": "a document is blank and left out",
    "other": "an answer is not learnt: the template writes it otherwise when others "
             "follow (--unroll makes a document that ends with it)",
    "unlike": "an answer does not begin as the template's prompt for it does: it is "
              "learnt from where they differ",
    "nothing": "a conversation has nothing to be learnt",
}


class Recipe:
    """How documents become tokens; begin and end are ids or None, templates None where
    there are none; `special`: special tokens in a text become them; `unroll`: an answer
    that a template writes otherwise when others follow gets a document of its own."""

    def __init__(self, tokenizer, begin, end, kind, templates, text_tokens, special,
                 unroll=False):
        self.tokenizer, self.kind, self.masked = tokenizer, kind, kind != TEXT
        self.begin, self.end, self.templates = begin, end, templates
        self.text_tokens = text_tokens  # of each text of a pair
        self.special, self.unroll = special, unroll
        self.longest = 0  # text of a pair so far, tokens
        self.notes = {}  # of the last document: how often

    def note(self, name, times=1):
        if times:
            self.notes[name] = self.notes.get(name, 0) + times

    def conversation(self, messages, learnt_from, value):
        """Documents of a list of messages, of which those before learnt_from are not
        learnt."""
        if not self.templates:
            raise Refused("messages need a chat template, and beside the tokenizer "
                          "there is none (chat_template.jinja, or chat_template in "
                          "tokenizer_config.json): name a file with --chat")
        if self.begin is not None:
            raise Refused("--begin: the template writes what is around a conversation")
        given = {k: value[k] for k in GIVEN if value.get(k) is not None}
        if isinstance(given.get("tools"), str):
            given["tools"] = parse_json(given["tools"], "tools")
        more = value.get("chat_template_kwargs") or {}
        if not isinstance(more, dict):
            raise BadRecord("chat_template_kwargs is no object")
        given |= more
        for text in strings([messages, given]):
            text.encode()  # refuses half a pair of surrogates
            found = not self.special and self.tokenizer.special.search(text)
            if found:
                raise BadRecord(f"has the special token {found[0]} in a message, where "
                                "it would act as one: --special allows it")
            if OPEN in text or CLOSE in text:
                raise BadRecord("has U+FDD0 or U+FDD1, which are no characters")
        found = []
        try:
            *one, other, unlike = self.templates.text(messages, learnt_from, given)
            found.append(one)
            for i in other:
                *one, lost, _ = self.templates.text(messages[:i + 1], i, given) \
                    if self.unroll else (None, [], [i], 0)
                found += [one] * (not lost)
                self.note("other", len(lost))
        except Faulty as e:
            raise BadRecord(str(e)) from e
        self.note("unlike", unlike)
        found = [one for one in found if one[1]] or found[:1]
        self.note("nothing", not found[0][1])
        return [self.tokenizer.chat(*one) for one in found]

    def framed(self, pieces, first=True, last=True):
        """Of (text, whether it is learnt): with the begin and the end, once."""
        ids, learn = [], bytearray()
        for text, learnt in pieces:
            ids += encode(self.tokenizer, text, len(ids) > 0 or not first)
            learn += bytes([learnt]) * (len(ids) - len(learn))
        forged = self.tokenizer.forged
        if forged and not forged.keys().isdisjoint(ids):
            name = next(forged[i] for i in ids if i in forged)
            # No part of a document can be left out.
            raise (BadRecord if first and last else Refused)(
                f"has the special token {name}, which this tokenizer does not take for "
                "text: --special allows it")
        has = (first and self.begin is not None and ids[:1] == [self.begin],
               last and self.end is not None and ids[-1:] == [self.end])
        if first and self.begin is not None and not has[0]:
            ids.insert(0, self.begin)
            learn.insert(0, pieces[0][1])
        if last and self.end is not None and not has[1]:
            ids.append(self.end)
            learn.append(1)
        head, tail = (t.decode(errors="ignore") for t in
                      (pieces[0][0][:256], pieces[-1][0][-256:]))
        names = self.tokenizer.special
        self.note("own", any(has))
        self.note("written", not self.special and (
            first and names.match(head) is not None or
            last and any(m.end() == len(tail) for m in names.finditer(tail))))
        return ids, learn

    def completed(self, prompt, completion):
        return self.framed([(prompt.encode(), 0), (completion.encode(), 1)])

    def pair(self, value):
        """Of the chosen text and of the rejected one: strings behind a prompt, or
        messages, of which those that both begin with are the prompt."""
        if isinstance(value.get("chosen"), str):
            prompt, *answers = texts(value, "prompt", "chosen", "rejected")
            return [self.completed(prompt, a) for a in answers]
        prompt = value.get("prompt") or []
        both = [messages_of(value, k) for k in ("chosen", "rejected")]
        if all(m[0].get("content") == prompt for m in both):
            prompt = []  # UltraFeedback has it twice
        if not isinstance(prompt, list):
            raise BadRecord("prompt is no array, nor what chosen and rejected begin with")
        both = [[message(m) for m in prompt] + m for m in both]
        same = len(prompt)
        while same < min(map(len, both)) and both[0][same] == both[1][same]:
            same += 1
        return [self.conversation(m, same, value)[0] for m in both]

    def record(self, line):
        """Of a line of JSON its documents, or the texts of its pair: ids and what is
        learnt."""
        value, form = parse(line)
        if form.kind != self.kind:
            raise BadRecord(f"is of {form.kind}, and the first document is of "
                            f"{self.kind}: one output holds one kind")
        if form.kind == PAIR:
            return self.pair(value)
        if form.kind == TEXT:
            text, = texts(value, "text")
            if not text.strip():
                self.note("blank")
                return []
            return [self.framed([(text.encode(), 1)])]
        if isinstance(value.get("prompt"), str) and form.keys[0] == "prompt":
            return [self.completed(*texts(value, "prompt", "completion"))]
        return self.conversation(*conversation_of(value, form), value)

    def fill(self, ids, learn):
        """A text of a pair with tokens behind it that nothing learns from."""
        lacks = self.text_tokens - len(ids)
        if lacks < 0:
            raise BadRecord(f"has a text of {len(ids)} tokens, and --preferences is "
                            f"{self.text_tokens}")
        if not any(learn[1:]):
            raise BadRecord("has a text in which nothing is to be learnt")
        ids += [self.end or 0] * lacks
        learn += bytes(lacks)

    def encode(self, data, is_json, first, last):
        """Documents, or a part of one: (ids, a byte per id: whether it is to be
        learnt)."""
        self.notes = {}
        if not is_json:
            if self.masked:
                raise BadRecord(f"is text, and the first document is of {self.kind}: "
                                "one output holds one kind")
            return [self.framed([(data, 1)], first, last)]
        try:
            found = self.record(data)
        except UnicodeEncodeError as e:
            raise BadRecord(f"is not JSON: {e.reason}") from e
        if self.kind != PAIR:
            return found
        longest = max(len(ids) for ids, _ in found)
        for text in found:
            self.fill(*text)
        self.longest = max(self.longest, longest)
        (a, learnt), (b, learn) = found
        return [(a + b, learnt + learn)]
