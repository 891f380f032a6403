"""What checks have found, kept in the cache: a line a task, as it comes, for every file that holds the task.

A task is known by a digest of its line, so that a copy, a half or a shuffled file is known too, and a task that was
changed is another one. What was found under another Python or system is that one's, and is not looked at.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnstile.cache import cache_dir
from turnstile.tasks import journal
from turnstile.tasks.base import dump_task
from turnstile.tasks.swe.grading.findings import Ask, CheckedTask
from turnstile.types import Task

_LISTS = ("gold", "empty", "flaky", "wins", "tried")


class Notes:
    """The notes of one kind of sandbox, as they were when this was made and with what was added since."""

    def __init__(self, sandbox: str = "local", *, known: bool = True, failures: bool = True) -> None:
        """`known`: whether what was noted before counts; `failures`: whether a task that something speaks against
        is noted, or looked at again each time."""
        self._failures = failures
        self._setting = {**_setting(), "sandbox": sandbox}
        self._known: dict[str, list[tuple[Ask, Mapping[str, Any]]]] = {}
        for record in _records() if known else ():
            if record["setting"] == self._setting:
                self._keep(record["digest"], Ask(**_tuples(record["ask"], "cheats")), record["found"])

    def of(self, task: Task, ask: Ask) -> CheckedTask | None:
        """What was found when the task was last asked at least as much; None where it was not."""
        for asked, found in reversed(self._known.get(digest(task), ())):
            if asked.covers(ask):
                return CheckedTask(task=task, **_tuples(found, *_LISTS), remembered=True)
        return None

    def add(self, found: CheckedTask, ask: Ask) -> None:
        """Notes what was found; what could not be found out is no note. Raises TaskError as `journal.append`."""
        if found.unknown is not None or (found.why is not None and not self._failures):
            return
        facts = {
            field.name: getattr(found, field.name)
            for field in dataclasses.fields(found)
            if field.name not in ("task", "unknown", "remembered")
        }
        name = digest(found.task)
        record = {
            "digest": name, "id": found.task.id, "setting": self._setting, "ask": dataclasses.asdict(ask),
            "why": found.why, "found": facts,
        }  # fmt: skip
        journal.append(place(), json.dumps(record))
        self._keep(name, ask, facts)

    def _keep(self, name: str, ask: Ask, found: Mapping[str, Any]) -> None:
        self._known.setdefault(name, []).append((ask, found))


def failed_before(tasks: Sequence[Task]) -> dict[str, str]:
    """Which of `tasks` failed when they were last checked here, in whatever sandbox, and why."""
    mine = {digest(task): task.id for task in tasks}
    last = {
        record["digest"]: record["why"]
        for record in _records()
        if record["digest"] in mine and _setting().items() <= record["setting"].items()
    }
    return {mine[name]: why for name, why in last.items() if why is not None}


def place() -> Path:
    """Where the notes are kept."""
    return cache_dir() / "swe" / "checks.jsonl"


def digest(task: Task) -> str:
    return hashlib.sha256(dump_task(task).encode()).hexdigest()[:16]


def _records() -> Iterator[Any]:
    return journal.read(place())


def _setting() -> dict[str, str]:
    """What a verdict depends on beside the task."""
    return {
        "python": sys.version,
        "platform": platform.platform(),
        "pytest": importlib.metadata.version("pytest"),
    }


def _tuples(record: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: tuple(value) if name in names else value for name, value in record.items()}
