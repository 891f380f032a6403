"""Limit which modules of a repository may replace those of the image.

For Python 3.6 or newer, with the standard library only.
"""

import importlib.machinery
import os
import sys
from typing import Any


class Guard(importlib.machinery.FileFinder):
    """Finds modules in a folder of the repository, except those that would replace a library of the image."""

    libraries: Any = frozenset()

    def find_spec(self, fullname: str, target: Any = None) -> Any:
        return None if fullname in self.libraries else super().find_spec(fullname, target)


def guard(root: str, own: Any) -> None:
    """Keep the repository's modules from replacing those outside it, except for the names in `own`."""
    names: Any = set()
    for place in sys.path:
        if os.path.isdir(place) and not (os.path.realpath(place) + os.sep).startswith(root + os.sep):
            for name in os.listdir(place):
                if name.endswith((".py", ".so")) or os.path.isfile(os.path.join(place, name, "__init__.py")):
                    names.add(name.partition(".")[0])
    Guard.libraries = frozenset(names.difference(own))
    machinery = importlib.machinery
    loaders: Any = (
        (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
        (machinery.SourceFileLoader, machinery.SOURCE_SUFFIXES),
        (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
    )

    def hook(path: str) -> Guard:
        if not os.path.isdir(path) or not (os.path.realpath(path) + os.sep).startswith(root + os.sep):
            raise ImportError("a folder outside the repository", path=path)
        return Guard(path, *loaders)

    sys.path_hooks.insert(0, hook)
    sys.path_importer_cache.clear()
