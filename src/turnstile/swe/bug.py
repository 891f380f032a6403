"""Typed data of a repository task (`Task.data` if its env is "swe"), and the source files that it stands for."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from pathlib import Path
from typing import Any

from turnstile.cache import cache_dir
from turnstile.errors import TaskError
from turnstile.swe.edits import apply_all
from turnstile.swe.packages.source import Package, fetch
from turnstile.types import JSON, Task

ENV = "swe"
_LEFT_OUT = ("also", "statement", "statement_by")  # fields that `data` omits if empty


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Bug:
    """One bug in one function of one package, with the tests that reveal it.

    The pristine `file` has `old` at (line, col), where the bug puts `new`. Lines count from 1, columns from 0 in
    characters. A bug in several places has its other edits in `also`, in the same form.
    """

    source: str  # e.g. pypi:toolz==1.2.0
    package: str
    version: str
    licence: str
    requires: tuple[str, ...]  # exact pins of the dependencies the tests ran with
    digest: str  # first 16 hex digits of the pristine tree's digest
    file: str
    function: str  # qualified name
    kind: str  # one of mutate.KINDS
    line: int
    col: int
    old: str
    new: str
    buggy: str  # the bug with its neighbours on the line; replacing it by `fixed` repairs the function
    fixed: str
    unique: bool  # `buggy` occurs once in the lines shown
    shown: tuple[int, int]  # first and last line of the function with the bug, both included
    hidden: tuple[int, ...]  # lines in between that are docstring, comment or blank
    f2p: tuple[str, ...]  # tests that fail with the bug and pass without, the most telling first
    p2p: tuple[str, ...]  # tests that pass with and without it
    message: str  # first line of the message of the first failing test
    difficulty: int  # number of places in the function where a one-token bug could be
    also: tuple[tuple[int, int, str, str], ...] = ()
    files: int = 1  # number of files that the bug changes
    lines: int = 1  # number of lines that it changes, removes or adds
    failing: int = 0  # number of failing tests, the length of f2p, to filter by
    statement: str = ""  # the problem in words that do not give the repair away
    statement_by: str = ""  # the model that worded it; "" for the template

    @classmethod
    def of(cls, task: Task) -> Bug:
        """Return the bug of a task. Raises TaskError if its env is not "swe" or its data lacks a field."""
        if task.env != ENV:
            raise TaskError(f"task {task.id}: env is {task.env!r}, a repository task has {ENV!r}")
        fields = dataclasses.fields(cls)
        missing = [
            field.name for field in fields if field.name not in task.data and field.default is dataclasses.MISSING
        ]
        if missing:
            raise TaskError(f"task {task.id}: data lacks {', '.join(missing)}; make the task file again")
        values: dict[str, Any] = {field.name: task.data[field.name] for field in fields if field.name in task.data}
        values["also"] = tuple(tuple(edit) for edit in values.get("also", ()))
        for name in ("requires", "shown", "hidden", "f2p", "p2p"):
            values[name] = tuple(values[name])
        return cls(**values)

    @property
    def label(self) -> str:
        return f"{self.package}-{self.version}"

    @property
    def edits(self) -> tuple[tuple[int, int, str, str], ...]:
        return ((self.line, self.col, self.old, self.new), *self.also)

    def shown_lines(self) -> list[int]:
        """Return the line numbers that a view of the function shows."""
        hidden = set(self.hidden)
        return [number for number in range(self.shown[0], self.shown[1] + 1) if number not in hidden]

    def pristine_text(self, package: Package) -> str:
        return read_source(package.tree / self.file)

    def bugged_text(self, package: Package) -> str:
        """Return the text of `file` with the bug in it.

        Raises TaskError if the tree is not the one that the bug was made in.
        """
        try:
            return apply_all(self.pristine_text(package), self.edits)
        except (OSError, ValueError) as error:
            raise TaskError(f"{package.spec}: {self.file} is not the file the task was made from ({error})") from error

    def data(self) -> dict[str, JSON]:
        """Return `Task.data` for this bug, as JSON values."""
        found = {
            key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(self).items()
        }
        found["also"] = [list(edit) for edit in self.also]
        return {key: value for key, value in found.items() if value or key not in _LEFT_OUT}


def read_source(path: Path) -> str:
    """Return the text of a source file, line ends unchanged. Raises UnicodeDecodeError if it is not UTF-8."""
    return path.read_bytes().decode("utf-8")


@lru_cache(maxsize=256)
def _fetch(source: str, requires: tuple[str, ...], cache: Path) -> Package:
    return fetch(source, requires=requires, cache=cache)


def package_of(task: Task | Bug) -> Package:
    """Return the package of a task, fetching it if it is not cached.

    `package.tree` is the pristine template of the task; the bugged template is a copy of it with `file` replaced by
    `Bug.bugged_text(package)`. Raises TaskError if the package cannot be fetched, or its tree is not the task's.
    """
    bug = task if isinstance(task, Bug) else Bug.of(task)
    package = _fetch(bug.source, bug.requires, cache_dir())
    if not package.digest.startswith(bug.digest):
        raise TaskError(f"{bug.source}: the source tree differs from the one the task was made from; make it again")
    return package
