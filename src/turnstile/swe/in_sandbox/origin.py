"""Tell whether a test's code comes from the tests, from a library, or from the code under test.

For Python 3.6 or newer. It needs only the standard library, except that assertions are rewritten by pytest. A package
can ship tests for others to inherit, which its own suite then inherits too. Such a test must be one that the package
held at the beginning. A file that the change under test touches counts as it was before, so that no change brings along
the tests that judge it.
"""

import ast
import functools
import importlib
import inspect
import os
import time
import types
import warnings
from typing import Any

from .testfiles import ENVIRONMENTS, can_change_tests, python_files

_MANY = 50  # most functions looked at in one test's chain of decorators


real = functools.lru_cache(maxsize=None)(os.path.realpath)
is_of_tests = functools.lru_cache(maxsize=None)(can_change_tests)


class Origins:
    """The sources of the repository, read when the object is made.

    `before` holds the earlier texts of the files that the change touches, decoded as latin-1, with None for new files.
    `repaired` are the files that the known repair touches; tests among them count as they are now.
    """

    def __init__(self, root: str, before: Any, repaired: Any = ()) -> None:
        self.root = root + os.sep
        self.sources: Any = {}
        self.known: Any = {}
        self.shapes: Any = {}
        self.settings: Any = None
        self.began = time.time()
        self.repaired = {real(self.root + path) for path in repaired}
        for file in python_files(root):
            with open(file, "rb") as opened:
                self.sources[real(file)] = opened.read()
        for path, text in before.items():
            if path not in repaired or not can_change_tests(path):
                self.sources[real(self.root + path)] = (text or "").encode("latin-1")

    def is_inside(self, file: str) -> bool:
        """Return whether a file belongs to the repository, and not to a library installed in a folder of it."""
        return file.startswith(self.root) and ENVIRONMENTS.isdisjoint(file[len(self.root) :].split(os.sep))

    def is_under_test(self, file: str) -> bool:
        """Return whether a file belongs to the repository and cannot change its tests."""
        file = real(file)
        return self.is_inside(file) and not is_of_tests(file[len(self.root) :])

    def is_written(self, code: Any, file: str) -> bool:
        """Return whether `file` held a function with this code at the beginning."""
        if id(code) not in self.shapes:
            self.shapes[id(code)] = code, shape(code)  # the code is kept, so that its id is not reused
        return self.shapes[id(code)][1] in self.written(file)

    def is_test_code(self, code: Any, file: str, own: str) -> bool:
        """Return whether a function comes from a test file, and does not only claim to.

        A file that could not be read at the beginning, because it is outside the repository or was made later, is
        trusted for its own tests only.
        """
        if file != own and (not self.is_inside(file) or self.is_under_test(file)):
            return False
        return self.is_written(code, file) if file in self.sources else file == own

    def altered(self, function: Any, name: str, own: str = "") -> bool:
        """Return whether a test is neither from a test file nor shipped by the package or a library under its name.

        `own` counts as a test file whatever its name. Decorators may wrap the test, but none that the change brings
        along.
        """
        pending: Any = [(function, True)]
        seen = 0
        while pending and seen < _MANY:
            each, outermost = pending.pop()
            code = getattr(each, "__code__", None)
            cells = getattr(each, "__closure__", None) or ()
            if isinstance(code, types.CodeType):
                seen += 1
                file = real(code.co_filename)
                if self.is_test_code(code, file, real(own)):
                    return False
                of_package = self.is_under_test(file)
                outermost = outermost and not self.is_inside(file)
                if code.co_name == name and (of_package or outermost) and self.is_written(code, file):
                    return False
                if of_package and os.path.isfile(file) and not self.is_written(code, file):
                    return True
            inner = [getattr(each, "__wrapped__", None), each.func if isinstance(each, functools.partial) else None]
            for cell in cells:
                try:
                    inner.append(cell.cell_contents)
                except ValueError:
                    continue  # a cell that is still empty
            pending += [(found, outermost) for found in inner if found is not None]
        return seen > 0

    def source(self, file: str) -> bytes:
        """Return a file's content at the beginning; b"" if it is not known.

        A library's file is read now, if it has not changed since.
        """
        if file in self.sources:
            return self.sources[file]  # type: ignore[no-any-return]
        if self.is_inside(file) or not os.path.isfile(file) or os.stat(file).st_ctime >= self.began:
            return b""
        with open(file, "rb") as opened:
            return opened.read()

    def written(self, file: str) -> Any:
        """Return the shapes of the functions that a file held, both plain and as pytest rewrites them."""
        if file not in self.known:
            self.known[file] = set()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # pytest has shown these warnings, and may turn them into errors
                for code in compile_module(self.source(file), file, self.settings):
                    self.known[file].update(map(shape, functions(code)))
        return self.known[file]


def compile_module(source: bytes, file: str, settings: Any) -> Any:
    """Yield a module's code, plain and, if pytest is installed, with assertions rewritten by its settings."""
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
        rewrite_asserts(tree, source, file, settings)
    else:  # pytest before 5, which writes the path into the code
        rewrite_asserts(tree, importlib.import_module("py").path.local(file))
    yield compile(tree, file, "exec", dont_inherit=True)


def functions(code: Any) -> Any:
    """Yield the code objects nested in a code object, at any depth."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from functions(constant)


def shape(code: Any) -> Any:
    """Return the parts of a code object that determine what it does, without its position."""
    constants = [
        shape(constant) if isinstance(constant, types.CodeType) else (type(constant), constant)
        for constant in code.co_consts
    ]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return (code.co_name, code.co_argcount, code.co_flags, code.co_code, names, tuple(constants))
