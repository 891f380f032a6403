from __future__ import annotations

import pytest

from turnstile.swe.in_sandbox.startup import runs


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("-m pytest tests", True),
        ("-mpytest", True),
        ("-X dev -W error -B /opt/bin/pytest -rA", True),
        ("/opt/bin/py.test", True),
        ("-m coverage run -m pytest", True),
        ("setup.py pytest", False),
        ("-m tox -- pytest", False),
        ("-c pass pytest", False),
        ("", False),
    ],
)
def test_only_a_process_of_pytest_takes_the_key(command: str, found: bool) -> None:
    assert runs("pytest", command.split()) is found


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("-m unittest -v tests.test_a", True),
        ("./tests/runtests.py --verbosity 2 app", True),
        ("-W error manage.py test", True),
        ("-m coverage run -m unittest discover", True),
        ("-m pytest tests", False),
        ("-m pip install unittest", False),
        ("", False),
    ],
)
def test_only_a_process_of_unittest_takes_the_key(command: str, found: bool) -> None:
    assert runs("unittest", command.split()) is found
