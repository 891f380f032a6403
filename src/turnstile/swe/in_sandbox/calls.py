"""Record which functions of a package a test calls, from the events that the interpreter reports.

Uses the standard library only, as it runs beside the code under test.
"""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType
from typing import Any


class CallRecorder:
    """Records the functions below `folder` that the starting thread calls between `start` and `stop`.

    A function is named `file:line`, with the file relative to the working folder, and the function's first line,
    decorators included. `folder` is relative to the working folder too.
    """

    def __init__(self, folder: str) -> None:
        self._root = os.getcwd()
        self._below = os.path.join(os.path.normpath(os.path.join(self._root, folder)), "")
        self._names: dict[int, str] = {}  # by the code's id, "" for code elsewhere
        self._alive: list[CodeType] = []  # kept, so that no id is used twice
        self._called: set[str] = set()

    def start(self) -> None:
        self._called = set()
        sys.setprofile(self._on_event)

    def stop(self) -> list[str]:
        """Stop recording, and return the sorted names of the functions called since `start`."""
        sys.setprofile(None)
        return sorted(self._called)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        name = self._names.get(id(code))
        if name is None:
            name, path = "", code.co_filename
            if path.startswith(self._below):
                name = f"{os.path.relpath(path, self._root).replace(os.sep, '/')}:{code.co_firstlineno}"
            self._names[id(code)] = name
            self._alive.append(code)
        if name:
            self._called.add(name)
