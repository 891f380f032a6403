"""The tasks of a recipe."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from turnstile.config import Recipe
from turnstile.errors import ConfigError, TaskError
from turnstile.tasks.base import load_tasks
from turnstile.types import Task


def read_tasks(recipe: Recipe, which: str, limit: int = 0) -> list[Task]:
    """Return the train or held-out tasks of a recipe that match `tasks.where`.

    With a limit, that many tasks are drawn from the whole file, always the same ones regardless of the run's seed, so
    that runs can be compared task by task. Raises TaskError if no task matches, and ConfigError if no file is set.
    """
    path = recipe.tasks.train if which == "train" else recipe.tasks.heldout
    if not path:
        raise ConfigError(f"tasks.{which} is not set; name a JSON-lines file (turnstile tasks make writes one)")
    tasks = [task for task in load_tasks(path) if _is_wanted(task, recipe.tasks.where)]
    if not tasks:
        raise TaskError(f"{path}: no task is left after tasks.where = {recipe.tasks.where}")
    return random.Random("tasks").sample(tasks, limit) if 0 < limit < len(tasks) else tasks


def _is_wanted(task: Task, where: Mapping[str, Any]) -> bool:
    """Return whether a task's data matches `where`.

    For each key, a number is the largest allowed value, a list holds the allowed values, and any other value must be
    equal to the task's.
    """
    for key, wanted in where.items():
        value = task.data.get(key)
        if isinstance(wanted, int | float) and not isinstance(wanted, bool):
            if not isinstance(value, int | float) or value > wanted:
                return False
        elif isinstance(wanted, Iterable) and not isinstance(wanted, str):
            if value not in wanted:
                return False
        elif value != wanted:
            return False
    return True


def overlap(train: Sequence[Task], heldout: Sequence[Task]) -> list[str]:
    """Return the sorted ids of the tasks that are in both."""
    return sorted({task.id for task in train} & {task.id for task in heldout})
