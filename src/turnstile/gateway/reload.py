"""Replacing the weights of a served model between two tokens, and reporting which weights sampled a token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from turnstile.gateway.requests import NotServedError, RefusedError
from turnstile.types import I32

MAX_LABELS = 1000  # versions whose labels are kept, more than any completion spans


class UpdatableEngine(Protocol):
    """An engine whose weights can be changed between two tokens."""

    async def update(self, load: Callable[[], int]) -> int:
        """Run `load`, which loads weights, between two tokens. Return the version that `load` returns."""
        ...


class WeightReloader:
    """A reloader that calls `load` to load weights from folders below `root` into the engine's network, in place.

    `labels` maps the engine's versions to the names that clients gave them. The initial weights, and those after a
    failed load, have an empty name.
    """

    def __init__(self, engine: UpdatableEngine, load: Callable[[Path], None], root: Path) -> None:
        self._engine, self._load, self._root = engine, load, root.resolve()
        self.labels = {0: ""}
        self._numbers = itertools.count(1)

    async def load_folder(self, folder: str, label: str) -> None:
        """Load the weights in a folder. Requests in progress continue with them.

        Raises NotServedError if the folder is outside the root, and RefusedError if it cannot be loaded. Tokens sampled
        after a failed load have an empty label.
        """
        path = self._check_inside(folder)
        number = next(self._numbers)
        self.labels[number] = ""
        for outdated in sorted(self.labels)[:-MAX_LABELS]:
            del self.labels[outdated]
        failures: list[Exception] = []

        def change() -> int:
            try:
                self._load(path)
                self.labels[number] = label
            except Exception as error:  # raised below, to the client
                failures.append(error)
            return number

        await self._engine.update(change)
        if failures:
            raise RefusedError(f"{folder} could not be loaded: {failures[0]}")

    def _check_inside(self, folder: str) -> Path:
        try:
            path = Path(folder).resolve()
        except (ValueError, OSError, RuntimeError) as error:
            raise RefusedError(f"{folder!r} is not a folder ({error})") from None
        if not path.is_relative_to(self._root):
            raise NotServedError(f"{folder} is not below {self._root}, the only place that weights are loaded from")
        return path


def version_spans(versions: I32, labels: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the label, start and end of each run of tokens that were sampled with the same weights."""
    bounds = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [
        {"version": labels.get(int(versions[start]), ""), "start": start, "end": end}
        for start, end in itertools.pairwise(bounds)
    ]
