"""Other weights for a model that is being served, between two tokens, and which of them sampled a token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from turnstile.gateway.requests import NotServedError, RefusedError
from turnstile.types import I32

KEPT = 1000  # versions whose label is known: more than any answer under way is of


class Changing(Protocol):
    """An engine whose weights `update` changes between two tokens, to those of the version that `load` returns."""

    async def update(self, load: Callable[[], int]) -> int: ...


class Reload:
    """Weights from folders below `below`, which `load` puts into the engine's network in place. `labels` says by the
    engine's version what clients call them: nothing, of those that it started with or that could not be loaded."""

    def __init__(self, engine: Changing, load: Callable[[Path], None], below: Path) -> None:
        self._engine, self._load, self._below = engine, load, below.resolve()
        self.labels = {0: ""}
        self._numbers = itertools.count(1)

    async def take(self, folder: str, label: str) -> None:
        """What is under way goes on with these weights. Raises RefusedError for a folder that cannot be loaded; what is
        sampled from then on is of no label."""
        where = self._inside(folder)
        number = next(self._numbers)
        self.labels[number] = ""
        for old in sorted(self.labels)[:-KEPT]:
            del self.labels[old]
        failures: list[Exception] = []

        def change() -> int:
            try:
                self._load(where)
                self.labels[number] = label
            except Exception as error:  # who asked is told
                failures.append(error)
            return number

        await self._engine.update(change)
        if failures:
            raise RefusedError(f"{folder} could not be loaded: {failures[0]}")

    def _inside(self, folder: str) -> Path:
        try:
            found = Path(folder).resolve()
        except (ValueError, OSError, RuntimeError) as error:
            raise RefusedError(f"{folder!r} is no folder ({error})") from None
        if not found.is_relative_to(self._below):
            raise NotServedError(f"weights are taken from below {self._below} alone, and {folder} is not there")
        return found


def spans_of(versions: I32, labels: Mapping[int, str]) -> list[dict[str, Any]]:
    """The label of the weights of each stretch of tokens."""
    bounds = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [
        {"version": labels.get(int(versions[start]), ""), "start": start, "end": end}
        for start, end in itertools.pairwise(bounds)
    ]
