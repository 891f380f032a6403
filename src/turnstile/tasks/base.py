"""Task files (JSON lines), and the deterministic order in which training draws their tasks."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnstile.errors import TaskError
from turnstile.lookup import nearest
from turnstile.tasks.rows import write_lines
from turnstile.types import JSON, Task

_FIELDS: Mapping[str, type] = {"id": str, "env": str, "prompt": str, "data": dict, "seed": int}


def task_to_json(task: Task) -> dict[str, JSON]:
    """Return the task as a JSON object. An empty prompt and a seed of 0 are omitted."""
    record: dict[str, JSON] = {"id": task.id, "env": task.env}
    if task.prompt:
        record["prompt"] = task.prompt
    if task.seed:
        record["seed"] = task.seed
    record["data"] = dict(task.data)
    return record


def task_from_json(record: JSON, where: str = "task") -> Task:
    """Return the task that a JSON object describes. Raises TaskError naming `where` and the wrong field."""
    if not isinstance(record, dict):
        raise TaskError(f"{where}: a task is a JSON object, this is {type(record).__name__}")
    for key in record:
        if key not in _FIELDS:
            raise TaskError(f"{where}: unknown field {key!r}; {nearest(key, _FIELDS)}")
    for key in ("id", "env"):
        if not record.get(key):
            raise TaskError(f"{where}: field {key!r} is missing or empty")
    for key, value in record.items():
        expected = _FIELDS[key]
        if not isinstance(value, expected) or isinstance(value, bool):
            raise TaskError(f"{where}: field {key!r} must be {expected.__name__}, not {type(value).__name__}")
    return Task(**record)


def load_tasks(path: str | Path) -> list[Task]:
    """Return the tasks of a JSON lines file, in file order. Empty lines are skipped.

    Raises TaskError with file and line for text that is not JSON, a wrong field or a repeated id, and with the file for
    a file that is missing or has no task.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TaskError(f"{path}: the task file cannot be read ({error.strerror}); check the path") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: the task file is not UTF-8 text (byte {error.start})") from error
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise TaskError(f"{where}: not JSON ({error.msg}, column {error.colno}); write one task a line") from error
        task = task_from_json(record, where)
        if task.id in seen:
            raise TaskError(f"{where}: id {task.id!r} is already used in line {seen[task.id]}; ids are unique")
        seen[task.id] = number
        tasks.append(task)
    if not tasks:
        raise TaskError(f"{path}: the task file has no task; write one JSON object a line")
    return tasks


def dump_task(task: Task) -> str:
    """Return the task's line in a task file, without the newline."""
    return json.dumps(task_to_json(task), ensure_ascii=False, separators=(",", ":"))


def write_tasks(path: str | Path, tasks: Iterable[Task]) -> int:
    """Write a task file atomically, so that readers see the old file or the new one, and return the number of tasks."""
    return write_lines(path, map(dump_task, tasks))


@dataclasses.dataclass(slots=True)
class TaskSampler:
    """Draws tasks endlessly. Each epoch is a permutation of all tasks that depends only on (seed, epoch).

    Raises TaskError if there are no tasks. `restore` rejects the state of a sampler with other tasks, since continuing
    from it would silently repeat and skip tasks.
    """

    tasks: Sequence[Task]
    seed: int = 0
    _epoch: int = dataclasses.field(default=0, init=False)
    _index: int = dataclasses.field(default=0, init=False)
    _order: list[int] = dataclasses.field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.tasks = tuple(self.tasks)
        if not self.tasks:
            raise TaskError("a sampler needs at least one task")
        self._order = self._permutation()

    @property
    def epoch(self) -> int:
        """Number of epochs that ended before the current one."""
        return self._epoch

    def next(self, n: int) -> list[Task]:
        """Draw the next n tasks. Within an epoch each task is drawn exactly once."""
        chosen: list[Task] = []
        for _ in range(n):
            if self._index == len(self._order):
                self._epoch, self._index = self._epoch + 1, 0
                self._order = self._permutation()
            chosen.append(self.tasks[self._order[self._index]])
            self._index += 1
        return chosen

    def peek(self, n: int) -> list[Task]:
        """Return the tasks that `next` will draw, without drawing them."""
        return copy.copy(self).next(n)

    def state(self) -> dict[str, JSON]:
        """Return the position, as small JSON."""
        return {"epoch": self._epoch, "index": self._index, "seed": self.seed, "tasks": self._digest()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Raises TaskError if it was saved with other tasks or another seed."""
        for key, own in (("seed", self.seed), ("tasks", self._digest())):
            if state[key] != own:
                raise TaskError(f"the sampler's state has {key} {state[key]}, this run has {own}; use the same tasks")
        self._epoch, self._index = int(state["epoch"]), int(state["index"])
        self._order = self._permutation()

    def _digest(self) -> str:
        """Return the number of tasks and a digest of their ids, as one string."""
        ids = "\n".join(task.id for task in self.tasks).encode()
        return f"{len(self.tasks)}:{hashlib.blake2b(ids, digest_size=8).hexdigest()}"

    def _permutation(self) -> list[int]:
        order = list(range(len(self.tasks)))
        random.Random(f"tasks/{self.seed}/{self._epoch}").shuffle(order)
        return order
