# SPDX-License-Identifier: Apache-2.0
"""A document as tokens: plain text, a conversation of which only the answers are to be
learnt, or a pair of texts of which one is preferred."""
import json
import typing

from tokenizing.shards import Refused
from tokenizing.tokens import encode


# What a record of each kind has.
TEXT, CONVERSATION, PAIR = "text", "messages or prompt", "chosen and rejected"


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
    """The value of a line of JSON, and its kind."""
    try:
        value = json.loads(line.decode(), object_pairs_hook=unique,
                           parse_constant=no_constant)
    except (ValueError, RecursionError) as e:
        raise BadRecord(f"is not JSON: {e}") from e
    for kind, keys in ((PAIR, ("chosen", "rejected")),
                       (CONVERSATION, ("messages", "prompt"))):
        if isinstance(value, dict) and any(k in value for k in keys):
            return value, kind
    return value, TEXT


def texts(value, *keys, where=""):
    found = [value.get(k) if isinstance(value, dict) else None for k in keys]
    if not all(isinstance(t, str) for t in found):
        raise BadRecord(f"{' or '.join(keys)}{where} is missing or no string")
    return found


def messages_of(value, key):
    messages = value.get(key)
    if not isinstance(messages, list) or not messages:
        raise BadRecord(f"{key} is not an array with something in it")
    return messages


class Recipe:
    """How documents become tokens; begin and end are ids or None."""

    def __init__(self, tokenizer, begin, end, kind, chat, text_tokens):
        self.tokenizer, self.kind, self.masked = tokenizer, kind, kind != TEXT
        self.begin, self.end = begin, end
        self.chat = self.find_style(chat) if self.masked else chat
        self.text_tokens = text_tokens  # of each text of a pair
        self.longest = 0  # text of a pair so far, tokens

    def find_style(self, chat):
        """The name of the first style whose tokens are there."""
        for name in STYLES if chat == "auto" else [chat]:
            lost = [t for t in STYLES[name].tokens
                    if t is not None and self.tokenizer.find(t) is None]
            if not lost:
                return name
        raise Refused(f"--chat {chat} needs the token {lost[0]}")

    def message(self, value, learn=True):
        role, content = texts(value, "role", "content", where=" of a message")
        style, learn = STYLES[self.chat], learn and role == "assistant"
        before, behind, end = (t and self.tokenizer.find(t) for t in style.tokens)
        if self.chat == "plain" and learn:
            end = self.end
        if style.trim:
            content = content.strip(style.trim)
        return [(before, 0), (role, 0), (behind, 0), (style.after_role, 0),
                (content, learn), (end, learn), (style.after_content, 0)]

    def conversation(self, messages, learnt_from=0):
        """Of a list of messages, those before learnt_from are not learnt."""
        return [(self.begin, 0),
                *(x for i, m in enumerate(messages)
                  for x in self.message(m, i >= learnt_from)), (self.end, 0)]

    def completed(self, prompt, completion):
        return [(self.begin, 0), (prompt, 0), (completion, 1), (self.end, 1)]

    def pair(self, value):
        """Of the chosen text and of the rejected one: strings behind a prompt, or
        messages, of which those that both begin with are the prompt."""
        if isinstance(value.get("chosen"), str):
            prompt, *answers = texts(value, "prompt", "chosen", "rejected")
            return [self.completed(prompt, a) for a in answers]
        prompt = value.get("prompt", [])
        both = [messages_of(value, k) for k in ("chosen", "rejected")]
        if not isinstance(prompt, list):
            raise BadRecord("prompt is no array, and chosen is one")
        both = [prompt + m for m in both]
        same = len(prompt)
        while same < min(map(len, both)) and both[0][same] == both[1][same]:
            same += 1
        return [self.conversation(m, same) for m in both]

    def record(self, line):
        """Of a line of JSON, or of each text of its pair: (a text or an id, whether it
        is to be learnt), in order."""
        value, kind = parse(line)
        if kind != self.kind:
            raise BadRecord(f"has {kind}, and the first document has {self.kind}: one "
                            "output holds one kind")
        if kind == PAIR:
            return self.pair(value)
        if kind == TEXT:
            return [[(self.begin, 1), (texts(value, "text")[0], 1), (self.end, 1)]]
        if "messages" not in value:
            return [self.completed(*texts(value, "prompt", "completion"))]
        return [self.conversation(messages_of(value, "messages"))]

    def fill(self, ids, learn):
        """A text of a pair with tokens behind it that nothing learns from."""
        self.longest = max(self.longest, len(ids))
        lacks = self.text_tokens - len(ids)
        if lacks < 0:
            raise BadRecord(f"has a text of {len(ids)} tokens, and --preferences is "
                            f"{self.text_tokens}")
        if not any(learn[1:]):
            raise BadRecord("has a text in which nothing is to be learnt")
        ids += [self.end or 0] * lacks
        learn += bytes(lacks)

    def encode(self, data, is_json, first, last):
        """(ids, a byte per id: whether it is to be learnt)."""
        if not is_json and self.masked:
            raise BadRecord(f"is text, and the first document has {self.kind}: one "
                            "output holds one kind")
        texts_ = self.record(data) if is_json else [
            [(self.begin if first else None, 1), (data, 1),
             (self.end if last else None, 1)]]
        all_ids, all_learn = [], bytearray()
        for pieces in texts_:
            ids, learn = self.encode_pieces(pieces)
            if self.kind == PAIR:
                self.fill(ids, learn)
            all_ids += ids
            all_learn += learn
        return all_ids, all_learn

    def encode_pieces(self, pieces):
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
