"""Demonstrations, and agents that are programs rather than models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnstile.agents.parsing.lines import CALL_ID
from turnstile.types import JSON, Message, ToolCall

Agent = Callable[[Sequence[Message]], Message]
"""The messages since the agent's last action (at first: the prompt) -> its next action."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoStep:
    """One action of a demonstration; one that is not `trainable` is shown, but not learned."""

    message: Message
    trainable: bool = True


def call(name: str, **arguments: JSON) -> Message:
    """Return an assistant's message with one tool call."""
    return Message(role="assistant", tool_calls=(ToolCall(id=CALL_ID, name=name, arguments=arguments),))
