"""Where what is fetched and converted is kept between runs."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_dir() -> Path:
    """The folder of converted models and fetched packages: $TURNSTILE_CACHE, else ~/.cache/turnstile."""
    return Path(os.environ.get("TURNSTILE_CACHE") or Path.home() / ".cache" / "turnstile").expanduser()


@contextmanager
def file_lock(place: Path) -> Iterator[None]:
    """One thread of one process at a time makes what belongs at `place`; the lock ends with who holds it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(f".{place.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
