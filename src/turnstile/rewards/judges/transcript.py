"""The transcript of an episode for a judge to read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from turnstile.types import Message, Task, Trajectory

BEGIN, END = "<episode>", "</episode>"
"""The marks around an episode, which nothing inside can imitate."""


def transcript(task: Task, trajectory: Trajectory, *, chars: int, show: Sequence[str] = ()) -> str:
    """Return the messages of an episode, followed by the signals named in `show`.

    The text has about `chars` characters at most: first the middle of long messages is cut, then that of the episode.
    """
    parts = [_part(message, chars // 4) for message in _messages(task, trajectory)]
    parts += [f"[{name}]\n{middle(plain(trajectory.signals.get(name)), chars // 2)}" for name in show]
    text = middle("\n\n".join(parts), chars)
    for mark in (BEGIN, END):
        text = text.replace(mark, mark.replace("<", "< "))
    return f"{BEGIN}\n{text}\n{END}"


def _messages(task: Task, trajectory: Trajectory) -> Iterator[Message]:
    yield from trajectory.opening or ([Message(role="user", content=task.prompt)] if task.prompt else [])
    for turn in trajectory.turns:
        yield turn.message
        yield from turn.observation


def _part(message: Message, chars: int) -> str:
    calls = [f"calls {call.name} {json.dumps(dict(call.arguments), ensure_ascii=False)}" for call in message.tool_calls]
    return "\n".join([f"[{message.role}]", *(middle(text, chars) for text in (message.content, *calls) if text)])


def plain(value: object) -> str:
    """Return a signal as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def middle(text: str, chars: int) -> str:
    """Return the text with its middle replaced by a note if it is longer than `chars`."""
    if len(text) <= chars:
        return text
    half = chars // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
