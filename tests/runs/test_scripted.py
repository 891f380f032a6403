from __future__ import annotations

import pytest

from turnstile.agents.parsing.hermes import HermesParser
from turnstile.agents.parsing.lines import LineParser
from turnstile.errors import TaskError
from turnstile.runs.scripted import write_action
from turnstile.swe.envs.swe import TOOLS
from turnstile.tasks.demonstration import call
from turnstile.types import Task

TASK = Task(id="t", env="swe")


def test_an_action_that_the_syntax_cannot_express_is_refused() -> None:
    """A line that was cut would teach another action than the script's."""
    for action in (
        call("fix", old="a\nb", new="c"),
        call("fix", old="x -> y", new="z"),
        call("fix", old="a", new=" b"),
    ):
        with pytest.raises(TaskError, match=r"task t: its script's action 'fix .* take agent\.renderer=chat"):
            write_action(TASK, action, LineParser(), TOOLS)
        assert HermesParser().parse(write_action(TASK, action, HermesParser(), TOOLS), TOOLS).tool_calls
    assert write_action(TASK, call("fix", old="a < b", new=""), LineParser(), TOOLS) == "fix a < b ->"
