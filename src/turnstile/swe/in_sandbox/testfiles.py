"""Tell which files hold tests, and which failures their source expects.

For Python 3.6 or newer, with the standard library only, as it also goes into containers beside `in_sandbox.report`.
"""

import ast
import os
from typing import Any

TEST_FOLDERS = frozenset({"test", "tests"})
WHOLE_SUITES = frozenset({"test.py", "tests.py"})
STARTUP = frozenset({"conftest.py", "sitecustomize.py", "usercustomize.py"})
INSTALLED = (".dist-info", ".egg-info")
"""Endings of folders that describe installed packages, which can name plugins of the test runner."""
ENVIRONMENTS = frozenset({".venv", ".tox", ".nox"})
"""Folders of libraries that can be in a repository; changes never reach into them."""
HOOKS = frozenset({"pytest_collection_modifyitems", "pytest_itemcollected", "pytest_runtest_setup"})
"""Functions in a conftest file that can mark any test."""


def is_test_file(path: str) -> bool:
    """Return whether the file at `path` has the name of a test file, as in pytest or in older suites."""
    name = path.rpartition("/")[2]
    return name in WHOLE_SUITES or (name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py")))


def can_change_tests(path: str) -> bool:
    """Return whether a change to `path` could change the tests instead of the code, so grading leaves it out."""
    parts = os.path.normpath(path).split("/")
    return (
        is_test_file(path)
        or parts[-1] in STARTUP
        or parts[-1].startswith("test_")  # data beside the tests
        or parts[-1].endswith((".pyc", ".pth"))
        or not TEST_FOLDERS.isdisjoint(parts[:-1])
        or "__pycache__" in parts
        or any(part.endswith(INSTALLED) for part in parts)
    )


def python_files(root: str) -> Any:
    """Yield the Python files of a repository, without those in hidden folders."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            file = os.path.join(folder, name)
            if name.endswith(".py") and os.path.isfile(file):
                yield file


def test_files(root: str) -> Any:
    """Return an iterator over the Python files of a repository that are tests or beside them."""
    return (file for file in python_files(root) if can_change_tests(os.path.relpath(file, root)))


class Expected:
    """The failures that the test files expect, according to their source when the object is made.

    Marks made by code under test do not count.
    """

    def __init__(self, root: str, files: Any) -> None:
        self.root = os.path.realpath(root)
        self.sources: Any = {}
        for file in files:
            for each in (file, *self.conftests(file)):
                if os.path.isfile(each):
                    with open(each, "rb") as opened:
                        self.sources[os.path.realpath(each)] = opened.read()

    def conftests(self, file: str) -> Any:
        """Yield the paths of the conftest files that apply to a test file, whether or not they exist."""
        folder = os.path.dirname(os.path.realpath(file))
        while folder == self.root or folder.startswith(self.root + os.sep):
            yield os.path.join(folder, "conftest.py")
            folder = os.path.dirname(folder)

    def of(self, item: Any) -> bool:
        """Return whether a test may fail according to the source of it, its class, module, fixtures or hooks."""
        file = os.path.realpath(str(getattr(item, "path", None) or item.fspath))
        function = getattr(item, "function", None)
        names = {getattr(function, "__name__", ""), item.name.partition("[")[0], *getattr(item, "fixturenames", ())}
        above = item.parent
        while above is not None:
            names.add(above.name)
            above = above.parent
        written = os.path.realpath(getattr(getattr(function, "__code__", None), "co_filename", file))
        return self.says({file, written, *map(os.path.realpath, self.conftests(file))}, names | HOOKS)

    def says(self, files: Any, names: Any) -> bool:
        """Return whether one of these files expects a failure, as a whole or where it defines one of `names`."""
        return any(says_xfail(self.sources.get(each, b""), names) for each in files)


def says_xfail(source: bytes, names: Any) -> bool:
    """Return whether a source expects a failure with a mark or a call, for the whole file or in one of `names`."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    words: Any = set()

    def says(node: Any) -> bool:
        for inner in ast.walk(node):
            word = getattr(inner, "attr", None) or getattr(inner, "id", None)
            if isinstance(word, str) and (word in words or "xfail" in word.lower() or word == "expectedFailure"):
                return True
        return False

    for statement in tree.body:
        if isinstance(statement, ast.Assign) and says(statement.value):
            words.update(target.id for target in statement.targets if isinstance(target, ast.Name))
    if "pytestmark" in words:
        return True
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name in names and says(node):
            return True
        if isinstance(node, ast.ClassDef) and node.name in names:
            marks = [inner for inner in node.body if isinstance(inner, ast.Assign)]
            if any(map(says, [*node.decorator_list, *marks])):
                return True
    return False
