"""Train and held-out halves that share no function, or no package; and one fair order over several packages.

A key's side depends on (seed, key) alone, so a file that grows moves no task to the other side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence

from turnstile.errors import TaskError
from turnstile.swe.bug import Bug
from turnstile.swe.formats.instance import INSTANCE, instance_of
from turnstile.types import Task


def _share(seed: int, key: str) -> float:
    """Return a number in [0, 1) drawn from (seed, key)."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{key}".encode()).digest()[:8]) / 2**64


def _place(task: Task) -> tuple[str, str]:
    """Return a task's package (an instance's repository), and its function (the instance itself, which shares none)."""
    if task.env == INSTANCE:
        instance = instance_of(task)
        return instance.repo, instance.id
    bug = Bug.of(task)
    return bug.package, f"{bug.label}/{bug.file}/{bug.function}"


def _split(tasks: Sequence[Task], out: Callable[[str, str], bool]) -> tuple[list[Task], list[Task]]:
    train: list[Task] = []
    held_out: list[Task] = []
    for task in tasks:
        (held_out if out(*_place(task)) else train).append(task)
    return train, held_out


def by_function(tasks: Sequence[Task], share: float, seed: int = 0) -> tuple[list[Task], list[Task]]:
    """Split tasks into (train, held out): about `share` of the functions, or of the instances, are held out.

    All bugs of a function go to the same side. Raises TaskError for a share outside [0, 1].
    """
    if not 0 <= share <= 1:
        raise TaskError(f"the held-out share must be between 0 and 1, not {share}")
    return _split(tasks, lambda _, function: _share(seed, function) < share)


def by_package(
    tasks: Sequence[Task], held_out: Collection[str] | float, seed: int = 0
) -> tuple[list[Task], list[Task]]:
    """Split tasks into (train, held out): the named packages are held out, or about a share of all packages.

    The package of an instance is its repository. Raises TaskError for a name that no task has, and for a share outside
    [0, 1].
    """
    if isinstance(held_out, int | float):
        share = float(held_out)
        if not 0 <= share <= 1:
            raise TaskError(f"the held-out share must be between 0 and 1, not {share}")
        return _split(tasks, lambda package, _: _share(seed, package) < share)
    known = {_place(task)[0] for task in tasks}
    unknown = sorted(set(held_out) - known)
    if unknown:
        raise TaskError(f"no task is of package {', '.join(unknown)}; the packages are {', '.join(sorted(known))}")
    return _split(tasks, lambda package, _: package in held_out)


def shuffle_tasks(tasks: Sequence[Task], seed: int = 0) -> list[Task]:
    """Return the tasks in an order drawn from (seed, id), so that the first N of a file are a fair sample of it."""
    return sorted(tasks, key=lambda task: _share(seed, task.id))
