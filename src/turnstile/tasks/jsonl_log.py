"""Append-only files of JSON lines that survive a killed process."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnstile.errors import TaskError


def append(path: Path, line: str) -> None:
    """Append one line and flush it to the disk, after removing an incomplete last line left by a killed process.

    Several processes may append to the same file. Raises TaskError if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            _cut(path)
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise TaskError(f"{path}: it cannot be written ({error.strerror}); check the folder and its space") from error


def repair(path: Path) -> None:
    """Remove an incomplete last line left by a killed process, if the file exists."""
    if path.exists():
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            _cut(path)


def read(path: Path) -> Iterator[Any]:
    """Yield the parsed complete lines of a file, or nothing if it does not exist. An incomplete last line is skipped.

    Raises TaskError for a line that is not JSON.
    """
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise TaskError(f"{path}:{number}: the line is damaged ({error}); remove it, or the file") from error


def _cut(path: Path) -> None:
    with path.open("rb+") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":  # reads the whole file, but only in this case
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
