"""The folder of a run, with the recipe that it was made from and its results."""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from turnstile.config import PATHS, Recipe, make_recipe
from turnstile.errors import RESUME_HINT, ConfigError, RunFolderError
from turnstile.evaluation.metrics import EpisodeResult

UNTOUCHED, WARM, FINAL = "untouched", "warmstart", "trained"
"""Names of the evaluations of a run's model, besides those of intermediate steps (step-0010)."""
RESOLVED = "resolved.json"
LOCK = ".lock"
ASIDE = ".aside"
"""The subfolder for files of the old run, which `fresh` puts aside until the new one has begun."""
PACKAGES = ("turnstile-rl", "torch", "transformers", "peft", "numpy", "pytest", "safetensors")


def open_run(run: Path, recipe: Recipe, *, fresh: bool, given: Mapping[str, str] | None = None) -> bool:
    """Make or reopen a run folder, and return whether it contains a run to continue.

    `given` names what the caller put in place of the recipe's parts. Raises ConfigError for a folder made from another
    recipe or with other parts, since continuing it would mix two runs; if nothing in it was finished, for example
    because the start failed, it is started anew instead. With `fresh` its contents are put aside until `starting`
    deletes them or puts them back.
    """
    resolved = _absolute(recipe.model_dump(mode="json"), Path())
    given = dict(given or {})
    file = run / RESOLVED
    _put_back(run)  # in case a fresh start was killed
    if fresh and run.exists():
        inside = _inside(run)
        if not file.is_file() and inside:
            raise ConfigError(f"{run} is no run folder; --fresh would empty it, so give another name")
        (run / ASIDE).mkdir()
        for path in inside:
            path.rename(run / ASIDE / path.name)
    if file.is_file():
        before = read_resolved(run)
        try:
            old = _absolute(before["recipe"], run)
        except ConfigError as error:
            raise ConfigError(f"{error}; give another run name, or --fresh to start {run} anew") from None
        names = changed_keys(old, resolved) + changed_keys(before.get("given", {}), given)
        if names and not any((run / "checkpoints").glob("step-*")) and not read_results(run):
            return open_run(run, recipe, fresh=True, given=given)  # nothing was finished
        if names:
            raise ConfigError(
                f"{run} was made with another recipe ({', '.join(names[:3])} changed); "
                "give another run name, or --fresh to start it anew"
            )
        return True
    run.mkdir(parents=True, exist_ok=True)
    body = {
        "recipe": _movable(resolved, run),
        "given": given,
        "versions": versions(),
        "git": _git(),
        "command": sys.argv,
    }
    write_whole(file, json.dumps(body, indent=1))
    return False


