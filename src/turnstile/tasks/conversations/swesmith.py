"""SWE-smith's trajectories: rows of SWE-bench/SWE-smith-trajectories, and what its scripts collect from SWE-agent.

Columns: messages (JSON text, or a list), instance_id, traj_id, resolved, model, patch. The splits `xml` and `ticks`
have actions in the assistant's text; the split `tool` has tool calls, but not the tools that were offered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from turnstile.tasks.conversations import chat
from turnstile.tasks.conversations.conversation import Conversation


def from_row(row: Mapping[str, Any], where: str) -> Conversation:
    """Return a row as a conversation. Demonstrations shown in the prompt (`is_demo`) are not trained on."""
    messages = chat.as_list(row.get("messages"), "messages", where)
    marked = [{**item, "weight": 0} if isinstance(item, Mapping) and item.get("is_demo") else item for item in messages]
    base = chat.from_row({**row, "messages": marked}, where)
    return replace(base, id=str(row.get("traj_id") or base.id), task_id=str(row.get("instance_id") or base.task_id))
