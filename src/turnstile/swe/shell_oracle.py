"""Reference agents for the shell and editor of `turnstile.swe.envs.shell`: the oracle and a random agent.

The oracle repairs a generated task; its repairs also serve as demonstrations.
"""

from __future__ import annotations

import random
import re
import shlex
from collections.abc import Generator, Sequence

from turnstile.swe.bug import Bug, package_of
from turnstile.swe.edits import apply
from turnstile.swe.oracle import TOKEN, Share, random_edit
from turnstile.swe.tree import can_change_tests
from turnstile.tasks.demonstration import Agent, DemoStep, call
from turnstile.types import Message, Task


def demonstrate(task: Task, rng: random.Random, *, skip_run: Share = 0.25) -> list[DemoStep]:
    """Return a demonstrated repair: run the failing test, view the function, edit it, run the test again, submit.

    A share `skip_run` of demonstrations, drawn with `rng`, leaves out the second run.
    """
    bug = Bug.of(task)
    test = call("bash", command=f"python -m pytest -q {shlex.quote(bug.f2p[0])} 2>&1 | tail -n 20")
    view = call("view", path=bug.file, start=bug.shown[0], end=bug.shown[1])
    steps = [test, view, *_replacements(bug, task)]
    if rng.random() >= skip_run:
        steps.append(test)
    return [DemoStep(message=message) for message in (*steps, call("submit"))]


def oracle(task: Task) -> Agent:
    """Return an agent that makes the known repair step by step, whatever messages it gets."""
    script = iter(step.message for step in demonstrate(task, random.Random(task.id), skip_run=0.0))

    def act(_: Sequence[Message]) -> Message:
        return next(script, call("submit"))

    return act


_EDITS = 3
_LIST = "find . -name '*.py' -type f -not -path '*/.*' | sort"
_NUMBERED = re.compile(r"^ *\d+\t(.*)$", re.MULTILINE)


def random_agent(task: Task, rng: random.Random) -> Agent:
    """Return an agent that takes valid actions without regard to the task.

    A few times it replaces a token with another from the same file, in source files drawn at random; then it submits.
    """
    turns = _random_actions(rng)
    next(turns)

    def act(seen: Sequence[Message]) -> Message:
        return turns.send(seen[-1].content)

    return act


def _random_actions(rng: random.Random) -> Generator[Message, str, None]:
    """Yield the agent's actions; the answer to each is sent in to get the next one."""
    yield call("submit")  # never used: the prompt is sent in as its answer
    listed = yield call("bash", command=_LIST)
    files = [line.removeprefix("./") for line in listed.splitlines() if line.startswith("./") and line.endswith(".py")]
    files = [file for file in files if not can_change_tests(file)]
    for _ in range(_EDITS if files else 0):
        path = rng.choice(files)
        shown = yield call("view", path=path)
        edit = _random_token_edit(_NUMBERED.findall(shown), rng)
        if edit is not None:
            yield call("str_replace", path=path, old=edit[0], new=edit[1])
    while True:
        yield call("submit")


def _random_token_edit(lines: Sequence[str], rng: random.Random) -> tuple[str, str] | None:
    tokens = sorted({token for line in lines for token in TOKEN.findall(line)})
    return random_edit(lines, rng, lambda token: tokens)


def _replacements(bug: Bug, task: Task) -> list[Message]:
    """Return one replacement for each place of the bug, each of a text that occurs once.

    The last place comes first, so that the others do not move.
    """
    package = package_of(task)
    pristine = bug.pristine_text(package)
    messages = []
    before = bug.bugged_text(package)
    edits = sorted(bug.edits)
    for count in reversed(range(len(edits))):
        after = pristine
        for line, col, old, new in reversed(edits[:count]):
            after = apply(after, line, col, old, new)
        messages.append(call("str_replace", path=bug.file, **_difference(before, after)))
        before = after
    return messages


def _difference(before: str, after: str) -> dict[str, str]:
    """Return `old` and `new` of a replacement that turns `before` into `after`.

    Both are whole lines, with as many lines around them as needed for `old` to occur once.
    """
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    first = next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    last = 0
    while last < min(len(old), len(new)) - first and old[-1 - last] == new[-1 - last]:
        last += 1
    wider = 0
    while True:
        start, end = max(first - wider, 0), max(last - wider, 0)
        text = "".join(old[start : len(old) - end])
        if (text and before.count(text) == 1) or (start, end) == (0, 0):
            return {"old": text, "new": "".join(new[start : len(new) - end])}
        wider += 1
