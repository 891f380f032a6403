"""A pytest plugin that reports every outcome under a random key.

For Python 3.6 and pytest 3.6 or newer, whatever the project's own settings are. It uses the standard library only
besides pytest, and is put into a container as a package with the modules that it imports.

It is named in PYTEST_PLUGINS. KEYFILE lies beside its folder. It holds the key of the report's lines, the name of the
added tests that must fail, the repository's folder, the earlier content of the changed files, and the names of the
repository's modules at the beginning. `in_sandbox.startup` imports the plugin when Python starts, so that all of these
are gone before any code of the repository can be imported. If a program of the repository calls pytest, the plugin is
imported when pytest is. PYTEST_DONT_REWRITE

`in_sandbox.verifier` runs pytest itself, in the Python that Turnstile runs in. Here it is the data set's command that
runs pytest, in its own version and with its own settings.
"""

import importlib
import os
import sys
import types
from typing import Any

import pytest
from _pytest import config as settings  # a name that begins with pytest would be taken for a hook

from .canary import canaries
from .channel import LONGEST, Channel, codes, find_replaced, first_line, keeper, request
from .imports import guard
from .origin import Origins, real
from .testfiles import Expected, test_files

SEALED = ("pytest", "_pytest", "pluggy", "unittest")


class Report(Channel):
    """Writes begin, collect, test, tampered and end lines."""

    def __init__(self, asked: Any) -> None:
        super().__init__(asked["key"])
        root = asked["root"]
        self.canary = asked["canary"]
        self.outcomes: Any = {}
        self.reported: Any = set()
        self.messages: Any = {}
        self.expected = Expected(root, test_files(root))
        self.origins = Origins(root, asked["before"], asked["repaired"])
        self.unsound: Any = set()
        self.note: Any = None
        self.files: Any = set()
        self.packages: Any = set(SEALED)
        self.parts: Any = {}
        self.sealed = codes(self.packages)
        self.emit(event="begin")

    def is_stranger(self, plugin: Any) -> bool:
        """Return whether a plugin has hooks that are code under test and were not there before the change.

        Changed hooks are allowed in a file that the repair touches too, if it was loaded at the beginning of the run.
        """
        for name in dir(plugin):
            code = getattr(getattr(plugin, name, None), "__code__", None) if name.startswith("pytest_") else None
            if code is not None and self.origins.is_under_test(code.co_filename):
                file = real(code.co_filename)
                early = code.co_filename in self.files and file in self.origins.repaired
                if not early and not self.origins.is_written(code, file):
                    return True
        return False

    def functions(self) -> Any:
        """Return the code objects of the sealed functions now, including those of the report itself."""
        return codes(self.packages, {**sys.modules, **self.parts})

    def seal(self, plugins: Any) -> None:
        """Hide the report from module lookup, and seal the functions of the runner and of `plugins`.

        Anything that the plugins have replaced by now is accepted. So is anything that they replace later with
        functions of their own, as pytest-mock does.
        """
        for name in list(sys.modules):
            if name.partition(".")[0] == __name__:
                self.parts[name] = sys.modules.pop(name)
        for plugin in plugins:
            home = plugin.__name__ if isinstance(plugin, types.ModuleType) else type(plugin).__module__
            self.packages.add(home.partition(".")[0])
        for name, code in self.functions().items():
            if not self.origins.is_under_test(code.co_filename):
                self.sealed[name] = code

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, session: Any, items: Any) -> None:
        if items:
            items += canaries(self.canary, session, items)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.emit(event="collect", id=report.nodeid, message=last_line(report.longrepr))

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = (yield).get_result()
        function = getattr(item, "function", None)
        name = getattr(item, "originalname", None) or item.name.partition("[")[0]
        own = str(getattr(item, "path", None) or item.fspath)
        ours = self.canary in item.nodeid  # it is in no file
        if function is not None and not ours and self.origins.altered(function, name, own):
            self.unsound.add(item.nodeid)
            self.messages[item.nodeid] = "the test that ran is not the one in its file"
        elif hasattr(report, "wasxfail") and not self.expected.of(item):
            self.unsound.add(item.nodeid)
            self.messages[item.nodeid] = "only the tests may say that a failure is expected"
        elif report.failed and item.nodeid not in self.messages:
            text = last_line(report.longrepr) if call.excinfo is None else first_line(call.excinfo.value)
            self.messages[item.nodeid] = text

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
                self.note(report.nodeid, outcome)
        if report.when == "teardown" and report.nodeid in self.outcomes:
            self.reported.add(report.nodeid)
            message = self.messages.get(report.nodeid, "")
            self.emit(event="test", id=report.nodeid, outcome=self.outcomes[report.nodeid], message=message)

    def witness(self) -> Any:
        """Return a plugin that ends the report.

        It keeps the report's original attributes and outcomes in a closure, which no attribute leads to.
        """
        noted: Any = {}
        self.note = noted.__setitem__
        restore = keeper((self, self.origins, self.expected))
        outcomes, reported = self.outcomes, self.reported

        @pytest.hookimpl(trylast=True)
        def pytest_sessionfinish(session: Any, exitstatus: int) -> None:
            changed = restore()
            if outcomes != noted or not reported <= set(noted):
                changed.append("the report's outcomes")
            changed += find_replaced(self.sealed, self.functions())
            plugins = session.config.pluginmanager.get_plugins()
            changed += ["the plugin " + repr(plugin) for plugin in plugins if self.is_stranger(plugin)]
            if changed:
                self.emit(event="tampered", what=changed[0])
            self.emit(event="end", count=len(reported), exit_code=int(exitstatus))

        made: Any = types.ModuleType("witness")
        made.pytest_sessionfinish = pytest_sessionfinish
        return made


def last_line(rendered: Any) -> str:
    """Return the last line of what pytest printed about an error, without its mark."""
    lines = [line.strip() for line in str(rendered).splitlines() if line.strip()]
    text = lines[-1] if lines else ""
    return text[2:].strip()[:LONGEST] if text.startswith("E ") else text[:LONGEST]


def pytest_addoption(parser: Any) -> None:
    """Remove `PYTEST_PLUGINS` from the environment of what the tests start."""
    os.environ.pop("PYTEST_PLUGINS", None)  # pytest has read it, and what the tests start must not


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: Any) -> None:
    """Seal the report before any conftest file is imported."""
    if REPORT is not None:
        REPORT.seal(early_config.pluginmanager.get_plugins())


def pytest_configure(config: Any) -> None:
    """Register the report and its witness, except in the workers of pytest-xdist."""
    if REPORT is not None and not hasattr(config, "workerinput"):
        REPORT.files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        REPORT.origins.settings = config
        config.pluginmanager.register(REPORT.witness(), "turnstile-witness")
        config.pluginmanager.register(REPORT, "turnstile")


def _open() -> Any:
    """Return the report in the process that finds the key, and None in those that it starts."""
    asked = request()
    if asked is None:
        return None
    for name in settings.default_plugins:  # so that they are sealed
        importlib.import_module("_pytest." + name)
    if asked["own"]:
        guard(asked["root"], asked["own"])
    return Report(asked)


REPORT = _open()
