"""Tests that are added to a run and must fail.

For Python 3.6 and pytest 3.6 or newer, as it also goes into containers beside `in_sandbox.report`.
"""

import types
import unittest
from typing import Any

import pytest
from _pytest.unittest import TestCaseFunction


class CanaryModule(pytest.Module):
    """A test file that is not on the disk, with a test function and a `TestCase` method that fail.

    `canaries` leaves out the latter if the suite has no such tests. The module has no marks, whatever marks the tests
    beside it have, and settings for the names of tests do not affect it.
    """

    def _getobj(self) -> types.ModuleType:
        canary = self.name.rpartition("/")[2].partition(".")[0]

        def function() -> None:
            raise AssertionError("this test is to fail")

        def method(self: unittest.TestCase) -> None:
            self.fail("this test is to fail")

        made: Any = types.ModuleType(canary)
        function.__name__ = canary
        function.__test__ = True  # type: ignore[attr-defined]
        setattr(made, canary, function)
        made.Case = type("Case", (unittest.TestCase,), {canary: method, "__module__": canary})
        return made  # type: ignore[no-any-return]


def canaries(name: str, session: Any, items: Any) -> Any:
    """Return tests called `name` that must fail: a function, and a `TestCase` method if `items` has any.

    They are placed beside the last of the items, and are run as it is.
    """
    file = items[-1].getparent(pytest.Module) if items else None
    parent: Any = session if file is None or file.parent is None else file.parent
    made: Any = CanaryModule
    if not items:
        module = made.from_parent(parent, path=session.path / (name + ".py"))
    elif hasattr(items[-1], "path"):
        module = made.from_parent(parent, path=items[-1].path.parent / (name + ".py"))
    elif hasattr(made, "from_parent"):
        module = made.from_parent(parent, fspath=items[-1].fspath.dirpath(name + ".py"))
    else:
        module = made(items[-1].fspath.dirpath(name + ".py"), parent)
    with_cases = any(isinstance(item, TestCaseFunction) for item in items)
    return [item for item in session.genitems(module) if with_cases or not isinstance(item, TestCaseFunction)]
