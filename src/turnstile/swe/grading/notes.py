"""Keep the findings of checks in the cache, one line per check, for every file that holds the task.

A task is identified by a digest of its line, so it is recognised in a copy, a part or a shuffled version of its file,
and a changed task is a new one. Findings made with another Python or system are not used. A failure stands until a
check that is at least as thorough finds none.
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
_MANY = ("workers", "pool")  # knobs for the number of sandboxes, not for what they are
_LISTS = ("gold", "empty", "flaky", "wins", "tried")


class Notes:
    """The notes for one section of sandboxes: those on disk when this was made, and those added since.

    The section for instances has no `image`, because each instance names its own.
    """

    def __init__(self, sandbox: Mapping[str, Any] = LOCAL, *, known: bool = True, failures: bool = True) -> None:
        """Read the notes for a section of sandboxes.

        `known` tells whether earlier notes count. `failures` tells whether a bad task is noted; if not, it is checked
        again each time.
        """
        self._failures = failures
        self._setting = {**_setting(), "sandbox": sandbox["kind"], "section": _section(sandbox)}
        self._known: dict[str, list[tuple[Ask, Mapping[str, Any]]]] = {}
        self._failed: dict[str, Ask] = {}
        for record in _records() if known else ():
            if record["setting"] == self._setting:
                self._keep(record["digest"], _read_ask(record), record["found"], record["why"])

    def of(self, task: Task, ask: Ask) -> CheckedTask | None:
        """Return the findings of the last check that was at least as thorough as `ask`; None if there was none."""
        for asked, found in reversed(self._known.get(digest(task), ())):
            if asked.covers(ask):
                return CheckedTask(task=task, **_tuples(found, *_LISTS), remembered=True)
        return None

    def add(self, found: CheckedTask, ask: Ask) -> None:
        """Note the findings of a check. Raises TaskError as `jsonl_log.append` does.

        Findings are not noted if something could not be found out, or this machine lacks something that the task needs.
        """
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
        if before != after:  # earlier notes no longer fit what is known of failures
            self._known[name] = []
        self._known.setdefault(name, []).append((ask, found))


def failed_before(tasks: Sequence[Task]) -> dict[str, str]:
    """Return which of `tasks` failed when they were checked here, in any sandbox, and why.

    A later, less thorough check does not clear a failure.
    """
    mine = {digest(task): task.id for task in tasks}
    setting = _setting()
    failed: dict[str, tuple[Ask | None, str]] = {}
    for record in _records():
        name = record["digest"]
        if name in mine and setting.items() <= record["setting"].items():
            before, known_why = failed.get(name, (None, ""))
            failed[name] = (_standing(before, _read_ask(record), record["why"]), record["why"] or known_why)
    return {mine[name]: why for name, (ask, why) in failed.items() if ask is not None}


def _standing(failed: Ask | None, ask: Ask, why: str | None) -> Ask | None:
    """Return how thorough a check must be to clear a task's failures; None if there are none to clear.

    `failed` was the answer before the check `ask`, which found `why`.
    """
    if why is not None:
        return ask if failed is None else ask.joined(failed)
    return None if failed is None or ask.covers(failed) else failed


def place() -> Path:
    """Return the path of the file with the notes."""
    return cache_dir() / "swe" / "checks.jsonl"


def digest(task: Task) -> str:
    """Return 16 hex digits that identify the task by its content."""
    return hashlib.sha256(dump_task(task).encode()).hexdigest()[:16]


def _records() -> Iterator[Any]:
    return jsonl_log.read(place())


def _setting() -> dict[str, str]:
    """Return what a verdict depends on besides the task and the sandboxes."""
    return {
        "python": sys.version,
        "platform": platform.platform(),
        "pytest": importlib.metadata.version("pytest"),
    }


def _section(sandbox: Mapping[str, Any]) -> str:
    """Return a digest of the knobs that determine what the sandboxes are like."""
    knobs = {name: value for name, value in sandbox.items() if name not in _MANY}
    return hashlib.sha256(json.dumps(knobs, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _read_ask(record: Mapping[str, Any]) -> Ask:
    return Ask(**_tuples(record["ask"], "cheats"))


def _tuples(record: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: tuple(value) if name in names else value for name, value in record.items()}
