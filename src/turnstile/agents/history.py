"""The context before each turn of an episode, as messages and as ids, and the insertion of hints into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from turnstile.types import I32, Message, Trajectory


def with_hint(messages: Sequence[Message], hint: str) -> tuple[Message, ...]:
    """Return the messages with a hint at the end of the last one, or in a new user message if it is not the user's."""
    if not hint:
        return tuple(messages)
    if messages and messages[-1].role == "user":
        last = messages[-1]
        return (*messages[:-1], replace(last, content=f"{last.content}\n\n{hint}" if last.content else hint))
    return (*messages, Message(role="user", content=hint))


def messages_before(trajectory: Trajectory, turn: int, *, hint: str = "") -> tuple[Message, ...]:
    """Return the conversation before turn `turn`, numbered from 0. The number of turns gives the whole conversation.

    `hint` is added to the opening, after the trajectory's own hint.
    """
    shown = with_hint(trajectory.opening, trajectory.hint)
    played = [part for past in trajectory.turns[:turn] for part in (past.message, *past.observation)]
    return (*with_hint(shown, hint), *played)


def ids_before(trajectory: Trajectory) -> list[I32]:
    """Return the whole prompt of each of the K turns, as K arrays i32[L] of different lengths."""
    prompts: list[I32] = []
    held = np.zeros(0, np.int32)
    for turn in trajectory.turns:
        held = turn.context_ids if turn.fresh else np.concatenate([held, turn.context_ids])
        prompts.append(held)
        held = np.concatenate([held, turn.completion.token_ids])
    return prompts
