"""Conversations as token ids, in plain lines for small models or through a chat template for all others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnstile.agents.base import Context, Parser, Tokenizer
from turnstile.agents.markers import Markers, special_marks
from turnstile.agents.parsing.lines import LineParser
from turnstile.agents.renderer_chat import ChatRenderer
from turnstile.types import I32, Message, ToolSpec

__all__ = ["ChatRenderer", "LinesRenderer"]


class LinesRenderer:
    """A layout without a template: the prompt, instructions, then each action on its own line followed by its answer.

    An action is everything the model samples up to and including the token that contains the first newline. `prefix` is
    put before everything else, for example a model's begin-of-text token.
    """

    stop: tuple[str, ...] = ("\n",)

    def __init__(self, tokenizer: Tokenizer, *, parser: Parser | None = None, prefix: str = "") -> None:
        self.tokenizer = tokenizer
        self.parser: Parser = LineParser() if parser is None else parser
        self.prefix = prefix
        special = special_marks(tokenizer)
        self._markers = Markers(tokenizer, foreign=special, own=special)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> I32:
        """Return the ids of all messages as lines, with the instructions before the agent's first message; i32[L].

        Each message is encoded separately, so that no token spans two messages.
        """
        first = next((i for i, message in enumerate(messages) if message.role == "assistant"), len(messages))
        texts = [self._line(message, tools) for message in messages]
        quoted = [self._markers.tool(tool) for tool in tools]
        if tools and (instructions := self.parser.instructions(quoted)):
            texts.insert(first, instructions + "\n")
        return self._encode([self.prefix, *texts])

    def observation(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSpec], sampled: I32
    ) -> Context:
        """Return the ids of the new messages as lines, after a newline if the sampled ids lack one.

        The context is never fresh.
        """
        ended = "\n" in self.tokenizer.decode(sampled.tolist(), skip_special_tokens=False)
        return Context(ids=self._encode(["" if ended else "\n", *(self._line(message, tools) for message in new)]))

    def assistant_turn(self, history: Sequence[Message], message: Message, tools: Sequence[ToolSpec]) -> I32:
        """Return the ids of the message's line."""
        return self._encode([self._line(message, tools)])

    def text(self, token_ids: I32) -> str:
        """Return the action, which is the text before the first newline, without special tokens."""
        return self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True).split("\n", 1)[0]

    def completion(self, text: str) -> I32:
        """Return the ids of the first line of `text` and its newline."""
        return self._encode([text.split("\n", 1)[0] + "\n"])

    def _line(self, message: Message, tools: Sequence[ToolSpec]) -> str:
        """Return a message's text, ending in one newline. An action is one line; any other empty message is ""."""
        message = self._markers.message(message)
        if message.role == "assistant":
            return self.parser.write(message, tools).split("\n", 1)[0] + "\n"
        return message.content.rstrip("\n") + "\n" if message.content else ""

    def _encode(self, texts: Sequence[str]) -> I32:
        return np.concatenate([np.zeros(0, np.int32), *(self._markers.encode(text) for text in texts)])
