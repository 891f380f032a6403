"""Conversations from the files of others: which format a row has, and all of a source one after the other."""

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

Read = Callable[[Mapping[str, Any], str], Conversation]
FORMATS: Mapping[str, Read] = {
    "chat": chat.read,
    "sharegpt": sharegpt.read,
    "swe-smith": swesmith.read,
    "mini-swe-agent": mini.read,
}
_TRAJECTORY = ".traj.json"


def conversations(
    source: str | Path,
    format: str = "auto",
    *,
    split: str = "",
    bad: Callable[[TaskError], None] | None = None,
) -> Iterator[Conversation]:
    """The conversations of a file, of the files in a folder, or of a data set on the hub (OWNER/NAME), one by one.

    `format` is one of FORMATS, by default told from the columns. `split` chooses among several files. In a folder that
    holds `*.traj.json` files, those are read and no others. `bad` is given the error of each row that cannot be read,
    which is then left out; without it the error is raised: TaskError naming file, row and message.
    """
    if format != "auto" and format not in FORMATS:
        raise TaskError(f"unknown conversation format {format!r}; {nearest(format, (*FORMATS, 'auto'))}")
    for file in _files(Path(source), source, split):
        for number, (where, row) in enumerate(read_rows(file, bad), start=1):
            try:
                found = FORMATS[_detected_format(row, where) if format == "auto" else format](row, where)
            except TaskError as error:
                if bad is None:
                    raise
                bad(error)
                continue
            yield found if found.id else replace(found, id=_name(file, number))


def read_conversations(source: str | Path) -> list[Conversation]:
    """All conversations of a source, whatever their formats. Raises TaskError as above, and where there is none."""
    found = list(conversations(source))
    if not found:
        raise TaskError(f"{source}: it holds no conversation")
    return found


def _files(path: Path, source: str | Path, split: str) -> list[Path]:
    trajectories = sorted(path.rglob(f"*{_TRAJECTORY}")) if path.is_dir() else []
    return trajectories or files_of(source, split)


def _name(file: Path, number: int) -> str:
    """What a conversation is called that has no name of its own."""
    return file.name.removesuffix(_TRAJECTORY) if file.name.endswith(_TRAJECTORY) else f"{file.name}:{number}"


def _detected_format(row: Mapping[str, Any], where: str) -> str:
    """The format of a row, told from its columns."""
    if "conversations" in row or "conversation" in row:
        return "sharegpt"
    if "messages" not in row:
        raise TaskError(f"{where}: it has neither messages nor conversations; known formats: {', '.join(FORMATS)}")
    if "info" in row and "trajectory_format" in row:
        return "mini-swe-agent"
    return "swe-smith" if "traj_id" in row or "instance_id" in row else "chat"
