"""What holds of any source tree: its digest, and which of its files are tests.

Of the standard library, as it is also run in sandboxes beside the code under test.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path, PurePosixPath

from turnstile.errors import TaskError

TEST_FOLDERS = frozenset({"test", "tests"})
STARTUP = frozenset({"conftest.py", "sitecustomize.py", "usercustomize.py"})
UNCOUNTED = frozenset({"__pycache__", ".git"})


def inside(path: str) -> str:
    """The path itself. Raises ValueError when it leaves the folder that it is relative to."""
    if os.path.isabs(path) or os.path.normpath(path).split(os.sep)[0] == os.pardir:
        raise ValueError(f"the path {path!r} leaves the template; give one relative to its root")
    return path


def is_test_file(path: str) -> bool:
    """Whether pytest collects the file at `path`, going by its name."""
    name = PurePosixPath(path).name
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def can_change_tests(path: str) -> bool:
    """Whether a change to `path` could change the tests instead of the code, so that grading leaves it out."""
    parts = PurePosixPath(path)
    return (
        is_test_file(path)
        or parts.name in STARTUP
        or parts.name.startswith("test_")  # data beside the tests
        or parts.name.endswith((".pyc", ".pth"))
        or not TEST_FOLDERS.isdisjoint(parts.parts[:-1])
        or "__pycache__" in parts.parts
    )


def tree_digest(tree: Path) -> str:
    """SHA-256 over the paths and contents of all files of the tree, byte code and history left out.

    Task files name packages by it, so it must not change. Raises TaskError when there is no such folder.
    """
    if not tree.is_dir():
        raise TaskError(f"there is no template folder {tree}")
    total = hashlib.sha256()
    for path in sorted(tree.rglob("*")):
        inner = path.relative_to(tree)
        if path.is_file() and UNCOUNTED.isdisjoint(inner.parts):
            total.update(inner.as_posix().encode() + b"\0")
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()
