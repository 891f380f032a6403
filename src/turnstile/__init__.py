"""Turnstile: reinforcement learning for LLM agents on tasks of many turns."""

import importlib
import os
from typing import Any

__all__ = ["__version__", "train"]
__version__ = "0.1.0.dev0"

# Sandboxes run tests on the cores that the model computes on. A computing thread that spins while waiting for
# another one that lost its core slows both by five to ten times, so threads sleep while waiting. This has an
# effect only if torch has not been imported yet. A value set by the user takes precedence.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def __getattr__(name: str) -> Any:
    """Return `turnstile.train`, importing it on demand, since modules that need no torch must load without it."""
    if name == "train":
        return importlib.import_module("turnstile.runs.api").train
    raise AttributeError(f"module 'turnstile' has no attribute {name!r}")
