"""Problem statements in a model's words, if they give nothing away; else the template's are kept.

What a model wrote is kept beside the task file, line by line in `FILE.statements.jsonl`, so that a killed call goes on
where it stopped; the task file itself is written at the end, in one step.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from turnstile.agents.writer import Writer
from turnstile.errors import TaskError
from turnstile.swe.bug import ENV, Bug, package_of
from turnstile.swe.bugs.leaks import leak
from turnstile.swe.bugs.statement import problem_statement
from turnstile.swe.grading.notes import digest
from turnstile.tasks import jsonl_log
from turnstile.tasks.base import load_tasks, write_tasks
from turnstile.types import Message, Task

SHORTEST, LONGEST = 40, 2000  # characters of a statement
_DOCSTRING = 1500  # characters of a docstring that are shown
_ECHO = 5  # words in a row that count as a repetition of the request

_ASK = """\
You use the Python package {package} and found a fault in it. Write the bug report, in two to six plain sentences: \
what you tried, what you expected, and what happened instead. You have not seen the code: do not guess at the cause, \
and propose no change. Name no file and no line.

What the package's tests say:

{evidence}

What the documentation says:

{function}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Described:
    """The result for one task's statement: written by the model, or kept for the reason in `why`."""

    task: Task
    why: str | None = None


def request(bug: Bug) -> str:
    """Return the request to a model: it holds what failing tests say, and the function's signature and docstring."""
    return _ASK.format(package=bug.package, evidence=_evidence(bug), function=_documentation(bug))


def _evidence(bug: Bug) -> str:
    if bug.statement and not bug.statement_by:
        return bug.statement
    return problem_statement(bug.package, bug.f2p, len(bug.p2p), {bug.f2p[0]: bug.message})


def _documentation(bug: Bug) -> str:
    """Return the function's signature, and its docstring if there is one; neither ever carries a bug."""
    tree = ast.parse(bug.bugged_text(package_of(bug)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == bug.shown[0]:
                docstring = (ast.get_docstring(node) or "")[:_DOCSTRING]
                return f"{bug.function}({ast.unparse(node.args)})" + (f"\n\n{docstring}" if docstring else "")
    raise TaskError(f"{bug.file} has no function {bug.function} at line {bug.shown[0]}; make the task again")


async def describe(
    file: str | Path,
    write: Writer,
    *,
    model: str,
    tries: int = 3,
    concurrent: int = 8,
    done: Callable[[Described], None] = lambda one: None,
) -> list[Described]:
    """Give the repository tasks of a file statements that `model` writes, in at most `tries` attempts each.

    A text is refused if it gives the repair away (`leaks.leak`) or is not a text of a few sentences; the task then
    keeps its statement. Tasks that this model has already described, or failed to describe, are left as they are.
    Raises TaskError for a file without repository tasks, and any error of `write`.
    """
    tasks = load_tasks(file)
    side = Path(f"{file}.statements.jsonl")
    known = {record["digest"]: record for record in jsonl_log.read(side) if record["model"] == model}
    places = asyncio.Semaphore(concurrent)

    async def one(task: Task) -> Described:
        bug = Bug.of(task)
        record = known.get(digest(task))
        if record is None and bug.statement_by != model:
            async with places:
                text, why = await _written(bug, write, tries)
            record = {"id": task.id, "digest": digest(task), "model": model, "statement": text, "why": why}
            jsonl_log.append(side, json.dumps(record))
        if record is None:
            found = Described(task=task)
        elif record["why"] is not None:
            found = Described(task=task, why=record["why"])
        else:
            described = replace(bug, statement=record["statement"], statement_by=model)
            found = Described(task=replace(task, data=described.data()))
        done(found)
        return found

    mine = [task for task in tasks if task.env == ENV]
    if not mine:
        raise TaskError(f"{file}: there is no repository task to describe")
    found = await _all(map(one, mine))
    by_id = {described.task.id: described.task for described in found}
    write_tasks(file, [by_id.get(task.id, task) for task in tasks])
    return found


async def _all(jobs: Iterable[Awaitable[Described]]) -> list[Described]:
    """Wait for all jobs; the first error cancels the others and is raised as it is."""
    running = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for job in running:
            job.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _written(bug: Bug, write: Writer, tries: int) -> tuple[str, str | None]:
    """Return a statement and None, or "" and why the last text was refused."""
    asked = request(bug)
    why: str | None = None
    for seed in range(tries):
        text = (await write([Message(role="user", content=asked)], seed)).strip()
        why = _refusal(text, bug, asked)
        if why is None:
            return text, None
    return "", why


def _refusal(text: str, bug: Bug, asked: str) -> str | None:
    """Return why a text cannot be a statement, as a clause; None if it can."""
    prose = re.sub(r"```.*?(```|\Z)", " ", text, flags=re.DOTALL).split()
    size = len(" ".join(prose))
    if not SHORTEST <= size <= LONGEST:
        return f"it is no report: it has {size} characters of prose, not {SHORTEST} to {LONGEST}"
    instructions = " ".join(_ASK.partition("\n\n")[0].split())
    if any(" ".join(prose[at : at + _ECHO]) in instructions for at in range(len(prose) - _ECHO + 1)):
        return "it repeats what it was asked"
    return leak(text, bug, asked)
