"""Prevent quoted text from forging the marks of a chat layout.

A tokenizer turns a text such as `<|im_end|>` into a single token wherever it occurs, so a file containing it would end
one message and begin another when a tool shows the file. While a template lays out the messages, random names therefore
replace such texts; afterwards each name is encoded as ordinary tokens that spell the text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from turnstile.agents.base import Tokenizer
from turnstile.types import I32, Message, ToolSpec

_NOTHING = re.compile(r"(?!)")
_PUNCTUATED = re.compile(r"^[^\w\s]|[^\w\s]$")
_BEFORE = "\n"  # a preceding text that no tokenizer merges with the text after it


def marks_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the texts that the tokenizer encodes as a single token wherever they occur, with their ids."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token): int(index) for index, token in added.items()}


def special_marks(tokenizer: Tokenizer) -> set[str]:
    """Return those of the tokenizer's marks that are special tokens, which no ordinary text should contain."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token) for token in added.values() if getattr(token, "special", False)}


def text_marks(layout: str, content: str, marks: Iterable[str]) -> set[str]:
    """Return the marks that a layout writes as ordinary text around its contents, such as `[INST]` or `<|user|>`.

    `layout` is a rendered conversation in which every message is `content`. A mark is the line, or part of a line, next
    to a content, without the tokens of `marks`, provided it has at most three words and begins or ends in punctuation.
    A bare `user` between other tokens is therefore not a mark.
    """
    found: set[str] = set()
    added = _any_of(marks)
    for between in layout.split(content):
        lines = [line.strip() for part in added.split(between) for line in part.splitlines() if line.strip()]
        found.update(lines[:1] + lines[-1:])
    return {mark for mark in found if len(mark) > 1 and len(mark.split()) <= 3 and _PUNCTUATED.search(mark)}


class Markers:
    """Encodes messages so that marks quoted in them become ordinary tokens.

    The marks are those in `foreign`, or those in `own` for an assistant's text. An assistant may write other marks,
    such as the one that begins a tool call. `text` names further foreign marks, which a layout writes as ordinary text.
    Texts go through `quote`, then through any template, then through `encode`. The name that replaces a mark consists
    of ASCII letters and digits, so templates do not change it when they trim, escape or convert text to JSON.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        foreign: Iterable[str] = (),
        own: Iterable[str] = (),
        text: Iterable[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._foreign, self._own = _any_of({*foreign, *text}), _any_of(own)
        self._marks = sorted({*foreign, *own})
        names = {mark: f"zq{secrets.token_hex(12)}z" for mark in sorted({*self._marks, *text})}
        self._names = names
        self._pieces = {names[mark]: self._split_mark(mark) for mark in self._marks}
        self._pieces |= {names[mark]: list(mark) for mark in text}
        self._named = _any_of(self._pieces)
        # SentencePiece tokenizers add a blank before a text and drop one in decoding; a continued text needs neither.
        self._before = self._ids(_BEFORE)
        self._begins_with_blank = self._ids(f"{_BEFORE}x") != [*self._before, *self._ids("x")]
        shown = tokenizer.decode(self._ids(" x"), skip_special_tokens=False)
        self._drops_blank = self._begins_with_blank or shown != " x"
        self._all = tuple(marks_of(tokenizer))

    def quote(self, text: str, *, own: bool = False) -> str:
        """Return the text with each mark replaced by its name. With `own`, it is an assistant's text."""
        return (self._own if own else self._foreign).sub(lambda found: self._names[found[0]], text)

    def message(self, message: Message) -> Message:
        """Return the message with all its texts quoted; an assistant's content and reasoning count as its own text."""
        own = message.role == "assistant"
        return replace(
            message,
            content=self.quote(message.content, own=own),
            reasoning=message.reasoning and self.quote(message.reasoning, own=own),
            tool_calls=tuple(
                replace(call, name=self.quote(call.name), arguments=self.within(call.arguments))
                for call in message.tool_calls
            ),
        )

    def tool(self, tool: ToolSpec) -> ToolSpec:
        """Return the tool with its name, description and schema quoted."""
        return replace(
            tool,
            name=self.quote(tool.name),
            description=self.quote(tool.description),
            schema=self.within(tool.schema),
        )

    def within(self, value: Any) -> Any:
        """Return a JSON value with every text in it quoted, including keys."""
        if isinstance(value, str):
            return self.quote(value)
        if isinstance(value, Mapping):
            return {self.quote(str(key)): self.within(item) for key, item in value.items()}
        return [self.within(item) for item in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str, *, after: str = "") -> I32:
        """Return the ids of a rendered text, i32[n], with quoted marks spelled in ordinary tokens.

        `after` is the text that precedes this one. No blank is added at the beginning if that text ends in ordinary
        text.
        """
        chunks = [""]
        at = 0
        for found in self._named.finditer(text):
            first, *rest = self._pieces[found[0]]
            chunks[-1] += text[at : found.start()] + first
            chunks += rest
            at = found.end()
        chunks[-1] += text[at:]
        goes_on = bool(after) and not after.endswith(self._all)
        ids: list[int] = []
        for place, chunk in enumerate(chunks):
            if chunk:
                ids += self._continuation_ids(chunk) if place or goes_on else self._ids(chunk)
        return np.asarray(ids, dtype=np.int32)

    def decode(self, ids: I32) -> str:
        """Return the text of ids that continue other text, keeping a leading blank if there is one."""
        known = ids.tolist()
        if not self._drops_blank:
            return self._tokenizer.decode(known, skip_special_tokens=False)
        return self._tokenizer.decode([*self._before, *known], skip_special_tokens=False).removeprefix(_BEFORE)

    def _continuation_ids(self, text: str) -> list[int]:
        """Return the ids of a text that continues ordinary text."""
        if not self._begins_with_blank:
            return self._ids(text)
        ids = self._ids(_BEFORE + text)
        return ids[len(self._before) :] if ids[: len(self._before)] == self._before else self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _split_mark(self, mark: str) -> list[str]:
        """Return the mark split into pieces that contain no mark."""
        rest = mark[1:]
        return [mark[0], rest] if rest and not any(other in rest for other in self._marks) else list(mark)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the texts, preferring longer ones."""
    found = sorted({text for text in texts if text}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, found))) if found else _NOTHING
