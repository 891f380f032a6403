from __future__ import annotations

import pytest

from turnstile.tasks.swe.beside.startup import runs_pytest


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
def test_which_process_takes_the_key(command: str, found: bool) -> None:
    assert runs_pytest(command.split()) is found
