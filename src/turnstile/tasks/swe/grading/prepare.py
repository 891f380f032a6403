"""Getting task files ready on this machine: their packages in the cache, and a sample of their tasks tried out.

What was found sound is noted beside the package, so that it is not tried again until the package, the task or
this Python changes.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from turnstile.errors import InfrastructureError, TaskError
from turnstile.tasks.base import dump_task
from turnstile.tasks.swe.bug import Bug, package_of
from turnstile.tasks.swe.grading.grader import Grader, local_grader
from turnstile.tasks.swe.grading.judge import fault
from turnstile.tasks.swe.packages.source import Package
from turnstile.tasks.swe.split import mixed
from turnstile.types import Task

_FORMAT = 1
_MORE = 2  # further tasks that tell whether one task is off or its whole package


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """How far the preparation is: `done` of `total` packages in a stage ("fetch" or "check"), and what is next."""

    stage: str
    done: int
    total: int
    item: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """What trying out tasks of one package came to.

    `sound` are the ids of those that behave, `remembered` of which an earlier call had tried; `off` says of the
    others what is wrong. `unknown` is why no more could be tried, if something broke that is no task's fault.
    """

    package: Package
    sound: tuple[str, ...] = ()
    remembered: int = 0
    off: Mapping[str, str]
    unknown: str | None = None

    @property
    def usable(self) -> bool:
        """Whether nothing speaks against the package: not all of the tasks that were tried are off."""
        return bool(self.sound) or not self.off


async def prepare(
    tasks: Sequence[Task],
    *,
    sample: int | None = 1,
    seed: int = 0,
    workers: int = 2,
    grader: Grader | None = None,
    progress: Callable[[Step], None] = lambda step: None,
) -> list[Checked]:
    """Fetches every package that `tasks` need, then tries `sample` tasks of each out (None: all), drawn by `seed`.

    Where one of them is off, up to two further ones of its package are tried. A task is tried by the grader's
    verdict on its bug and on its repair (`judge.fault`); `grader` None stands for one over local sandboxes.
    Gives what was found, package by package. Raises TaskError for a package that cannot be had.
    """
    piles: dict[str, list[Task]] = {}
    for task in mixed(tasks, seed):
        piles.setdefault(Bug.of(task).label, []).append(task)
    for label, pile in piles.items():
        needed = sorted({", ".join(Bug.of(task).requires) or "nothing" for task in pile})
        if len(needed) > 1:
            raise TaskError(
                f"some tasks of {label} need {needed[0]}, others {needed[1]}: a package is used in one setting at a "
                "time; make them again, all with the same --extra, or use the files one after the other"
            )
    packages: dict[str, Package] = {}
    gate = asyncio.Semaphore(workers)

    async def fetched(label: str) -> None:
        bug = Bug.of(piles[label][0])
        async with gate:
            progress(Step(stage="fetch", done=len(packages), total=len(piles), item=bug.source))
            packages[label] = await asyncio.to_thread(package_of, bug)
            progress(Step(stage="fetch", done=len(packages), total=len(piles)))

    await _all(map(fetched, piles))
    checked: dict[str, Checked] = {}

    async def tried(label: str, judge: Grader) -> None:
        async with gate:
            progress(Step(stage="check", done=len(checked), total=len(piles), item=label))
            checked[label] = await _try_out(packages[label], piles[label], sample, judge)
            progress(Step(stage="check", done=len(checked), total=len(piles)))

    if grader is not None:
        await _all(tried(label, grader) for label in piles)
    else:
        async with local_grader(workers) as own:
            await _all(tried(label, own) for label in piles)
    return [checked[label] for label in piles]


async def _all(jobs: Iterable[Coroutine[None, None, None]]) -> None:
    """Runs all jobs; the first error ends the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(job)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _try_out(package: Package, tasks: Sequence[Task], sample: int | None, grader: Grader) -> Checked:
    """Tries tasks in order until `sample` were tried; a few more as long as all of them were off."""
    wanted = len(tasks) if sample is None else min(sample, len(tasks))
    known = _Known.read(package)
    sound: list[str] = []
    off: dict[str, str] = {}
    remembered, unknown = 0, None
    for number, task in enumerate(tasks):
        if number >= wanted and not (off and not sound and number < wanted + _MORE):
            break
        if _digest(task) in known.sound:
            remembered += 1
            sound.append(task.id)
            continue
        try:
            bug = Bug.of(task)
            why = await fault(grader, bug, await asyncio.to_thread(package_of, bug))
        except TaskError as error:
            why = str(error)
        except InfrastructureError as error:
            unknown = str(error)
            break
        if why is None:
            sound.append(task.id)
            known.sound.add(_digest(task))
        else:
            off[task.id] = why
    if len(sound) > remembered:
        known.write()
    return Checked(package=package, sound=tuple(sound), remembered=remembered, off=off, unknown=unknown)


def _digest(task: Task) -> str:
    return hashlib.sha256(dump_task(task).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Known:
    """The digests of the tasks that were found sound, with everything else that this depends on."""

    path: Path
    setting: Sequence[str | int]
    sound: set[str]

    @classmethod
    def read(cls, package: Package) -> _Known:
        versions = (sys.version, platform.platform(), importlib.metadata.version("pytest"))
        setting: list[str | int] = [_FORMAT, *versions, package.digest, *package.requires]
        path = package.tree.with_name("checked.json")
        record: dict[str, list[str]] = {}
        with suppress(OSError, json.JSONDecodeError):
            record = json.loads(path.read_text(encoding="utf-8"))
        sound = set(record["sound"]) if record.get("setting") == setting else set()
        return cls(path=path, setting=setting, sound=sound)

    def write(self) -> None:
        """Nothing is lost but time where the cache cannot be written."""
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        with suppress(OSError):
            temporary.write_text(json.dumps({"setting": self.setting, "sound": sorted(self.sound)}), encoding="utf-8")
            temporary.replace(self.path)
