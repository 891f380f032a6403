"""Repairs as fixes of what an agent is shown: of every bug that there is in some real code, really applied."""

from __future__ import annotations

import ast
import heapq
import random
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from turnstile.errors import TaskError
from turnstile.swe.bug import Bug
from turnstile.swe.bugs.families import larger_mutants, pairs
from turnstile.swe.bugs.mutate import KINDS, Mutant, functions, mutants, patch
from turnstile.swe.edits import apply_all
from turnstile.swe.envs.code import Code
from turnstile.swe.fixes import fixes
from turnstile.swe.oracle import demonstrate, oracle
from turnstile.types import Task

OWN = '''
class Box:
    @staticmethod
    def fill(items, size):
        """Fills."""
        # first of all
        items = list(items)

        # a comment before the last
        size += 1
        # and one behind it
        for item in items:
            if item > size:
                size = item
            else:
                size = size - 1
        return size
'''


def bug_of(text: str, mutant: Mutant) -> Bug:
    """What `make` would note of the mutant, less the tests."""
    function, told = mutant.function, patch(text, mutant)
    if not mutant.is_small:
        found = functions(apply_all(text, mutant.edits))
        function = next(one for one in found if (one.qualname, one.start) == (function.qualname, function.start))
    return Bug(
        source="pypi:x==1", package="x", version="1", licence="", requires=(), digest="", file="x.py",
        function=function.qualname, kind=mutant.kind, line=mutant.line, col=mutant.col, old=mutant.old, new=mutant.new,
        buggy=told.buggy, fixed=told.fixed, unique=told.unique, shown=(function.start, function.end),
        hidden=function.hidden, f2p=("t.py::test",), p2p=(), message="", difficulty=1, also=mutant.also,
    )  # fmt: skip


MANY = 80


def bugs_of(text: str, many: int) -> list[Bug]:
    small = mutants(text)
    found = [*small, *larger_mutants(text, KINDS)]
    by_function: dict[int, list[Mutant]] = {}
    for mutant in small:
        by_function.setdefault(mutant.function.start, []).append(mutant)
    for group in by_function.values():
        found += pairs(group, random.Random(0))
    bugs = []
    for mutant in random.Random(1).sample(found, min(many, len(found))):
        try:
            bugs.append(bug_of(text, mutant))
        except SyntaxError:  # the only statement of an else, say: such a candidate breaks the import
            continue
    return bugs


@pytest.mark.parametrize("name", ["own", "textwrap", "heapq"])
def test_fixes_undo_every_bug(name: str) -> None:
    modules = {"textwrap": textwrap, "heapq": heapq}
    text = Path(str(modules[name].__file__)).read_text() if name in modules else OWN
    whole = ast.dump(ast.parse(text))
    applied, refused = Counter[str](), Counter[str]()
    for bug in bugs_of(text, MANY):
        code = Code(text=apply_all(text, bug.edits), start=bug.shown[0], end=bug.shown[1], hidden=frozenset(bug.hidden))
        try:
            repair = fixes(bug, text)
        except TaskError:
            refused[bug.kind] += 1
            continue
        for old, new in repair:
            code = code.replaced(old, new)
        assert ast.dump(ast.parse(code.text)) == whole, (bug.kind, bug.line, repair)
        applied[bug.kind] += 1
    assert len(applied) > 8
    assert refused.total() <= applied.total() // 50, refused


def test_a_bug_that_cannot_be_repaired_by_search_is_refused() -> None:
    text = "class A:\n    def f(self):\n        x = '''a\nb'''\n        return x\n"
    bug = next(bug for bug in bugs_of(text, MANY) if bug.kind == "drop")
    with pytest.raises(TaskError, match=r"a bug of kind drop in A\.f of x\.py \(line 3\) cannot be repaired by search"):
        fixes(bug, text)


@pytest.fixture
def larger(reference: Any, monkeypatch: pytest.MonkeyPatch) -> Task:
    """A task of two bugs in one function of the tiny package."""
    monkeypatch.setenv("TURNSTILE_CACHE", str(reference.cache))
    task = next(task for task in reference.made.tasks if task.id.endswith("l9-minmax-0"))
    return Task(id="two", env="swe", data={**task.data, "also": [[7, 13, "<", ">"]], "kind": "pair", "unique": False})


def test_the_oracle_makes_a_fix_for_each_place(larger: Task) -> None:
    agent = oracle(larger)
    calls = [agent(()).tool_calls[0] for _ in range(5)]
    assert [call.name for call in calls] == ["view", "fix", "fix", "run", "submit"]
    assert [call.arguments["new"] for call in calls[1:3]] == ["    return min(value, high)", "    if value < low:"]
    names = [step.message.tool_calls[0].name for step in demonstrate(larger, random.Random(3), missed=0, wrong=1)]
    assert names[-4:] == ["fix", "fix", "run", "submit"]
