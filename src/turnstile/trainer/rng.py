"""The global random states of Python, NumPy and torch, which a checkpoint saves and restores.

Turnstile itself does not use them, but a custom environment, reward or loss may.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed(number: int) -> None:
    """Seed the global generators."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def state() -> dict[str, Any]:
    """Return the states of the global generators, as tensors and plain numbers."""
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, following = random.getstate()
    return {
        "python": [version, list(internal), following],
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys, np.int64)), int(place), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the current states at the end of a `with` block."""
    before = state()
    try:
        yield
    finally:
        restore(before)


def restore(state: Mapping[str, Any]) -> None:
    """Restore the states bit for bit. CUDA states are skipped if the number of devices has changed."""
    version, internal, following = state["python"]
    random.setstate((version, tuple(internal), following))
    kind, keys, place, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), place, has_gauss, gauss))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all([each.cpu() for each in state["cuda"]])
