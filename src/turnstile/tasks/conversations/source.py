"""Conversations from external files: detection of a row's format, and iteration over a source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnstile.errors import TaskError
from turnstile.lookup import nearest
from turnstile.tasks.conversations import chat, mini, sharegpt, swesmith
from turnstile.tasks.conversations.conversation import Conversation
from turnstile.tasks.rows import files_of, read_rows

FromRow = Callable[[Mapping[str, Any], str], Conversation]
FORMATS: Mapping[str, FromRow] = {
    "chat": chat.from_row,
    "sharegpt": sharegpt.from_row,
    "swe-smith": swesmith.from_row,
    "mini-swe-agent": mini.from_row,
}
_TRAJECTORY = ".traj.json"


def conversations(
    source: str | Path,
    format: str = "auto",
    *,
    split: str = "",
    on_error: Callable[[TaskError], None] | None = None,
) -> Iterator[Conversation]:
    """Yield the conversations of a file, of the files in a folder, or of a data set on the hub (OWNER/NAME).

    `format` is one of FORMATS, by default detected from the columns. `split` selects among several files. In a folder
    with `*.traj.json` files, only those are read. A row that cannot be read is skipped and its error passed to
    `on_error`; without `on_error` it is raised, a TaskError naming file, row and message.
    """
    if format != "auto" and format not in FORMATS:
        raise TaskError(f"unknown conversation format {format!r}; {nearest(format, (*FORMATS, 'auto'))}")
    for file in _files(Path(source), source, split):
        for number, (where, row) in enumerate(read_rows(file, on_error), start=1):
            try:
                conversation = FORMATS[_detect_format(row, where) if format == "auto" else format](row, where)
            except TaskError as error:
                if on_error is None:
                    raise
                on_error(error)
                continue
            yield conversation if conversation.id else replace(conversation, id=_default_id(file, number))


def read_conversations(source: str | Path) -> list[Conversation]:
    """Return all conversations of a source, with formats detected.

    Raises TaskError as `conversations` does, and if there is none.
    """
    result = list(conversations(source))
    if not result:
        raise TaskError(f"{source}: it has no conversation")
    return result


def _files(path: Path, source: str | Path, split: str) -> list[Path]:
    trajectories = sorted(path.rglob(f"*{_TRAJECTORY}")) if path.is_dir() else []
    return trajectories or files_of(source, split)


def _default_id(file: Path, number: int) -> str:
    """Return the id for a conversation that has none of its own."""
    return file.name.removesuffix(_TRAJECTORY) if file.name.endswith(_TRAJECTORY) else f"{file.name}:{number}"


def _detect_format(row: Mapping[str, Any], where: str) -> str:
    """Return the format of a row, detected from its columns."""
    if "conversations" in row or "conversation" in row:
        return "sharegpt"
    if "messages" not in row:
        raise TaskError(f"{where}: it has neither messages nor conversations; known formats: {', '.join(FORMATS)}")
    if "info" in row and "trajectory_format" in row:
        return "mini-swe-agent"
    return "swe-smith" if "traj_id" in row or "instance_id" in row else "chat"
