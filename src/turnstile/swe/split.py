"""Split tasks into training and held-out parts that share no function or no package, and shuffle them fairly.

The side of a function or package depends only on the seed and its name, so a file that grows moves no task to the other
side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence

from turnstile.errors import TaskError
from turnstile.swe.bug import Bug
from turnstile.swe.formats.instance import INSTANCE, instance_of
from turnstile.types import Task


def _hash_fraction(seed: int, key: str) -> float:
    """Return a pseudo-random number in [0, 1) that depends only on (seed, key)."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{key}".encode()).digest()[:8]) / 2**64


def _package_and_function(task: Task) -> tuple[str, str]:
    """Return a task's package and function.

    For an instance, they are its repository and the instance itself, as no other task shares its function.
    """
    if task.env == INSTANCE:
        instance = instance_of(task)
        return instance.repo, instance.id
    bug = Bug.of(task)
    return bug.package, f"{bug.label}/{bug.file}/{bug.function}"


def _split(tasks: Sequence[Task], is_held_out: Callable[[str, str], bool]) -> tuple[list[Task], list[Task]]:
    train: list[Task] = []
    held_out: list[Task] = []
    for task in tasks:
        (held_out if is_held_out(*_package_and_function(task)) else train).append(task)
    return train, held_out


def by_function(tasks: Sequence[Task], share: float, seed: int = 0) -> tuple[list[Task], list[Task]]:
    """Split tasks into (train, held out), with about `share` of the functions or instances held out.

    All bugs in a function go to the same side. Raises TaskError for a share outside [0, 1].
    """
    if not 0 <= share <= 1:
        raise TaskError(f"the held-out share must be between 0 and 1, not {share}")
    return _split(tasks, lambda _, function: _hash_fraction(seed, function) < share)


def by_package(
    tasks: Sequence[Task], held_out: Collection[str] | float, seed: int = 0
) -> tuple[list[Task], list[Task]]:
    """Split tasks into (train, held out) by package; `held_out` names the packages or gives their share.

    The package of an instance is its repository. Raises TaskError for a name that no task has, and for a share outside
    [0, 1].
    """
    if isinstance(held_out, int | float):
        share = float(held_out)
        if not 0 <= share <= 1:
            raise TaskError(f"the held-out share must be between 0 and 1, not {share}")
        return _split(tasks, lambda package, _: _hash_fraction(seed, package) < share)
    known = {_package_and_function(task)[0] for task in tasks}
    unknown = sorted(set(held_out) - known)
    if unknown:
        raise TaskError(f"no task is of package {', '.join(unknown)}; the packages are {', '.join(sorted(known))}")
    return _split(tasks, lambda package, _: package in held_out)


def shuffle_tasks(tasks: Sequence[Task], seed: int = 0) -> list[Task]:
    """Return the tasks in an order that depends on the seed and their ids.

    The first N of them are therefore a fair sample of the file.
    """
    return sorted(tasks, key=lambda task: _hash_fraction(seed, task.id))
