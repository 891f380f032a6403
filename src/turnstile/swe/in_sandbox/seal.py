"""Check that the test runner is still the one that was loaded.

Code under test shares a process with what runs its tests, and can replace any function in it. Replaced functions are
found by comparison. Uses the standard library only, as it runs beside the code under test.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

SEALED = ("pytest", "_pytest", "pluggy", "unittest", "builtins", "__main__", "turnstile")
"""Packages and modules to seal, if they are loaded when the seal is made."""


class Seal:
    """Remembers the functions and classes of the test runner, so that `broken` can find one that was replaced."""

    def __init__(self) -> None:
        self._modules = {
            name: module for name, module in sys.modules.items() if name.partition(".")[0] in SEALED and module
        }
        self._kept = [
            (place, names, name, value, _code(value))
            for place, names in _namespaces(self._modules)
            for name, value in names.items()
            if callable(value) or isinstance(value, _WRAPPERS)
        ]

    def broken(self) -> str | None:
        """Return the name of a function, class or module that was replaced after loading; None if there is none."""
        for name, module in self._modules.items():
            if sys.modules.get(name) is not module:
                return name
        for place, names, name, value, code in self._kept:
            if names.get(name) is not value or _code(value) is not code:
                return f"{place}.{name}"
        return None


_WRAPPERS = (classmethod, staticmethod, property)


def _namespaces(modules: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the namespace of each module, and of each class that it defines."""
    for place, module in modules.items():
        names = vars(module)
        yield place, names
        if place != "builtins":
            for name, value in list(names.items()):
                if isinstance(value, type) and value.__module__ == place:
                    yield f"{place}.{name}", vars(value)


def _code(value: object) -> CodeType | None:
    """Return a function's code, which can be replaced while the function stays; None for anything else."""
    return value.__code__ if isinstance(value, FunctionType) else None
