"""Whose code a test is: of the tests, of a library, or of the code under test. For Python 3.6 or newer, of the standard
library, but for the rewriting of assertions, which is pytest's.

A package can ship tests for others to inherit, and its own suite then does. Such a test is one that the package held
at the beginning: a file that the change under test touches counts as it was before, so that no change brings along
the tests that it is judged by.
"""

import ast
import functools
import importlib
import inspect
import os
import types
from typing import Any

from .testfiles import can_change_tests, python_files

_MANY = 50  # functions under one another


class Origins:
    """The sources of the code under test, read when this is made. `before` holds, as latin-1 text, what the files
    that the change touches were, None for one that was not there."""

    def __init__(self, root: str, before: Any) -> None:
        self.root = root + os.sep
        self.sources: Any = {}
        self.known: Any = {}
        for file in python_files(root):
            if not can_change_tests(os.path.relpath(file, root)):
                with open(file, "rb") as opened:
                    self.sources[os.path.realpath(file)] = opened.read()
        for path, text in before.items():
            self.sources[os.path.realpath(self.root + path)] = (text or "").encode("latin-1")

    def is_under_test(self, file: str) -> bool:
        """Whether a file is of the repository and no test."""
        file = os.path.realpath(file)
        return file.startswith(self.root) and not can_change_tests(file[len(self.root) :])

    def altered(self, function: Any, name: str, own: str = "") -> bool:
        """Whether the test of that name is a function of the code under test, or one of a library that is no test of
        that name. `own` is a file of tests whatever it is called. Decorators, of whoever they are, may lie over it."""
        pending: Any = [(function, True)]
        seen = 0
        while pending and seen < _MANY:
            each, outermost = pending.pop()
            code = getattr(each, "__code__", None)
            cells = getattr(each, "__closure__", None) or ()
            if isinstance(code, types.CodeType):
                seen += 1
                file = os.path.realpath(code.co_filename)
                if file == os.path.realpath(own) or (file.startswith(self.root) and not self.is_under_test(file)):
                    return False
                if not file.startswith(self.root):
                    if outermost and (code.co_name == name or cells):
                        return False
                elif code.co_name == name and shape(code) in self.written(file):
                    return False
                else:
                    outermost = False
            inner = [getattr(each, "__wrapped__", None), each.func if isinstance(each, functools.partial) else None]
            for cell in cells:
                try:
                    inner.append(cell.cell_contents)
                except ValueError:
                    continue  # a cell that is empty as yet
            pending += [(found, outermost) for found in inner if found is not None]
        return seen > 0

    def written(self, file: str) -> Any:
        """The shapes of the functions that a file held, as they are and as pytest rewrites them."""
        if file not in self.known:
            self.known[file] = set()
            for code in compiled(self.sources.get(file, b""), file):
                self.known[file].update(map(shape, functions(code)))
        return self.known[file]


def compiled(source: bytes, file: str) -> Any:
    """A module's code, plain and with rewritten assertions, where pytest is."""
    try:
        yield compile(source, file, "exec", dont_inherit=True)
        tree = ast.parse(source, filename=file)
    except (SyntaxError, ValueError):
        return
    try:
        from _pytest.assertion.rewrite import rewrite_asserts
    except ImportError:
        return
    if "source" in inspect.signature(rewrite_asserts).parameters:
        rewrite_asserts(tree, source, file)
    else:  # of before 5, which writes the place into the code
        rewrite_asserts(tree, importlib.import_module("py").path.local(file))
    yield compile(tree, file, "exec", dont_inherit=True)


def functions(code: Any) -> Any:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from functions(constant)


def shape(code: Any) -> Any:
    """What a function does, without where it stands."""
    constants = [
        shape(constant) if isinstance(constant, types.CodeType) else (type(constant), constant)
        for constant in code.co_consts
    ]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return (code.co_name, code.co_argcount, code.co_flags, code.co_code, names, tuple(constants))
