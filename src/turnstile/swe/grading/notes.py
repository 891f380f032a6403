"""What checks have found, kept in the cache: a line a task, as it comes, for every file that holds the task.

A task is known by a digest of its line, so that a copy, a half or a shuffled file is known too, and a task that was
changed is another one. What was found under another Python or system is that one's, and is not looked at. A failure
stands until a check that asked at least as much finds none.
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
from turnstile.swe.grading.findings import Ask, CheckedTask
from turnstile.tasks import jsonl_log
from turnstile.tasks.base import dump_task
from turnstile.types import Task

LOCAL: Mapping[str, Any] = {"kind": "local"}
_MANY = ("workers", "pool")  # knobs that say how many sandboxes there are, and not what they are
_LISTS = ("gold", "empty", "flaky", "wins", "tried")


class Notes:
    """The notes of one section of sandboxes, as they were when this was made and with what was added since.

    The section of instances is without `image`: each starts from its own, which its line names.
    """

    def __init__(self, sandbox: Mapping[str, Any] = LOCAL, *, known: bool = True, failures: bool = True) -> None:
        """`known`: whether what was noted before counts; `failures`: whether a task that something speaks against
        is noted, or looked at again each time."""
        self._failures = failures
        self._setting = {**_setting(), "sandbox": sandbox["kind"], "section": _section(sandbox)}
        self._known: dict[str, list[tuple[Ask, Mapping[str, Any]]]] = {}
        self._failed: dict[str, Ask] = {}
        for record in _records() if known else ():
            if record["setting"] == self._setting:
                self._keep(record["digest"], _asked(record), record["found"], record["why"])

    def of(self, task: Task, ask: Ask) -> CheckedTask | None:
        """What was found when the task was last asked at least as much; None where it was not."""
        for asked, found in reversed(self._known.get(digest(task), ())):
            if asked.covers(ask):
                return CheckedTask(task=task, **_tuples(found, *_LISTS), remembered=True)
        return None

    def add(self, found: CheckedTask, ask: Ask) -> None:
        """Notes what was found; what could not be found out, or came of what the task needs and
        this machine has not, is no note. Raises TaskError as `jsonl_log.append`."""
        if found.unknown is not None or found.unready is not None or (found.why is not None and not self._failures):
            return
        facts = {
            field.name: getattr(found, field.name)
            for field in dataclasses.fields(found)
            if field.name not in ("task", "unready", "unknown", "remembered")
        }
        name = digest(found.task)
        record = {
            "digest": name, "id": found.task.id, "setting": self._setting, "ask": dataclasses.asdict(ask),
            "why": found.why, "found": facts,
        }  # fmt: skip
        jsonl_log.append(place(), json.dumps(record))
        self._keep(name, ask, facts, found.why)

    def _keep(self, name: str, ask: Ask, found: Mapping[str, Any], why: str | None) -> None:
        before = self._failed.pop(name, None)
        after = _standing(before, ask, why)
        if after is not None:
            self._failed[name] = after
            if why is None:
                return
        if before != after:  # what was noted before speaks of a task that does not fail, or of one that does
            self._known[name] = []
        self._known.setdefault(name, []).append((ask, found))


def failed_before(tasks: Sequence[Task]) -> dict[str, str]:
    """Which of `tasks` failed when they were checked here, in whatever sandbox, and why; a later check that asked less
    does not take that back."""
    mine = {digest(task): task.id for task in tasks}
    setting = _setting()
    failed: dict[str, tuple[Ask | None, str]] = {}
    for record in _records():
        name = record["digest"]
        if name in mine and setting.items() <= record["setting"].items():
            before, said = failed.get(name, (None, ""))
            failed[name] = (_standing(before, _asked(record), record["why"]), record["why"] or said)
    return {mine[name]: why for name, (ask, why) in failed.items() if ask is not None}


def _standing(failed: Ask | None, ask: Ask, why: str | None) -> Ask | None:
    """What a check must ask to lift the failures of a task, None where none stands: `failed` until the check `ask`,
    which found `why`."""
    if why is not None:
        return ask if failed is None else ask.joined(failed)
    return None if failed is None or ask.covers(failed) else failed


def place() -> Path:
    """Where the notes are kept."""
    return cache_dir() / "swe" / "checks.jsonl"


def digest(task: Task) -> str:
    """Return 16 hex digits that tell this task from any other."""
    return hashlib.sha256(dump_task(task).encode()).hexdigest()[:16]


def _records() -> Iterator[Any]:
    return jsonl_log.read(place())


def _setting() -> dict[str, str]:
    """What a verdict depends on beside the task."""
    return {
        "python": sys.version,
        "platform": platform.platform(),
        "pytest": importlib.metadata.version("pytest"),
    }


def _section(sandbox: Mapping[str, Any]) -> str:
    """A digest of what makes sandboxes what they are."""
    knobs = {name: value for name, value in sandbox.items() if name not in _MANY}
    return hashlib.sha256(json.dumps(knobs, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _asked(record: Mapping[str, Any]) -> Ask:
    return Ask(**_tuples(record["ask"], "cheats"))


def _tuples(record: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: tuple(value) if name in names else value for name, value in record.items()}
