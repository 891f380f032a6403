"""Conversations for servers that take messages, without a local tokenizer or template."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnstile.agents.base import Context, Parser, with_instructions
from turnstile.agents.parsing.hermes import HermesParser
from turnstile.engines.text_codec import END_ID, decode_text, encode_messages, encode_text
from turnstile.types import I32, Message, ToolSpec


class MessagesRenderer:
    """Messages as they are, encoded as ids by `engines.text_codec`: code points and marks between them.

    The first message describes the tools in the parser's words, and they are called in its syntax, so no server needs
    to support tools; their results are user messages.
    """

    stop: tuple[str, ...] = ()  # the server knows where a message ends

    def __init__(self, *, parser: Parser | None = None) -> None:
        self.parser: Parser = HermesParser() if parser is None else parser

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> I32:
        """Return every message, and the head of the assistant's turn; i32[L]."""
        instructions = with_instructions(self.parser, messages, tools)
        return encode_messages((self._pair(message, tools) for message in instructions), head=True)

    def observation(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSpec], sampled: I32
    ) -> Context:
        """Return the new messages after the assistant's; never fresh."""
        ended = len(sampled) > 0 and int(sampled[-1]) == END_ID
        ids = encode_messages((self._pair(message, tools) for message in new), head=True)
        return Context(ids=ids if ended else np.concatenate([np.array([END_ID], np.int32), ids]))

    def assistant_turn(self, history: Sequence[Message], message: Message, tools: Sequence[ToolSpec]) -> I32:
        """Return the message in the parser's words."""
        return self.completion(self.parser.write(message, tools))

    def text(self, token_ids: I32) -> str:
        """Return the text before the end mark."""
        return decode_text(token_ids)

    def completion(self, text: str) -> I32:
        """Return the text and the end mark."""
        return np.concatenate([encode_text(text), np.array([END_ID], np.int32)])

    def _pair(self, message: Message, tools: Sequence[ToolSpec]) -> tuple[str, str]:
        if message.role == "assistant":
            return "assistant", self.parser.write(message, tools)
        return ("system" if message.role == "system" else "user"), message.content
