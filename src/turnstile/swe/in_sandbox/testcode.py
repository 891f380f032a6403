"""Check that the tests that run are those that the test files held before any code under test ran.

Code under test can empty a test function in memory, or overwrite a test file or its byte code before it is imported.
Therefore the files are read first and compared with what ran. Uses only pytest besides the standard library.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from _pytest.assertion import rewrite

from turnstile.swe.tree import can_change_tests

_MAX_DEPTH = 6  # most nested decorators that are looked through


class TestCode:
    """The code of every function in the test files, read when the object is made."""

    __test__ = False  # the name begins like a test's

    def __init__(self, files: Iterable[str]) -> None:
        self.files = tuple(files)
        self._root = os.getcwd()
        self._known = {os.path.abspath(file): frozenset(_functions(_compile_test_file(file))) for file in self.files}

    def altered(self, item: pytest.Item) -> bool:
        """Return whether a test's code is not what its file holds, or comes from the code under test.

        The code below a test's decorators must be the file's. Tests that a helper beside the test files defines are
        accepted as they are.
        """
        function = getattr(item, "function", None)
        if not isinstance(function, FunctionType):
            return False
        home = os.path.abspath(getattr(sys.modules.get(function.__module__), "__file__", None) or "")
        inside = home.startswith(self._root + os.sep) and not can_change_tests(os.path.relpath(home, self._root))
        if home not in self._known and not inside:
            return False
        known = self._known.get(home) or self._known.get(str(item.path), frozenset())
        return not any(found.__code__ in known for found in _wrapped_functions(function, _MAX_DEPTH))


def _compile_test_file(file: str) -> CodeType | None:
    """Return the file's code as pytest imports it, from its byte code if that is valid, else compiled anew.

    Returns None if there is no such file or it is not valid Python.
    """
    path = Path(file)
    if not path.is_file():
        return None
    kept = path.parent / "__pycache__" / (path.stem + rewrite.PYC_TAIL)
    code = rewrite._read_pyc(path, kept)
    if code is not None:
        return code
    source = path.read_bytes()
    try:
        tree = ast.parse(source, filename=file)
    except (SyntaxError, ValueError):
        return None  # collecting it will report the error
    rewrite.rewrite_asserts(tree, source, file, None)
    return compile(tree, file, "exec", dont_inherit=True)


def _functions(code: CodeType | None) -> Iterator[CodeType]:
    for constant in () if code is None else code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _functions(constant)


def _wrapped_functions(found: Any, depth: int) -> Iterator[FunctionType]:
    """Yield a function and those that it wraps, in its closure or in an attribute."""
    if isinstance(found, FunctionType):
        yield found
    if depth and isinstance(found, FunctionType):
        cells = []
        for cell in found.__closure__ or ():
            try:
                cells.append(cell.cell_contents)
            except ValueError:
                continue  # a cell that is still empty
        for inner in (*cells, *vars(found).values()):
            yield from _wrapped_functions(inner, depth - 1)
    elif depth and hasattr(found, "__dict__") and not isinstance(found, type | ModuleType):
        for inner in list(vars(found).values()):
            if isinstance(inner, FunctionType):
                yield from _wrapped_functions(inner, depth - 1)
