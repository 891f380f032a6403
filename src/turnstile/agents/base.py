"""Messages to tokens and back: the two protocols of an agent, and the scaffold that joins them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from turnstile.types import I32, Message, ToolSpec


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that this room uses."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Return the ids of a text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str:
        """Return the text of ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The ids to feed before the next turn. With `fresh` they replace everything before them."""

    ids: I32
    fresh: bool = False


@runtime_checkable
class Parser(Protocol):
    """The syntax of actions: text of the model <-> tool calls."""

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Message:
        """Return the assistant's message in `text`, without tool calls if none could be read. Never raises."""
        ...

    def write(self, message: Message, tools: Sequence[ToolSpec]) -> str:
        """Return the text that a model would have written for `message`: the inverse of `parse`."""
        ...

    def instructions(self, tools: Sequence[ToolSpec]) -> str:
        """Return how to call the tools, for the prompt; "" if the chat template says it itself."""
        ...


@runtime_checkable
class Renderer(Protocol):
    """The layout of a conversation in token ids. Sampled ids are never changed.

    `history` always ends with the assistant's message whose ids were sampled; `sampled` are those ids (they may lack
    the end marker if the token limit cut them).
    """

    stop: tuple[str, ...]  # strings that end a turn

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> I32:
        """Return the whole prompt, up to where the assistant's tokens begin."""
        ...

    def observation(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSpec], sampled: I32
    ) -> Context:
        """Return exactly the ids that a full render of history + new would add after the sampled tokens."""
        ...

    def assistant_turn(self, history: Sequence[Message], message: Message, tools: Sequence[ToolSpec]) -> I32:
        """Return the ids of an assistant's message that was not sampled, to learn from.

        They are those that follow `prompt(history, tools)` in a full render, with the end marker.
        """
        ...

    def text(self, token_ids: I32) -> str:
        """Return the text of sampled ids, without the end marker."""
        ...

    def completion(self, text: str) -> I32:
        """Return the ids of an assistant's text with the end marker, as a model would have sampled them."""
        ...


@dataclass(frozen=True, slots=True)
class Scaffold:
    """An agent's renderer and parser. The episode talks to the model only through them."""

    renderer: Renderer
    parser: Parser


def with_instructions(parser: Parser, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
    """Return the messages with the parser's instructions at the end of the first one."""
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
