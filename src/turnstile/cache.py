"""The folder that keeps converted models and fetched packages between runs."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache folder, which is $TURNSTILE_CACHE, or ~/.cache/turnstile if that is not set."""
    return Path(os.environ.get("TURNSTILE_CACHE") or Path.home() / ".cache" / "turnstile").expanduser()


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock of `path`, so that only one thread of one process creates it at a time.

    The lock is released if the process ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
