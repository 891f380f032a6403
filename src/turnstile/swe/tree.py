"""Compute the digest of a source tree, and tell which files are tests or would hide a library.

Needs only the standard library, as it also runs in sandboxes beside the code under test.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from turnstile.errors import TaskError
from turnstile.swe.in_sandbox.testfiles import can_change_tests, is_test_file

__all__ = ["can_change_tests", "hides_a_library", "inside", "is_test_file", "tree_digest"]

RUNNER = frozenset({"pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "turnstile"})
"""The top-level modules that a verifier imports besides the standard library to run tests."""
UNCOUNTED = frozenset({"__pycache__", ".git"})


def inside(path: str) -> str:
    """Return the path unchanged. Raises ValueError if it is absolute or leaves the folder it is relative to."""
    if os.path.isabs(path) or os.path.normpath(path).split(os.sep)[0] == os.pardir:
        raise ValueError(f"the path {path!r} leaves the template; give one relative to its root")
    return path


def hides_a_library(path: str, exists: Callable[[str], bool], import_path: Iterable[str]) -> bool:
    """Return whether a new file at `path` would be imported instead of a library.

    Libraries are the standard library, the modules that run the tests, and the dependencies. `exists` tells whether the
    original tree has a path. `import_path` is the tests' PYTHONPATH, with relative folders of the tree and absolute
    folders of dependencies.
    """
    places = [os.path.normpath(place) for place in import_path]
    libraries = {entry.name.removesuffix(".py") for place in places if os.path.isabs(place)
                 for entry in Path(place).iterdir()}  # fmt: skip
    for root in {".", *(place for place in places if not os.path.isabs(place))}:
        inside = os.path.relpath(os.path.normpath(path), root).split(os.sep)
        name = inside[0].partition(".")[0]
        if not name or not (name in sys.stdlib_module_names or name in RUNNER or name in libraries):
            continue
        if not exists(os.path.normpath(f"{root}/{name}")) and not exists(os.path.normpath(f"{root}/{name}.py")):
            return True
    return False


def tree_digest(tree: Path) -> str:
    """Return a SHA-256 over the paths and contents of a tree's files, except byte code and git history.

    Task files identify packages by it, so the way it is computed must not change. Raises TaskError if there is no such
    folder.
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
