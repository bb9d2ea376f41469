# SPDX-License-Identifier: Apache-2.0
"""A document as tokens: plain text, or a conversation of which only the answers are
to be learnt."""
import json
import typing

from tokenizing.shards import Refused
from tokenizing.tokens import encode


ONE_KIND = ": one output holds one kind"


class BadRecord(Refused):
    """--skip-bad leaves it out."""


class Style(typing.NamedTuple):
    """The tokens and texts around a message."""
    tokens: tuple  # before the role, behind it, behind the content
    after_role: str
    after_content: str
    trim: str  # characters around the content that are dropped


STYLES = {
    "llama3": Style(("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
                    "\n\n", "", " \t\r\n\v\f"),
    "chatml": Style(("<|im_start|>", None, "<|im_end|>"), "\n", "\n", ""),
    "plain": Style((None, None, None), ":\n", "\n", ""),
}


def unique(pairs):
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)


def no_constant(name):
    raise ValueError(f"{name} is no number")


def parse(line):
    """The value of a line of JSON; whether it is a conversation."""
    try:
        value = json.loads(line.decode(), object_pairs_hook=unique,
                           parse_constant=no_constant)
    except (ValueError, RecursionError) as e:
        raise BadRecord(f"is not JSON: {e}") from e
    return value, isinstance(value, dict) and ("messages" in value or "prompt" in value)


def texts(value, *keys, where=""):
    found = [value.get(k) if isinstance(value, dict) else None for k in keys]
    if not all(isinstance(t, str) for t in found):
        raise BadRecord(f"{' or '.join(keys)}{where} is missing or no string")
    return found


class Recipe:
    """How documents become tokens; begin and end are ids or None."""

    def __init__(self, tokenizer, begin, end, masked, chat):
        self.tokenizer, self.masked = tokenizer, masked
        self.begin, self.end = begin, end
        self.chat = self.find_style(chat) if masked else chat

    def find_style(self, chat):
        """The name of the first style whose tokens are there."""
        for name in STYLES if chat == "auto" else [chat]:
            lost = [t for t in STYLES[name].tokens
                    if t is not None and self.tokenizer.find(t) is None]
            if not lost:
                return name
        raise Refused(f"--chat {chat} needs the token {lost[0]}")

    def message(self, value):
        role, content = texts(value, "role", "content", where=" of a message")
        style, learn = STYLES[self.chat], role == "assistant"
        before, behind, end = (t and self.tokenizer.find(t) for t in style.tokens)
        if self.chat == "plain" and learn:
            end = self.end
        if style.trim:
            content = content.strip(style.trim)
        return [(before, 0), (role, 0), (behind, 0), (style.after_role, 0),
                (content, learn), (end, learn), (style.after_content, 0)]

    def record(self, line):
        """(a text or an id, whether it is to be learnt) of a line of JSON, in order."""
        value, conversation = parse(line)
        if conversation != self.masked:
            raise BadRecord(("neither messages nor prompt, as the first record has"
                             if self.masked else
                             "messages or prompt, but the first document is text") +
                            ONE_KIND)
        if not conversation:
            return [(self.begin, 1), (texts(value, "text")[0], 1), (self.end, 1)]
        if "messages" not in value:
            prompt, completion = texts(value, "prompt", "completion")
            return [(self.begin, 0), (prompt, 0), (completion, 1), (self.end, 1)]
        messages = value["messages"]
        if not isinstance(messages, list) or not messages:
            raise BadRecord("messages is not an array with something in it")
        return [(self.begin, 0), *(x for m in messages for x in self.message(m)),
                (self.end, 0)]

    def encode(self, data, is_json, first, last):
        """(ids, a byte per id: whether it is to be learnt)."""
        if is_json:
            pieces = self.record(data)
        elif self.masked:
            raise BadRecord("is text, but the first document is a conversation" +
                            ONE_KIND)
        else:
            pieces = [(self.begin if first else None, 1), (data, 1),
                      (self.end if last else None, 1)]
        ids, learn = [], bytearray()
        for what, learnt in pieces:
            if isinstance(what, str):
                try:
                    what = what.encode()
                except UnicodeEncodeError as e:
                    raise BadRecord(f"is not JSON: {e.reason}") from e
            if isinstance(what, bytes):
                ids += encode(self.tokenizer, what)
            elif what is not None:
                ids.append(what)
            learn += bytes([learnt]) * (len(ids) - len(learn))
        return ids, learn
