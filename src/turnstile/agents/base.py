"""The conversion of messages to tokens and back: an agent's two protocols and the scaffold that combines them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from turnstile.types import I32, Message, ToolSpec


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that agents use."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Return the ids of a text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """Return the text of a sequence of ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The ids to feed before the next turn. If `fresh`, they replace all earlier ids instead of following them."""

    ids: I32
    fresh: bool = False


@runtime_checkable
class Parser(Protocol):
    """The syntax of actions, which converts between the model's text and tool calls."""

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Message:
        """Return `text` as an assistant's message, without tool calls if none could be parsed. Never raises."""
        ...

    def write(self, message: Message, tools: Sequence[ToolSpec]) -> str:
        """Return the text that a model would have written for `message`. This is the inverse of `parse`."""
        ...

    def instructions(self, tools: Sequence[ToolSpec]) -> str:
        """Return instructions for calling the tools, for the prompt; "" if the chat template gives them itself."""
        ...


@runtime_checkable
class Renderer(Protocol):
    """The layout of a conversation as token ids. Sampled ids are never changed.

    In `observation`, `history` ends with the assistant's message that was sampled, and `sampled` are the ids of that
    message, which lack the end marker if the token limit cut them short.
    """

    stop: tuple[str, ...]  # strings that end a turn

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> I32:
        """Return the whole prompt, up to the point where the assistant's tokens begin."""
        ...

    def observation(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSpec], sampled: I32
    ) -> Context:
        """Return the context after the sampled tokens, exactly what a full render of history + new adds there."""
        ...

    def assistant_turn(self, history: Sequence[Message], message: Message, tools: Sequence[ToolSpec]) -> I32:
        """Return the ids of an assistant's message that was not sampled, for training on it.

        They are the ids that follow `prompt(history, tools)` in a full render, including the end marker.
        """
        ...

    def text(self, token_ids: I32) -> str:
        """Return the text of sampled ids, without the end marker."""
        ...

    def completion(self, text: str) -> I32:
        """Return the ids of an assistant's text and the end marker, as a model would have sampled them."""
        ...


@dataclass(frozen=True, slots=True)
class Scaffold:
    """An agent's renderer and parser, the only interface between the episode and the model's text."""

    renderer: Renderer
    parser: Parser


def with_instructions(parser: Parser, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
    """Return the messages with the parser's instructions appended to the first one.

    If the first message is the assistant's, a user message with the instructions is put before it.
    """
    instructions = parser.instructions(tools) if tools else ""
    if not instructions or not messages:
        return list(messages)
    if messages[0].role == "assistant":
        return [Message(role="user", content=instructions), *messages]
    first = messages[0]
    return [
        replace(first, content=f"{first.content}\n\n{instructions}" if first.content else instructions),
        *messages[1:],
    ]
