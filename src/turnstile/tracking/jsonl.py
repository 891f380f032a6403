"""Metrics and messages as JSON lines in the run's folder."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any, TextIO

from turnstile.tracking.base import Scalars


class JsonlTracker:
    """Appends an object for each step to `metrics.jsonl` and one for each message to `messages.jsonl`.

    A line is in its file when the call returns. A torn last line (the process was killed) is cut off when the
    file is opened again. Numbers that are not finite become the strings "NaN", "Infinity" and "-Infinity",
    which `float` reads, so that every line is plain JSON.
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
        """Not kept: it is news only while it happens."""

    def resume_at(self, step: int) -> None:
        self._metrics.close()
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        scratch = self._path.with_name(self._path.name + ".new")
        scratch.write_text("".join(line for line in lines if json.loads(line)["step"] <= step), encoding="utf-8")
        os.replace(scratch, self._path)
        self._metrics = _open(self._path)

    def close(self) -> None:
        self._metrics.close()
        self._messages.close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The steps logged in a run's folder, oldest first; a torn last line is left out."""
    path = Path(run) / "metrics.jsonl"
    if not path.exists():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    steps = [json.loads(line) for line in whole.splitlines()]
    return [{key: _NUMBERS.get(value, value) for key, value in step.items()} for step in steps]


_NUMBERS: dict[Any, Any] = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _open(path: Path) -> TextIO:
    """The file, ready to append, without a torn last line."""
    if path.exists():
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(path, whole)
    return path.open("a", encoding="utf-8")


def _write(file: TextIO, body: dict[str, Any]) -> None:
    plain = {key: _plain(value) for key, value in body.items()}
    file.write(json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n")
    file.flush()


def _plain(value: Any) -> Any:
    """The value as JSON has it; numpy's and torch's numbers have `item`."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