@contextmanager
def only_one(run: Path) -> Iterator[None]:
    """Lock a run's folder for this process. Raises RunFolderError if another process is using it.

    The kernel releases the lock when the process ends for any reason.
    """
    run.mkdir(parents=True, exist_ok=True)
    path = run / LOCK
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise RunFolderError(
                f"{run} is in use by process {file.read().strip() or 'that has just begun'}; "
                "wait until it ends, stop it, or give another run name"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


@contextmanager
def starting(run: Path) -> Iterator[Callable[[], None]]:
    """Lock a run's folder for this process, and restore its contents unless the body calls the yielded function.

    A failed start therefore uses up no name, and with `fresh` it loses no run. Raises RunFolderError as `only_one`
    does.
    """
    new, begun = not run.exists(), False

    def begin() -> None:
        nonlocal begun
        begun = True
        shutil.rmtree(run / ASIDE, ignore_errors=True)

    with only_one(run):
        try:
            yield begin
        finally:
            if not begun:
                _put_back(run)
            if new and not begun:
                shutil.rmtree(run, ignore_errors=True)


def _put_back(run: Path) -> None:
    """Put back what `open_run` put aside, replacing everything written since."""
    if not (run / ASIDE).is_dir():
        return
    for path in _inside(run):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for path in (run / ASIDE).iterdir():
        path.rename(run / path.name)
    (run / ASIDE).rmdir()


def _inside(run: Path) -> list[Path]:
    return [path for path in run.iterdir() if path.name not in (LOCK, ASIDE)]


@contextmanager
def room_for(run: Path) -> Iterator[None]:
    """Convert the error of a full disk or quota to a RunFolderError, which is shown in one line without a traceback."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise RunFolderError(f"{error.filename or run}: {error.strerror}; {RESUME_HINT} once there is room") from error


def read_resolved(run: Path) -> dict[str, Any]:
    """Return the description of a run that `open_run` wrote. Raises ConfigError if it is missing or malformed."""
    file = run / RESOLVED
    try:
        body = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{str(run)!r} is no run: it has no {RESOLVED}; give a folder that `turnstile train` made"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    if not isinstance(body, dict) or not isinstance(body.get("recipe"), dict):
        raise ConfigError(f"{file} holds no recipe; was it written by `turnstile train`?")
    return body


def read_recipe(run: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe that a run was started with, after applying `overrides`.

    Raises ConfigError as `read_resolved` and `load_recipe` do.
    """
    return make_recipe(read_resolved(run)["recipe"], overrides, where=str(run / RESOLVED), folder=run)


def _absolute(recipe: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a dumped recipe completed with defaults, and with paths made absolute; they are relative to `folder`."""
    return make_recipe(recipe, where=str(folder / RESOLVED), folder=folder).model_dump(mode="json")


def _movable(recipe: dict[str, Any], run: Path) -> dict[str, Any]:
    """Return the recipe with paths relative to the run folder, as it is stored there.

    Only paths below the current folder become relative, and only if the run is below it too, so that a project can be
    moved or shared as a whole. Other paths stay absolute, so that a run can be moved away from its tasks.
    """
    here, run = Path.cwd(), run.resolve()
    moved = {**recipe}
    for section, key in PATHS:
        path = Path(str(recipe[section].get(key) or ""))  # only some kinds of sandbox have this knob
        if path.is_absolute() and path.is_relative_to(here) and run.is_relative_to(here):
            moved[section] = {**moved[section], key: _as_path(os.path.relpath(path, run))}
    return moved


def _as_path(path: str) -> str:
    """Return a relative path in a form that cannot be mistaken for a name."""
    return path if path.startswith(".") else f"./{path}"


def versions() -> dict[str, str]:
    """Return the machine type and the versions of Python and of the packages that affect a run's numbers."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_results(run: Path, name: str, results: list[EpisodeResult]) -> None:
    """Write an evaluation's results atomically."""
    folder = run / "evaluations"
    folder.mkdir(exist_ok=True)
    write_whole(folder / f"{name}.jsonl", "".join(json.dumps(asdict(result)) + "\n" for result in results))


def write_whole(file: Path, text: str) -> None:
    """Write a file atomically: a crash of the process or the machine leaves either the old file or the new one."""
    scratch = file.with_name(f".{file.name}.writing")
    with scratch.open("w", encoding="utf-8") as writing:
        writing.write(text)
        writing.flush()
        os.fsync(writing.fileno())
    scratch.replace(file)


def read_results(run: Path) -> dict[str, list[EpisodeResult]]:
    """Return the results of a run's finished evaluations by name, oldest first."""
    files = sorted((run / "evaluations").glob("*.jsonl"), key=lambda file: file.stat().st_mtime)
    return {
        file.stem: [EpisodeResult.read(json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
        for file in files
    }


def drop_results(run: Path, name: str) -> None:
    """Delete the results of an evaluation, so that it is done again."""
    (run / "evaluations" / f"{name}.jsonl").unlink()


def changed_keys(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted keys whose values differ."""
    names = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            names += changed_keys(old, new, f"{prefix}{key}.")
        elif old != new:
            names.append(f"{prefix}{key}")
    return names


def _git() -> dict[str, str]:
    """Return the current folder's commit and its uncommitted changes, or an empty mapping outside a repository."""
    found = {}
    for name, command in (("commit", ["rev-parse", "HEAD"]), ("changed", ["status", "--porcelain"])):
        try:
            done = subprocess.run(["git", *command], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return {}
        found[name] = done.stdout.strip()
    return found
