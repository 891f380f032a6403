"""Keep quoted text from forging the marks of a chat layout.

A tokenizer makes one token of a text like `<|im_end|>` wherever it stands, so a file that holds it would end one
message and begin another when a tool shows it. Random names take the place of such texts in messages while a template
lays the messages out, and each name becomes ordinary tokens afterwards.
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
_BEFORE = "\n"  # a text before another, with which no tokenizer merges what follows


def marks_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the texts that a tokenizer makes one token of wherever they stand, with their ids."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token): int(index) for index, token in added.items()}


def special_marks(tokenizer: Tokenizer) -> set[str]:
    """Return those of them that are special: no text is meant to hold them."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token) for token in added.values() if getattr(token, "special", False)}


def text_marks(layout: str, content: str, marks: Iterable[str]) -> set[str]:
    """Return the marks that a layout writes in ordinary text beside its contents, like `[INST]` or `<|user|>`.

    `layout` is a rendered conversation in which every message is `content`. A mark is the line, or the part of a line,
    next to a content, without the tokens of `marks`, if it has at most three words and begins or ends in punctuation: a
    bare `user`, which other tokens enclose, is none.
    """
    found: set[str] = set()
    added = _any_of(marks)
    for between in layout.split(content):
        lines = [line.strip() for part in added.split(between) for line in part.splitlines() if line.strip()]
        found.update(lines[:1] + lines[-1:])
    return {mark for mark in found if len(mark) > 1 and len(mark.split()) <= 3 and _PUNCTUATED.search(mark)}


class Markers:
    """The marks that quoted text must not write: those in `foreign`, and in an assistant's words those in `own`.

    An assistant may write other marks, like the one that begins a tool call. `text` names foreign marks that a layout
    writes in ordinary text. Texts go through `quote`, then through any template, then through `encode`. A name that
    stands for a mark is made of ASCII letters and digits, which templates trim, escape and put into JSON unchanged.
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
        self._pieces = {names[mark]: self._broken(mark) for mark in self._marks}
        self._pieces |= {names[mark]: list(mark) for mark in text}
        self._named = _any_of(self._pieces)
        # SentencePiece tokenizers put a blank before a text and drop one when they decode: not in a text that goes on.
        self._before = self._ids(_BEFORE)
        self._begins_with_blank = self._ids(f"{_BEFORE}x") != [*self._before, *self._ids("x")]
        shown = tokenizer.decode(self._ids(" x"), skip_special_tokens=False)
        self._drops_blank = self._begins_with_blank or shown != " x"
        self._all = tuple(marks_of(tokenizer))

    def quote(self, text: str, *, own: bool = False) -> str:
        """Return the text with a name in the place of each mark."""
        return (self._own if own else self._foreign).sub(lambda found: self._names[found[0]], text)

    def message(self, message: Message) -> Message:
        """Return the message with all its texts quoted, an assistant's as its own words."""
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
        """Return a JSON value with every text in it quoted, keys too."""
        if isinstance(value, str):
            return self.quote(value)
        if isinstance(value, Mapping):
            return {self.quote(str(key)): self.within(item) for key, item in value.items()}
        return [self.within(item) for item in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str, *, after: str = "") -> I32:
        """Return the ids of a rendered text, i32[n]; a quoted mark is spelled in ordinary tokens.

        `after` is the text that this one goes on from: behind ordinary text no tokenizer begins it with a blank.
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
        """Return the text of ids that go on from other text: with the blank that it begins with, if it has one."""
        known = ids.tolist()
        if not self._drops_blank:
            return self._tokenizer.decode(known, skip_special_tokens=False)
        return self._tokenizer.decode([*self._before, *known], skip_special_tokens=False).removeprefix(_BEFORE)

    def _continuation_ids(self, text: str) -> list[int]:
        """Return the ids of a text that goes on from ordinary text."""
        if not self._begins_with_blank:
            return self._ids(text)
        ids = self._ids(_BEFORE + text)
        return ids[len(self._before) :] if ids[: len(self._before)] == self._before else self._ids(text)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _broken(self, mark: str) -> list[str]:
        """Return the mark in pieces that hold none."""
        rest = mark[1:]
        return [mark[0], rest] if rest and not any(other in rest for other in self._marks) else list(mark)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds any of the texts, the longest first."""
    found = sorted({text for text in texts if text}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, found))) if found else _NOTHING
