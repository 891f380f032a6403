"""Demonstrations, and agents that are programs rather than models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnstile.agents.parsing.lines import CALL_ID
from turnstile.types import JSON, Message, ToolCall

Agent = Callable[[Sequence[Message]], Message]
"""Maps the messages since the agent's last action (at first the prompt) to its next action."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoStep:
    """One action of a demonstration. If it is not `trainable`, it is shown but not trained on."""

    message: Message
    trainable: bool = True


def call(name: str, **arguments: JSON) -> Message:
    """Return an assistant's message with one tool call."""
    return Message(role="assistant", tool_calls=(ToolCall(id=CALL_ID, name=name, arguments=arguments),))
