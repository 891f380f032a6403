"""Conversations for servers that take messages, without a local tokenizer or template."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from turnstile.agents.base import Context, Parser, with_instructions
from turnstile.agents.parsing.hermes import HermesParser
from turnstile.engines.text_codec import END_ID, decode_text, encode_messages, encode_text
from turnstile.types import I32, Message, ToolSpec


class MessagesRenderer:
    """Encodes messages as ids with `engines.text_codec`, as code points separated by marks.

    The parser's instructions are added to the first message, and tools are called in the parser's syntax, so the server
    need not support tools. Tool results become user messages.
    """

    stop: tuple[str, ...] = ()  # the server knows where a message ends

    def __init__(self, *, parser: Parser | None = None) -> None:
        self.parser: Parser = HermesParser() if parser is None else parser

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> I32:
        """Return the ids of all messages and the head of the assistant's turn; i32[L]."""
        instructions = with_instructions(self.parser, messages, tools)
        return encode_messages((self._pair(message, tools) for message in instructions), head=True)

    def observation(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSpec], sampled: I32
    ) -> Context:
        """Return the ids of the new messages, after the end mark if the sampled ids lack it.

        The context is never fresh.
        """
        ended = len(sampled) > 0 and int(sampled[-1]) == END_ID
        ids = encode_messages((self._pair(message, tools) for message in new), head=True)
        return Context(ids=ids if ended else np.concatenate([np.array([END_ID], np.int32), ids]))

    def assistant_turn(self, history: Sequence[Message], message: Message, tools: Sequence[ToolSpec]) -> I32:
        """Return the ids of the message in the parser's syntax, with the end mark."""
        return self.completion(self.parser.write(message, tools))

    def text(self, token_ids: I32) -> str:
        """Return the text before the end mark."""
        return decode_text(token_ids)

    def completion(self, text: str) -> I32:
        """Return the ids of the text and the end mark."""
        return np.concatenate([encode_text(text), np.array([END_ID], np.int32)])

    def _pair(self, message: Message, tools: Sequence[ToolSpec]) -> tuple[str, str]:
        if message.role == "assistant":
            return "assistant", self.parser.write(message, tools)
        return ("system" if message.role == "system" else "user"), message.content
