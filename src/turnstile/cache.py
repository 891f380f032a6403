"""The folder where converted models and fetched packages are kept between runs."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache folder: $TURNSTILE_CACHE, else ~/.cache/turnstile."""
    return Path(os.environ.get("TURNSTILE_CACHE") or Path.home() / ".cache" / "turnstile").expanduser()


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock of `path`, so that one thread of one process at a time creates it; a process's end releases it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
