"""Criteria and items by name, of the recipe or of a task."""

from __future__ import annotations

from collections.abc import Mapping

from turnstile.errors import ConfigError
from turnstile.types import Task


class Asked:
    """What is asked of episodes: a task's own table, where it has one, else the recipe's."""

    def __init__(self, kind: str, what: str, table: object, key: str) -> None:
        self._kind, self._what, self._table, self._key = kind, what, table, key
        if not key or table is not None:
            _check_table(f"grader {kind!r} wants {what}", table)

    def of(self, task: Task) -> dict[str, str]:
        """Raises ConfigError for a task without one where the recipe has none, and for one that is none."""
        if self._key and self._key in task.data:
            return _check_table(f"task {task.id!r}: grader {self._kind!r} wants {self._key}", task.data[self._key])
        where = f"task {task.id!r} has no {self._key!r} in its data, so grader {self._kind!r} wants {self._what}"
        return _check_table(where, self._table)


def _check_table(where: str, table: object) -> dict[str, str]:
    if not isinstance(table, Mapping) or not table or not all(isinstance(text, str) for text in table.values()):
        raise ConfigError(f'{where} = {{ name = "what it asks", ... }}, got {table!r}')
    return dict(table)
