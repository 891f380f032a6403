"""Metrics and messages as JSON lines in the run's folder."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any, TextIO

from turnstile.tracking.base import Scalars


class JsonlTracker:
    """Appends an object for each step to `metrics.jsonl` and one for each message to `messages.jsonl`.

    A line is in its file when the call returns, and survives a crash of the machine after the next `sync`. When a file
    is opened again, a damaged end (left by a killed process or a crash) is moved to `NAME.damaged` with a warning in
    the log; damaged lines before it are skipped by readers. Numbers that are not finite become the strings "NaN",
    "Infinity" and "-Infinity", which `float` accepts, so that every line is plain JSON.
    """

    def __init__(self, run: Path) -> None:
        run = Path(run)
        run.mkdir(parents=True, exist_ok=True)
        self._path = run / "metrics.jsonl"
        self._metrics = _open(self._path)
        self._messages = _open(run / "messages.jsonl")

    def log(self, step: int, metrics: Scalars) -> None:
        _write(self._metrics, {"step": step, "time": time.time(), **metrics})

    def say(self, line: str, *, level: str = "info") -> None:
        _write(self._messages, {"time": time.time(), "level": level, "message": line})

    def progress(self, label: str, done: int, total: int) -> None:
        """Do nothing, since progress matters only while it happens."""

    def resume_at(self, step: int) -> None:
        self._metrics.close()
        scratch = self._path.with_name(self._path.name + ".new")
        with scratch.open("wb") as file:
            file.writelines(line for line, body in _valid_lines(self._path)[0] if body["step"] <= step)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, self._path)
        self._metrics = _open(self._path)

    def sync(self) -> None:
        for file in (self._metrics, self._messages):
            os.fsync(file.fileno())
        _sync_folder(self._path.parent)

    def close(self) -> None:
        self._metrics.close()
        self._messages.close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of the steps logged in a run's folder, oldest first. Damaged lines are skipped."""
    path = Path(run) / "metrics.jsonl"
    if not path.exists():
        return []
    return [{key: _NUMBERS.get(value, value) for key, value in step.items()} for _, step in _valid_lines(path)[0]]


def read_messages(run: Path) -> list[dict[str, Any]]:
    """Return the messages logged in a run's folder (`time`, `level`, `message`), oldest first.

    Damaged lines are skipped.
    """
    path = Path(run) / "messages.jsonl"
    return [body for _, body in _valid_lines(path)[0]] if path.exists() else []


_log = logging.getLogger(__name__)
_NUMBERS: dict[Any, Any] = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _open(path: Path) -> TextIO:
    """Open the file for appending, after moving a damaged end aside, and return it."""
    if path.exists():
        lines, end = _valid_lines(path)
        within, behind = end - sum(len(line) for line, _ in lines), path.stat().st_size - end
        if within:
            _log.warning("%s: left out %d bytes between whole lines, which are damaged", path, within)
        if behind:
            aside = path.with_name(f"{path.name}.damaged")
            with aside.open("ab") as file:
                file.write(path.read_bytes()[end:])
                file.flush()
                os.fsync(file.fileno())
            os.truncate(path, end)
            _log.warning("%s: moved its last %d bytes, which are damaged, to %s", path, behind, aside.name)
    return path.open("a", encoding="utf-8")


def _valid_lines(path: Path) -> tuple[list[tuple[bytes, dict[str, Any]]], int]:
    """Return a file's valid lines with their objects, and the position at which the last valid line ends.

    Torn lines and lines that are not a JSON object are left out; a crash of the machine may leave zeros.
    """
    lines, place, end = [], 0, 0
    for line in path.read_bytes().splitlines(keepends=True):
        place += len(line)
        try:
            body = json.loads(line)
        except ValueError:
            continue
        if line.endswith(b"\n") and isinstance(body, dict):
            lines.append((line, body))
            end = place
    return lines, end


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(file: TextIO, body: dict[str, Any]) -> None:
    plain = {key: _plain(value) for key, value in body.items()}
    file.write(json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n")
    file.flush()


def _plain(value: Any) -> Any:
    """Return the value as plain JSON. Numbers of numpy and torch are converted by their `item`."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
