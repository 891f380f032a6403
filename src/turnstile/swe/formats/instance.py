"""One typed instance of a repository task, whichever data set it was read from."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from turnstile.errors import TaskError
from turnstile.lookup import resolve
from turnstile.types import JSON, Task

INSTANCE = "swe_shell"
"""The environment of tasks that hold an instance. Generated tasks can run in it too."""
PASSED = frozenset({"PASSED", "XFAIL"})
"""Statuses that count as passed, which include expected failures but not XPASS."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """A problem in a repository at a commit, and the tests that tell whether it is solved.

    Patches are unified diffs. `bug_patch` is applied to `base_commit` before the agent starts (SWE-smith's `patch`),
    `patch` is the repair from there, and `test_patch` adds the tests that come with it. `expected` maps each test to
    the status that it must have, for data sets that give this instead of FAIL_TO_PASS (R2E-Gym).
    """

    id: str
    problem: str
    repo: str = ""
    base_commit: str = ""
    patch: str = ""
    test_patch: str = ""
    bug_patch: str = ""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    expected: Mapping[str, str] = dataclasses.field(default_factory=dict)
    image: str = ""
    workdir: str = "/testbed"
    test_command: str = ""
    log_parser: str = "pytest"  # a name that `lookup.resolve("log_parser", ...)` knows
    setup: str = ""  # shell lines before every command in its image, such as those that activate an environment
    hidden: tuple[str, ...] = ()  # paths in its image that hold tests, which the agent must not see
    extra: Mapping[str, JSON] = dataclasses.field(default_factory=dict)  # other fields of the data set

    def to_json(self) -> dict[str, JSON]:
        """Return the instance as a JSON object, without optional fields that are empty."""
        record = {key: list(value) if isinstance(value, tuple) else value
                  for key, value in dataclasses.asdict(self).items()}  # fmt: skip
        return {key: value for key, value in record.items() if value or key in ("id", "problem", "log_parser")}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Instance:
        """Return the instance that `to_json` converted. Raises TaskError for an unknown field or a missing id."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(record) - known)
        if unknown or not record.get("id"):
            why = f"unknown field {unknown[0]!r}" if unknown else "no id"
            raise TaskError(f"instance {record.get('id')!r}: {why}")
        tuples = {name: tuple(record.get(name, ())) for name in ("fail_to_pass", "pass_to_pass", "hidden")}
        return cls(**{**record, **tuples})

    def statuses(self, log: str) -> dict[str, str]:
        """Return the status of each test in a run that printed `log`.

        Raises ConfigError for an unknown parser.
        """
        found: dict[str, str] = resolve("log_parser", self.log_parser)(log)
        return found

    def log_trouble(self, log: str, statuses: Mapping[str, str], exit_code: int) -> str | None:
        """Return what is wrong with a run as a whole, in a few words, according to the parser's function `trouble`.

        Returns None if nothing is wrong or the parser has no such function. Raises ConfigError for an unknown parser.
        """
        trouble = getattr(resolve("log_parser", self.log_parser), "trouble", None)
        return None if trouble is None else trouble(log, statuses, exit_code)

    def wanted_statuses(self) -> dict[str, str]:
        """Return the status that each test must have, FAIL_TO_PASS first."""
        return dict(self.expected) or dict.fromkeys((*self.fail_to_pass, *self.pass_to_pass), "PASSED")

    def unmet(self, statuses: Mapping[str, str]) -> list[str]:
        """Return the tests that do not have their required status among the `statuses` of a run.

        A missing test is one of them, and so is a skipped one unless it is expected to be skipped. Data sets cut names
        at the first blank; such a name stands for all tests whose names match up to there.
        """
        cut = _group_by_cut_name(statuses)
        return [
            test
            for test, status in self.wanted_statuses().items()
            if not all(_is_equivalent(found, status) for found in _statuses_for(test, statuses, cut))
        ]

    def met_none(self, statuses: Mapping[str, str]) -> bool:
        """Return whether a run named none of the instance's tests, with names matched as in `unmet`."""
        return not self.wanted_statuses().keys() & {*statuses, *_group_by_cut_name(statuses)}


def instance_of(task: Task) -> Instance:
    """Return the instance that a task holds. Raises TaskError if it holds none."""
    if task.env != INSTANCE:
        raise TaskError(f"task {task.id}: env is {task.env!r}, the task of an instance has {INSTANCE!r}")
    return Instance.from_json({"id": task.id, **task.data})


def as_task(instance: Instance) -> Task:
    """Return an instance as a task; `instance_of` converts it back."""
    return Task(id=instance.id, env=INSTANCE, data=instance.to_json())


def _group_by_cut_name(statuses: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the statuses grouped by the names of their tests up to the first blank."""
    cut: dict[str, list[str]] = {}
    for test, status in statuses.items():
        cut.setdefault(test.partition(" ")[0], []).append(status)
    return cut


def _statuses_for(test: str, statuses: Mapping[str, str], cut: Mapping[str, list[str]]) -> list[str]:
    return [statuses[test]] if test in statuses else cut.get(test, ["MISSING"])


def _is_equivalent(found: str, wanted: str) -> bool:
    return found == wanted or (found in PASSED and wanted in PASSED)


def field_of(row: Mapping[str, Any], name: str, where: str) -> str:
    """Return a text field that a row must have. Raises TaskError naming the field if it is missing or empty."""
    value = row.get(name)
    if not isinstance(value, str) or not value:
        raise TaskError(f"{where}: field {name!r} is missing or no text; is it of this format?")
    return value


def tests_of(row: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    """Return the names of tests in a field, which holds a list or its JSON text.

    Raises TaskError for other values.
    """
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value or "[]")
        except json.JSONDecodeError as error:
            raise TaskError(f"{where}: field {name!r} is no list of tests ({error.msg})") from error
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, Mapping) or not all(isinstance(one, str) for one in value):
        raise TaskError(f"{where}: field {name!r} is no list of tests")
    return tuple(value)


def extra_of(row: Mapping[str, Any], used: Iterable[str]) -> dict[str, JSON]:
    """Return the non-empty fields of a row that are not in `used`."""
    taken = set(used)
    return {key: value for key, value in row.items() if key not in taken and value not in (None, "", [], {})}


def reversed_patch(patch: str) -> str:
    """Return the unified diff that undoes `patch`.

    Raises TaskError for a binary diff, or one that renames or copies files.
    """
    lines: list[str] = []
    old_name = ""
    left = [0, 0]  # lines of the hunk that are still to come, of the old and of the new file
    for line in patch.splitlines(keepends=True):
        sign, rest = line[:1], line[1:]
        if any(left) and sign in " +-\n\r":
            left = [left[0] - (sign != "+"), left[1] - (sign != "-")]
            lines.append({"+": "-", "-": "+"}[sign] + rest if sign in "+-" else line)
        elif match := re.match(r"@@ -(\d+(?:,(\d+))?) \+(\d+(?:,(\d+))?) @@(.*\n?)", line):
            left = [int(match[2] or 1), int(match[4] or 1)]
            lines.append(f"@@ -{match[3]} +{match[1]} @@{match[5]}")
        elif line.startswith("--- "):
            old_name = line[4:]
        elif line.startswith("+++ "):
            lines += [f"--- {_swap_prefix(line[4:])}", f"+++ {_swap_prefix(old_name)}"]
        elif line.startswith(("GIT binary patch", "Binary files", "rename ", "copy ")):
            raise TaskError(f"a patch with {line.split()[0]} parts cannot be taken back; reverse it with git apply -R")
        else:
            lines.append(_reverse_header(line))
    return "".join(lines)


def _swap_prefix(name: str) -> str:
    return {"a/": "b/", "b/": "a/"}.get(name[:2], name[:2]) + name[2:]


_HEADERS = {"new file mode": "deleted file mode", "old mode": "new mode"}


def _reverse_header(line: str) -> str:
    if match := re.fullmatch(r"index ([0-9a-f]+)\.\.([0-9a-f]+)(.*\n?)", line):
        return f"index {match[2]}..{match[1]}{match[3]}"
    for one, other in (*_HEADERS.items(), *((other, one) for one, other in _HEADERS.items())):
        if line.startswith(one):
            return other + line[len(one) :]
    return line
