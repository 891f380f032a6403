"""One typed conversation of an agent, whatever it was read from, to learn from."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from turnstile.types import Message, ToolSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """What was said, which of it is to be learned, and what the file says came of it.

    It begins with what the assistant answers and ends with the assistant's last message; where the assistant says
    nothing it is empty. `trainable` is one a message, true only for what the assistant said; what is not is shown,
    never taught. `tools` are those that were offered, as
    far as the file tells; calls are numbered in each message as a parser numbers them.
    """

    messages: tuple[Message, ...]
    trainable: tuple[bool, ...]
    tools: tuple[ToolSpec, ...] = ()
    id: str = ""
    task_id: str = ""
    resolved: bool | None = None  # None: the file does not say
    ended: str = ""  # in the file's words: Submitted, LimitsExceeded
    model: str = ""  # who spoke
    patch: str = ""  # what was handed in

    def __post_init__(self) -> None:
        if len(self.messages) != len(self.trainable):
            raise ValueError(f"{len(self.messages)} messages but {len(self.trainable)} flags")


FlaggedMessage = tuple[Message, bool]
"""A message, and whether it may be taught."""


def assemble(said: Iterable[FlaggedMessage], tools: Sequence[ToolSpec] = ()) -> Conversation:
    """The messages of one conversation, in order. Left out are what the assistant says before there is anything to
    answer, and what follows its last message; an empty message of the assistant is never taught."""
    pairs = list(itertools.dropwhile(lambda pair: pair[0].role == "assistant", said))
    while pairs and pairs[-1][0].role != "assistant":
        pairs.pop()
    return Conversation(
        messages=tuple(_numbered([message for message, _ in pairs])),
        trainable=tuple(flag and _speaks(message) for message, flag in pairs),
        tools=tuple(tools),
    )


def _speaks(message: Message) -> bool:
    return message.role == "assistant" and bool(message.content.strip() or message.tool_calls)


def _numbered(messages: Sequence[Message]) -> Iterator[Message]:
    """The messages with the ids of calls as parsers give them, and those of results to match: by id where the calls of
    a message have each their own, else in order."""
    names: dict[str, str] = {}
    waiting: list[str] = []
    for message in messages:
        if message.role == "assistant":
            waiting = [f"call{place:05d}" for place in range(len(message.tool_calls))]
            names = dict(zip((call.id for call in message.tool_calls), waiting, strict=True))
            if len(names) < len(waiting):
                names = {}
            calls = zip(message.tool_calls, list(waiting), strict=True)
            yield replace(message, tool_calls=tuple(replace(call, id=name) for call, name in calls))
        elif message.role == "tool":
            name = names.get(message.tool_call_id or "") or next(iter(waiting), None)
            waiting = [other for other in waiting if other != name]
            yield replace(message, tool_call_id=name)
        else:
            yield message
