"""What a conversation quotes cannot write the marks of its layout.

A tokenizer makes one token of a text like `<|im_end|>` wherever it stands, so that a file which holds it would end a
message, and begin another, when a tool shows it. Here such texts in what messages say are stood for by names that
nobody can guess while a template lays the messages out, and become ordinary tokens.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from turnstile.agents.base import Tokenizer
from turnstile.types import I32, Message

_NOTHING = re.compile(r"(?!)")


def marks_of(tokenizer: Tokenizer) -> dict[str, int]:
    """The texts that a tokenizer makes one token of wherever they stand, with their ids."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token): int(index) for index, token in added.items()}


def special_marks(tokenizer: Tokenizer) -> set[str]:
    """Those of them that no text is meant to hold."""
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    return {str(token) for token in added.values() if getattr(token, "special", False)}


class Markers:
    """Keeps the marks in `foreign` out of what is quoted, and those in `own` out of what an assistant says, who may
    write others, like the one that begins a tool call.

    Texts go through `quoted`, then through any template, then through `encode`. A name that stands for a mark is made
    of ASCII letters and digits, which templates trim, escape and put into JSON without changing them.
    """

    def __init__(self, tokenizer: Tokenizer, *, foreign: Iterable[str] = (), own: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._foreign, self._own = _any_of(foreign), _any_of(own)
        self._marks = sorted({*foreign, *own})
        self._names = {mark: f"zq{secrets.token_hex(12)}z" for mark in self._marks}
        self._pieces = {name: self._broken(mark) for mark, name in self._names.items()}
        self._named = _any_of(self._pieces)

    def quoted(self, text: str, *, own: bool = False) -> str:
        """The text, with a name in the place of each mark."""
        return (self._own if own else self._foreign).sub(lambda found: self._names[found[0]], text)

    def message(self, message: Message) -> Message:
        """The message with all that it says quoted: as an assistant's own words where they are that."""
        own = message.role == "assistant"
        return replace(
            message,
            content=self.quoted(message.content, own=own),
            reasoning=message.reasoning and self.quoted(message.reasoning, own=own),
            tool_calls=tuple(
                replace(call, name=self.quoted(call.name), arguments=self.within(call.arguments))
                for call in message.tool_calls
            ),
        )

    def within(self, value: Any) -> Any:
        """Every text in a value of JSON quoted, keys too."""
        if isinstance(value, str):
            return self.quoted(value)
        if isinstance(value, Mapping):
            return {self.quoted(str(key)): self.within(item) for key, item in value.items()}
        return [self.within(item) for item in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str) -> I32:
        """The ids of a text that was laid out, i32[n]; a mark that was quoted is spelled out in ordinary tokens."""
        chunks = [""]
        at = 0
        for found in self._named.finditer(text):
            first, *rest = self._pieces[found[0]]
            chunks[-1] += text[at : found.start()] + first
            chunks += rest
            at = found.end()
        chunks[-1] += text[at:]
        ids = [index for chunk in chunks if chunk for index in self._tokenizer.encode(chunk, add_special_tokens=False)]
        return np.asarray(ids, dtype=np.int32)

    def _broken(self, mark: str) -> list[str]:
        """The mark in pieces that hold none."""
        rest = mark[1:]
        return [mark[0], rest] if rest and not any(other in rest for other in self._marks) else list(mark)


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Finds any of the texts, the longest first."""
    found = sorted(set(texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, found))) if found else _NOTHING
