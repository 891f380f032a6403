"""Criteria and checklist items by name, from the recipe or from a task."""

from __future__ import annotations

from collections.abc import Mapping

from turnstile.errors import ConfigError
from turnstile.types import Task


class Asked:
    """The questions about an episode, which are the task's own table if it has one, else the recipe's."""

    def __init__(self, kind: str, what: str, table: object, key: str) -> None:
        self._kind, self._what, self._table, self._key = kind, what, table, key
        if not key or table is not None:
            _check_table(f"grader {kind!r} wants {what}", table)

    def of(self, task: Task) -> dict[str, str]:
        """Return the table for a task.

        Raises ConfigError if neither the task nor the recipe has one, or if it is malformed.
        """
        if self._key and self._key in task.data:
            return _check_table(f"task {task.id!r}: grader {self._kind!r} wants {self._key}", task.data[self._key])
        where = f"task {task.id!r} has no {self._key!r} in its data, so grader {self._kind!r} wants {self._what}"
        return _check_table(where, self._table)


def _check_table(where: str, table: object) -> dict[str, str]:
    if not isinstance(table, Mapping) or not table or not all(isinstance(text, str) for text in table.values()):
        raise ConfigError(f'{where} = {{ name = "what it asks", ... }}, got {table!r}')
    return dict(table)
