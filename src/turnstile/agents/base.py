"""Messages to tokens and back: the two protocols an agent is made of, and the scaffold that joins them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from turnstile.types import I32, Message, ToolSpec


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that this room uses."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What to feed before the next turn. `fresh` means: these ids replace everything that came before."""

    ids: I32
    fresh: bool = False


@runtime_checkable
class Parser(Protocol):
    """The syntax of actions: text the model wrote <-> tool calls."""

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> Message:
        """The assistant's message in `text`; without tool calls where nothing could be read. Never raises."""
        ...

    def write(self, message: Message, tools: Sequence[ToolSpec]) -> str:
        """The text a model would have written for `message`: the inverse of `parse`."""
        ...

    def instructions(self, tools: Sequence[ToolSpec]) -> str:
        """How to call the tools, for the prompt; "" where the chat template says it itself."""
        ...


@runtime_checkable
class Renderer(Protocol):
    """The layout of a conversation in token ids. Sampled ids are never touched again.

    `history` always ends with the assistant's message whose ids were sampled; `sampled` are those ids (they
    may lack the end marker when the token limit cut them).
    """

    stop: tuple[str, ...]  # strings that end a turn

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> I32:
        """The whole prompt, up to where the assistant's tokens begin."""
        ...

    def observation(
        self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSpec], sampled: I32
    ) -> Context:
        """Exactly the ids a full render of history + new would add after the sampled tokens."""
        ...

    def assistant_turn(self, history: Sequence[Message], message: Message, tools: Sequence[ToolSpec]) -> I32:
        """The ids of an assistant's message behind `prompt(history, tools)` as a full render has them, with the end
        marker: what is learned where somebody else wrote the message."""
        ...

    def text(self, token_ids: I32) -> str:
        """How sampled ids read, without the end marker."""
        ...

    def completion(self, text: str) -> I32:
        """The ids of an assistant's text with the end marker, as a model would have sampled them."""
        ...


@dataclass(frozen=True, slots=True)
class Scaffold:
    """An agent's two halves. The episode speaks to the model through this and nothing else."""

    renderer: Renderer
    parser: Parser


def with_instructions(parser: Parser, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
    """The messages with the parser's instructions at the end of the first one."""
    told = parser.instructions(tools) if tools else ""
    if not told or not messages:
        return list(messages)
    if messages[0].role == "assistant":
        return [Message(role="user", content=told), *messages]
    first = messages[0]
    return [replace(first, content=f"{first.content}\n\n{told}" if first.content else told), *messages[1:]]
