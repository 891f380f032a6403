"""A pytest plugin that tells every outcome under a random key. For Python 3.6 and pytest 3.6 or newer, whatever the
project's own settings are; of the standard library, and handed into a container as a package with `testfiles` in it.

It is named in PYTEST_PLUGINS. Beside its folder lies KEYFILE: the key of the report's lines, the name of the test that
it adds, which must fail, the repository's folder, and the names that its modules had at the beginning.
`beside.startup` imports it when Python starts, so that all of these are gone before any code of the repository can be
imported. Where pytest is called by a program of the repository, it is imported when pytest is. PYTEST_DONT_REWRITE
"""

import importlib
import importlib.machinery
import json
import os
import sys
from typing import Any

import pytest
from _pytest import config as pytest_config

from .testfiles import Expected, can_change_tests, test_files

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KEYFILE = "key.json"
SEALED = ("pytest", "_pytest", "pluggy", "unittest")


class Report:
    """Writes begin, test, tampered and end lines to the standard output as it was at the beginning."""

    def __init__(self, key: str, canary: str, root: str) -> None:
        self.key, self.canary = key, canary
        self.channel = os.dup(1)
        self.write: Any = os.write
        self.dumps: Any = json.dumps
        self.outcomes: Any = {}
        self.expected = Expected(root, test_files(root))
        self.unsound: Any = set()
        self.count = 0
        self.root = root + os.sep
        self.files: Any = set()
        self.sealed = self.codes()
        self.emit(event="begin")

    def emit(self, **event: Any) -> None:
        data = f"\n{self.key} {self.dumps(event)}\n".encode()
        while data:
            data = data[self.write(self.channel, data) :]

    def codes(self) -> Any:
        """The code of every function of the test runner that is loaded."""
        found: Any = {}
        for place, module in list(sys.modules.items()):
            if module is None or place.partition(".")[0] not in SEALED:
                continue
            for name, value in list(vars(module).items()):
                found[place, name] = getattr(value, "__code__", None)
                if isinstance(value, type) and value.__module__ == place:
                    for inner, method in list(vars(value).items()):
                        found[place, name, inner] = getattr(method, "__code__", None)
        return {name: code for name, code in found.items() if code is not None}

    def is_stranger(self, plugin: Any) -> bool:
        """Whether a plugin's hooks are written in code under test."""
        for name in dir(plugin):
            code = getattr(getattr(plugin, name, None), "__code__", None) if name.startswith("pytest_") else None
            if code is not None and code.co_filename not in self.files and self.is_under_test(code.co_filename):
                return True
        return False

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, session: Any, items: Any) -> None:
        if not items:
            return
        parent = items[-1]
        while parent.parent is not None and not isinstance(parent, pytest.Module):
            parent = parent.parent

        def canary() -> None:
            raise AssertionError("this test is to fail")

        canary.__name__ = self.canary
        if hasattr(pytest.Function, "from_parent"):
            items.append(pytest.Function.from_parent(parent, name=self.canary, callobj=canary))
        else:
            items.append(pytest.Function(self.canary, parent, callobj=canary))

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = (yield).get_result()
        if hasattr(report, "wasxfail") and not self.expected.of(item):
            self.unsound.add(item.nodeid)  # only the tests may say that a failure is expected
        if self.is_altered(item):
            self.unsound.add(item.nodeid)

    def is_under_test(self, file: str, item: Any = None) -> bool:
        """Whether a file is of the repository and no test."""
        file = os.path.realpath(file)
        own = "" if item is None else os.path.realpath(str(getattr(item, "path", None) or item.fspath))
        return file.startswith(self.root) and file != own and not can_change_tests(file[len(self.root) :])

    def is_altered(self, item: Any) -> bool:
        """Whether a test, under its decorators, is a function of the code under test."""
        pending: Any = [getattr(item, "function", None)]
        found: Any = []
        while pending and len(found) < 50:
            function = pending.pop()
            code = getattr(function, "__code__", None)
            if code is None:
                continue
            found.append(code)
            pending.append(getattr(function, "__wrapped__", None))
            for cell in getattr(function, "__closure__", None) or ():
                try:
                    pending.append(cell.cell_contents)
                except ValueError:
                    continue  # a cell that is empty as yet
        return bool(found) and all(self.is_under_test(code.co_filename, item) for code in found)

    def pytest_runtest_logreport(self, report: Any) -> None:
        expected = hasattr(report, "wasxfail")
        if report.skipped:
            outcome = "XFAIL" if expected else "SKIPPED"
        elif report.passed:
            outcome = "XPASS" if expected else "PASSED"
        else:
            outcome = "FAILED" if report.when == "call" else "ERROR"
        if report.nodeid in self.unsound:
            outcome = "FAILED"
        if report.when == "call" or outcome not in ("PASSED", "XPASS"):
            known = self.outcomes.get(report.nodeid)
            if known is None or known in ("PASSED", "XPASS"):
                self.outcomes[report.nodeid] = outcome
        if report.when == "teardown" and report.nodeid in self.outcomes:
            self.count += 1
            self.emit(event="test", id=report.nodeid, outcome=self.outcomes[report.nodeid])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        now = self.codes()
        own = set(map(id, self.sealed.values()))  # pytest puts functions of its own in the place of others
        changed = [".".join(name) for name in self.sealed if id(now.get(name)) not in own]
        plugins = session.config.pluginmanager.get_plugins()
        strangers = ["the plugin " + repr(plugin) for plugin in plugins if self.is_stranger(plugin)]
        if changed or strangers:
            self.emit(event="tampered", what=(changed + strangers)[0])
        self.emit(event="end", count=self.count, exit_code=int(exitstatus))


class Guard(importlib.machinery.FileFinder):
    """Imports from a folder of the repository, but nothing in the place of a library of the image."""

    libraries: Any = frozenset()

    def find_spec(self, fullname: str, target: Any = None) -> Any:
        return None if fullname in self.libraries else super().find_spec(fullname, target)


def guard(root: str, own: Any) -> None:
    """Has modules be imported from outside the repository where they are there, but those whose names are in `own`."""
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


def pytest_addoption(parser: Any) -> None:
    os.environ.pop("PYTEST_PLUGINS", None)  # pytest has read it, and what the tests start is not to


def pytest_configure(config: Any) -> None:
    if REPORT is not None and not hasattr(config, "workerinput"):
        REPORT.files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        config.pluginmanager.register(REPORT, "turnstile")


def _open() -> Any:
    """The report of the process that finds the key; those that it starts find none."""
    file = os.path.join(HERE, KEYFILE)
    if not os.path.exists(file):
        return None
    with open(file) as opened:
        asked = json.load(opened)
    os.unlink(file)
    os.unlink(__file__)
    os.unlink(os.path.join(os.path.dirname(__file__), "testfiles.py"))
    sys.path[:] = [place for place in sys.path if os.path.abspath(place or ".") != HERE]
    for name in pytest_config.default_plugins:  # so that they are sealed
        importlib.import_module("_pytest." + name)
    root = os.path.realpath(asked["root"])
    if asked["own"]:
        guard(root, asked["own"])
    return Report(asked["key"], asked["canary"], root)


REPORT = _open()
