"""Statements that a model words: what it is shown, what is refused, and what a killed call leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turnstile.errors import EngineError, TaskError
from turnstile.swe.bug import Bug
from turnstile.swe.bugs.describe import Described, describe, request
from turnstile.swe.bugs.leaks import leak
from turnstile.tasks.base import load_tasks, write_tasks
from turnstile.types import Message, Task

GOOD = "Clamping a value that is too large gives the value back, where I expected the upper limit."


@pytest.fixture
def tasks(reference: Any, monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    monkeypatch.setenv("TURNSTILE_CACHE", str(reference.cache))
    return [task for task in reference.made.tasks if Bug.of(task).function == "clamp"]


@pytest.fixture
def bug(tasks: list[Task]) -> Bug:
    return next(Bug.of(task) for task in tasks if Bug.of(task).kind == "minmax")


def test_the_request_shows_messages_and_docs_but_not_the_repair(bug: Bug) -> None:
    asked = request(bug)
    for shown in (bug.f2p[0], bug.message, "clamp(value, low, high)", "Between low < high."):
        assert shown in asked
    for secret in (bug.file, bug.fixed, bug.buggy, "value < low", "return min"):
        assert secret not in asked


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("The fault is in src/tiny/__init__.py, somewhere.", "it names the file src/tiny/__init__.py"),
        ("The bug is in src.tiny, I think.", None),
        ("Have a look at line 9 of the module, please.", "it names a line"),
        ("It should `return min( value, high )` instead of what it does.", "it quotes the code: return min("),
        ("It reads `max` there where `min` should stand.", "it names what was changed: max"),
        ("The largest of them is taken, at most or at least.", None),
        (GOOD, None),
    ],
)
def test_a_text_that_gives_the_repair_away_is_detected(bug: Bug, text: str, why: str | None) -> None:
    assert leak(text, bug, request(bug)) == why


@pytest.mark.parametrize(
    ("old", "new", "text", "why"),
    [
        ("<", "<=", "It compares with <= now.", "it names what was changed: <="),
        ("<", "<=", "It should be smaller-or-equal.", "it names what was changed, <=, in words: smaller-or-equal"),
        ("<", "<=", "Be less than or equal.", "it names what was changed, <=, in words: less than or equal"),
        ("<", "<=", "The end is inclusive.", "it names what was changed, <=, in words: inclusive"),
        ("<", "<=", "At least one of them is lost.", None),
        ("not ", "", "Remove the negation.", "it says what to do: Remove the negation"),
        ("not ", "", "It is negated.", "it names what was changed, not, in words: negat"),
        ("3", "4", "It must stop at three.", "it names what was changed, 3, in words: three"),
        ("3", "4", "clamp(5) gives five, and should give nine instead.", None),
        ("10", "11", "It is 11 where 10 is right.", "it names what was changed: 10"),
        ("and", "or", "Both are needed, this and that.", None),
        ("and", "or", "There is an `or` too many.", "it names what was changed: or"),
        ("low", "high", "Something is off with high values.", "it names what was changed: high"),
        ("    total += carry_over\n", "", "The total lacks carry_over.", "it names what was changed: carry_over"),
        ("    total += carry_over\n", "", "it lacks total += carry_over", "it quotes the code: total += carry_over"),
    ],
)
def test_naming_the_changed_code_gives_the_repair_away(
    bug: Bug, old: str, new: str, text: str, why: str | None
) -> None:
    changed = replace(bug, old=old, new=new, fixed=old, buggy=new)
    assert leak(text, changed, "nothing of it") == why


def test_lines_that_were_shown_may_be_repeated(bug: Bug) -> None:
    changed = replace(bug, old="5", new="6", fixed="5", buggy="6")
    assert leak("The test says:\nassert 6 == 5\n", changed, "    assert 6 == 5\n") is None
    assert leak("The test says 6.", changed, "    assert 6 == 5\n") == "it names what was changed: 6"


def describe_now(*arguments: Any, **knobs: Any) -> list[Described]:
    return asyncio.run(describe(*arguments, **knobs))


def test_statements_are_written_refused_and_remembered(tasks: list[Task], tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    write_tasks(file, [*tasks[:2], Task(id="g", env="guess")])
    asked: list[str] = []

    async def write(messages: Sequence[Message], seed: int) -> str:
        asked.append(messages[0].content)
        if len(asked) == 3:
            raise EngineError("the engine broke")
        return GOOD if len(asked) == 1 else "Look at line 9, which I have read with great care."

    with pytest.raises(EngineError):
        describe_now(file, write, model="m", tries=3, concurrent=1)
    assert load_tasks(file)[:2] == tasks[:2]
    side = Path(f"{file}.statements.jsonl")
    assert len(side.read_text().splitlines()) == 1
    with side.open("a") as torn:
        torn.write('{"digest": "to')
    found = describe_now(file, write, model="m", tries=2, concurrent=1)
    assert len(asked) == 5  # the first was known, the second had two tries
    first, second, other = load_tasks(file)
    assert found == [Described(task=first), Described(task=tasks[1], why="it names a line")]
    assert (first.data["statement"], first.data["statement_by"]) == (GOOD, "m")
    assert (second, other.id) == (tasks[1], "g")
    assert [json.loads(line)["why"] for line in side.read_text().splitlines()] == [None, "it names a line"]
    assert describe_now(file, write, model="m", tries=2) == found
    assert len(asked) == 5


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("No.", "it is no report: it has 3 characters of prose"),
        (f"```python\n{GOOD}\n```", "it is no report: it has 0 characters of prose"),
        ("I was to write the bug report, in two to six plain sentences: so here.", "it repeats what it was asked"),
    ],
)
async def test_a_text_that_is_no_bug_report_is_refused(tasks: list[Task], tmp_path: Path, text: str, why: str) -> None:
    async def write(messages: Sequence[Message], seed: int) -> str:
        return text

    write_tasks(tmp_path / "t.jsonl", tasks[:1])
    (found,) = await describe(tmp_path / "t.jsonl", write, model="m", tries=1)
    assert str(found.why).startswith(why)
    assert load_tasks(tmp_path / "t.jsonl") == tasks[:1]


async def test_a_file_without_repository_tasks_is_refused(tmp_path: Path) -> None:
    async def never(messages: Sequence[Message], seed: int) -> str:
        raise AssertionError("nothing is to be written")

    write_tasks(tmp_path / "t.jsonl", [Task(id="g", env="guess")])
    with pytest.raises(TaskError, match="there is no repository task to describe"):
        await describe(tmp_path / "t.jsonl", never, model="m")
