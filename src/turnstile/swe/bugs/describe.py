"""Replace problem statements with a model's, unless those give the repair away.

The model's texts are kept beside the task file in `FILE.statements.jsonl`, one line per task, so that a call that was
killed resumes where it stopped. The task file itself is written at the end, in one step.
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
_DOCSTRING = 1500  # most characters of a docstring shown to the model
_ECHO = 5  # consecutive words of the instructions that count as repeating them

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
    """The outcome for one task; `why` says why the model's last text was refused and the old statement kept."""

    task: Task
    why: str | None = None


def request(bug: Bug) -> str:
    """Return the prompt that asks a model for a problem statement.

    It contains what the failing tests say, and the function's signature and docstring.
    """
    return _ASK.format(package=bug.package, evidence=_evidence(bug), function=_documentation(bug))


def _evidence(bug: Bug) -> str:
    if bug.statement and not bug.statement_by:
        return bug.statement
    return problem_statement(bug.package, bug.f2p, len(bug.p2p), {bug.f2p[0]: bug.message})


def _documentation(bug: Bug) -> str:
    """Return the function's signature and its docstring, if any; neither ever contains a bug.

    Raises TaskError if no function begins at the line that the task names.
    """
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
    """Replace the problem statements in a task file with a model's, in at most `tries` attempts per task.

    `write` samples the texts, and `model` is the name to record for it. A text is refused if it gives the repair away
    (`leaks.leak`), repeats its instructions, or has too little or too much prose; a task whose attempts were all
    refused keeps its statement. Tasks that this model has already described, or failed to describe, are not sent to it
    again. `done` receives each result. Raises TaskError for a file without repository tasks, and any error of `write`.
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
                text, why = await _write_statement(bug, write, tries)
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
    found = await _run_all(map(one, mine))
    by_id = {described.task.id: described.task for described in found}
    write_tasks(file, [by_id.get(task.id, task) for task in tasks])
    return found


async def _run_all(jobs: Iterable[Awaitable[Described]]) -> list[Described]:
    """Return the results of all jobs. The first error cancels the others and is raised unchanged."""
    running = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for job in running:
            job.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _write_statement(bug: Bug, write: Writer, tries: int) -> tuple[str, str | None]:
    """Return a statement and None, or "" and the reason why the last text was refused."""
    asked = request(bug)
    why: str | None = None
    for seed in range(tries):
        text = (await write([Message(role="user", content=asked)], seed)).strip()
        why = _refusal(text, bug, asked)
        if why is None:
            return text, None
    return "", why


def _refusal(text: str, bug: Bug, asked: str) -> str | None:
    """Return why a text cannot be used as a statement, as a clause; None if it can."""
    prose = re.sub(r"```.*?(```|\Z)", " ", text, flags=re.DOTALL).split()
    size = len(" ".join(prose))
    if not SHORTEST <= size <= LONGEST:
        return f"it is no report: it has {size} characters of prose, not {SHORTEST} to {LONGEST}"
    instructions = " ".join(_ASK.partition("\n\n")[0].split())
    if any(" ".join(prose[at : at + _ECHO]) in instructions for at in range(len(prose) - _ECHO + 1)):
        return "it repeats what it was asked"
    return leak(text, bug, asked)
