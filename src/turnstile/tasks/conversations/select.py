"""Selection of conversations to train on, and external data about them."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from turnstile.errors import TaskError
from turnstile.tasks.conversations import chat
from turnstile.tasks.conversations.conversation import Conversation
from turnstile.types import JSON, ToolSpec


def refusal(conversation: Conversation, *, resolved: bool = False, ended: Collection[str] = ()) -> str:
    """Return why a conversation is not selected, or "" if it is.

    `resolved` selects conversations whose task was solved, and `ended` those with one of these exit statuses.
    """
    if not any(conversation.trainable):
        return "nothing to learn"
    if resolved and not conversation.resolved:
        return "not resolved" if conversation.resolved is False else "not known whether it was resolved"
    if ended and conversation.ended not in ended:
        return f"ended otherwise ({conversation.ended})" if conversation.ended else "not known how it ended"
    return ""


def with_report(conversation: Conversation, resolved: Collection[str]) -> Conversation:
    """Return the conversation with `resolved` set according to a report's resolved tasks."""
    return replace(conversation, resolved=(conversation.task_id or conversation.id) in resolved)


def read_report(file: str | Path) -> frozenset[str]:
    """Return the tasks that a report of SWE-bench's harness lists as resolved.

    Raises TaskError if the file is not such a report.
    """
    report = _json(file)
    ids = report.get("resolved_ids") if isinstance(report, dict) else None
    if not isinstance(ids, list):
        raise TaskError(f"{file}: not a report of SWE-bench's harness; it needs resolved_ids, a list of tasks")
    return frozenset(map(str, ids))


def read_tools(file: str | Path) -> tuple[ToolSpec, ...]:
    """Return the tools in a JSON file, a list in OpenAI's format. Raises TaskError if the file is not such a list."""
    return chat.tools_of(_json(file), str(file))


def _json(file: str | Path) -> JSON:
    try:
        return json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskError(f"{file}: it cannot be read ({error})") from error
