"""Demonstrations of repairs, and the two reference agents: the oracle and a random agent.

They act through the tools of `turnstile.swe.envs.swe` (view, fix, undo, run, submit), in messages with tool calls.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Annotated

from pydantic import Field

from turnstile.errors import TaskError
from turnstile.swe.bug import Bug, package_of
from turnstile.swe.fixes import Fix, fixes
from turnstile.tasks.demonstration import Agent, DemoStep, call
from turnstile.types import Message, Task

TOKEN = re.compile(r"\w+|->|==|!=|<=|>=|//|\*\*|[-+*/%]=|[^\w\s]")
_SLIPS = {
    "==": ("!=",), "!=": ("==",), "<": ("<=", ">"), "<=": ("<",), ">": (">=", "<"), ">=": (">",), "+": ("-",),
    "-": ("+",), "*": ("+",), "and": ("or",), "or": ("and",), "True": ("False",), "False": ("True",),
    "min": ("max",), "max": ("min",), "any": ("all",), "all": ("any",), "0": ("1",), "1": ("0", "2"), "2": ("1",),
}  # fmt: skip
Share = Annotated[float, Field(ge=0, le=1)]
"""A share of demonstrations."""


def demonstrate(
    task: Task, rng: random.Random, *, skip_run: Share = 0.25, missed: Share = 0.1, wrong: Share = 0.1
) -> list[DemoStep]:
    """Return a demonstrated repair, from view to submit, in one of several forms drawn with `rng`.

    With probability `missed`, the agent first tries to replace text that is not there. With probability `wrong`, it
    first makes a valid but wrong fix, sees the tests fail and undoes it. In both cases the mistake itself is not
    trainable, but what follows is. Of the other demonstrations, a share `skip_run` submits without running the tests.
    Raises TaskError for a bug that no fix in the view can undo (see `fixes`).
    """
    lines = _shown_lines(task)
    repair = _repair(task)
    steps = [DemoStep(message=call("view"))]
    draw = rng.random()
    if draw < missed:
        slip = _unmatched_edit(lines, rng)
        if slip is not None:
            steps.append(DemoStep(message=_fix(*slip), trainable=False))
    elif draw < missed + wrong:
        slip = _wrong_edit(lines, repair, rng)
        if slip is not None:
            steps.append(DemoStep(message=_fix(*slip), trainable=False))
            steps += [DemoStep(message=call("run")), DemoStep(message=call("undo"))]
    steps += [DemoStep(message=_fix(*fix)) for fix in repair]
    if draw < missed + wrong or rng.random() >= skip_run:
        steps.append(DemoStep(message=call("run")))
    return [*steps, DemoStep(message=call("submit"))]


def oracle(task: Task) -> Agent:
    """Return an agent that knows the bug: it views, makes a fix for each place, runs the tests and submits.

    Raises TaskError as `demonstrate` does.
    """
    actions = iter([call("view"), *(_fix(*fix) for fix in _repair(task)), call("run")])
    return lambda observation: next(actions, call("submit"))


def random_agent(task: Task, rng: random.Random) -> Agent:
    """Return an agent that takes valid actions at random.

    Its fixes replace a token of the shown lines with another of their tokens, or with one of the usual operators and
    words in `_SLIPS`.
    """
    lines = _shown_lines(task)
    tokens = sorted({token for line in lines for token in TOKEN.findall(line)}.union(_SLIPS) - {"->"})

    def act(observation: Sequence[Message]) -> Message:
        name = rng.choice(("view", "fix", "fix", "undo", "run", "submit"))
        edit = random_edit(lines, rng, lambda token: tokens) if name == "fix" else None
        return _fix(*edit) if edit else call("view" if name == "fix" else name)

    return act


def _fix(old: str, new: str) -> Message:
    return call("fix", old=old, new=new)


def _repair(task: Task) -> list[Fix]:
    bug = Bug.of(task)
    try:
        return fixes(bug, bug.pristine_text(package_of(bug)))
    except TaskError as error:
        raise TaskError(f"task {task.id}: {error}") from None


def _shown_lines(task: Task) -> list[str]:
    """Return the lines that a view of the function shows, without indentation."""
    bug = Bug.of(task)
    lines = bug.bugged_text(package_of(bug)).split("\n")
    return [lines[number - 1].strip() for number in bug.shown_lines()]


def random_edit(
    lines: Sequence[str], rng: random.Random, others: Callable[[str], Sequence[str]]
) -> tuple[str, str] | None:
    """Return (old, new) that replaces one token of `lines` with one of `others(token)`; None if there is none.

    Both texts include the neighbouring tokens on the line. `old` occurs once in `lines` and contains no arrow, which
    separates the two texts of a fix in line form.
    """
    places = [
        (line, index, spans)
        for line in lines
        for spans in [[match.span() for match in TOKEN.finditer(line)]]
        for index in range(len(spans))
    ]
    for line, index, spans in rng.sample(places, len(places)):
        begin, end = spans[index]
        first, last = spans[max(index - 1, 0)][0], spans[min(index + 1, len(spans) - 1)][1]
        old = line[first:last]
        choices = [other for other in others(line[begin:end]) if other != line[begin:end]]
        if choices and "->" not in old and sum(other.count(old) for other in lines) == 1:
            return old, line[first:begin] + rng.choice(choices) + line[end:last]
    return None


def _wrong_edit(lines: Sequence[str], repair: Sequence[Fix], rng: random.Random) -> tuple[str, str] | None:
    """Return a plausible but wrong fix on a line that the repair does not touch; None if there is none."""
    touched = [part.strip() for old, _ in repair for part in old.split("\n") if part.strip()]
    healthy = [line for line in lines if not any(part in line for part in touched)]
    edit = random_edit(healthy, rng, lambda token: _SLIPS.get(token, ()))
    return edit if edit and sum(line.count(edit[0]) for line in lines) == 1 else None


def _unmatched_edit(lines: Sequence[str], rng: random.Random) -> tuple[str, str] | None:
    """Return a fix whose old text resembles the code but does not occur in it; None if there is none."""
    edit = random_edit(lines, rng, lambda token: _SLIPS.get(token, ()))
    if edit is None or any(edit[1] in line for line in lines):
        return None
    return edit[1], edit[0]
