"""A typed conversation of an agent to train on, independent of its source format."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from turnstile.types import Message, ToolSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """The messages, which of them to train on, and the result that the file gives.

    It begins with a message for the assistant to answer and ends with the assistant's last message; it is empty if the
    assistant has no message. `trainable` has one flag per message, true only for messages of the assistant; the other
    messages are shown but not trained on. `tools` are the offered tools, if the file gives them. Tool calls are
    numbered within each message as a parser numbers them.
    """

    messages: tuple[Message, ...]
    trainable: tuple[bool, ...]
    tools: tuple[ToolSpec, ...] = ()
    id: str = ""
    task_id: str = ""
    resolved: bool | None = None  # None: the file does not say
    ended: str = ""  # exit status as given in the file, such as Submitted or LimitsExceeded
    model: str = ""  # name of the assistant's model
    patch: str = ""  # the submitted patch

    def __post_init__(self) -> None:
        if len(self.messages) != len(self.trainable):
            raise ValueError(f"{len(self.messages)} messages but {len(self.trainable)} flags")


FlaggedMessage = tuple[Message, bool]
"""A message, and whether it may be trained on."""


def assemble(flagged: Iterable[FlaggedMessage], tools: Sequence[ToolSpec] = ()) -> Conversation:
    """Return the conversation of these messages, in order.

    The assistant's messages before there is anything to answer are omitted, and so are messages after its last one. An
    empty message of the assistant is never trained on.
    """
    pairs = list(itertools.dropwhile(lambda pair: pair[0].role == "assistant", flagged))
    while pairs and pairs[-1][0].role != "assistant":
        pairs.pop()
    return Conversation(
        messages=tuple(with_parser_ids([message for message, _ in pairs])),
        trainable=tuple(flag and _has_content(message) for message, flag in pairs),
        tools=tuple(tools),
    )


def _has_content(message: Message) -> bool:
    return message.role == "assistant" and bool(message.content.strip() or message.tool_calls)


def with_parser_ids(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages with the tool call ids that parsers assign, and matching ids for results.

    Results are matched by id if the calls of a message have distinct ids, else by order.
    """
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
            waiting = [call_id for call_id in waiting if call_id != name]
            yield replace(message, tool_call_id=name)
        else:
            yield message
