"""Where what is fetched and converted is kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The folder of converted models and fetched packages: $TURNSTILE_CACHE, else ~/.cache/turnstile."""
    return Path(os.environ.get("TURNSTILE_CACHE") or Path.home() / ".cache" / "turnstile").expanduser()
