"""The random numbers that nobody keys: Python's, numpy's and torch's own. Nothing of ours draws from them, but an
environment, a reward or a loss of one's own may."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed(number: int) -> None:
    """Begins all of them anew."""
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number)


def state() -> dict[str, Any]:
    """Where they are: tensors and plain numbers."""
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, following = random.getstate()
    return {
        "python": [version, list(internal), following],
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys, np.int64)), int(place), int(has_gauss), float(gauss)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


@contextmanager
def untouched() -> Iterator[None]:
    """What is drawn inside was not drawn."""
    before = state()
    try:
        yield
    finally:
        restore(before)


def restore(state: Mapping[str, Any]) -> None:
    """Puts them back, bit by bit; those of devices that are not there are left out."""
    version, internal, following = state["python"]
    random.setstate((version, tuple(internal), following))
    kind, keys, place, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), place, has_gauss, gauss))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all([each.cpu() for each in state["cuda"]])
