"""An environment for repairing one function of a real package by viewing, editing and testing it."""

from __future__ import annotations

import asyncio
import difflib
import hashlib
from collections.abc import Mapping

from pydantic import PositiveInt

from turnstile.envs.base import Start, Step
from turnstile.swe.bug import Bug, package_of
from turnstile.swe.envs.code import Code, EditError
from turnstile.swe.envs.turns import Done, done, failed, merge_signals, signals
from turnstile.swe.grading.grader import CodeGrader, Verdict
from turnstile.swe.grading.judge import judge
from turnstile.swe.rates import RATES
from turnstile.swe.rewards import DEFAULT_TERMS
from turnstile.types import JSON, Message, Task, ToolCall, ToolSpec

_NOTHING: Mapping[str, JSON] = {"type": "object", "properties": {}, "required": []}

TOOLS = (
    ToolSpec(name="view", description="Show the suspect function.", schema=_NOTHING),
    ToolSpec(
        name="fix",
        description="Replace OLD, which must occur exactly once in the function as shown, by NEW.",
        schema={
            "type": "object",
            "properties": {
                "old": {"type": "string", "description": "text to find, copied from the function"},
                "new": {"type": "string", "description": "text to put in its place", "minLength": 0},
            },
            "required": ["old", "new"],
            "x-line": "{old} -> {new}",
        },
    ),
    ToolSpec(name="undo", description="Take the last fix back.", schema=_NOTHING),
    ToolSpec(name="run", description="Run the failing test and the tests that pass through the function.",
             schema=_NOTHING),
    ToolSpec(name="submit", description="Hand in the code as it is now and end.", schema=_NOTHING),
)  # fmt: skip


class SweEnv:
    """One episode of repairing one bug in one function, with a failing test named in the prompt.

    The working copy is the package's pristine tree with the bug in it, and the agent can change one function. Test runs
    and the final grading use fresh copies in the grader's sandboxes, with the tests that the package ships; an episode
    that only views and edits starts no sandbox. Observations of one line are cut to `chars` characters.

    Turn signals: parsed, command, succeeded, reason (why it did not succeed), looked_at_failing_code, ran_tests,
    tests_passed (None if none ran), modified. Episode signals: submitted, modified, resolved, f2p_passed, f2p_total,
    f2p_tests (whether each of them passed), p2p_passed, p2p_total, patch (a unified diff against the buggy tree).
    """

    rates = RATES
    default_terms = DEFAULT_TERMS
    notes = ("The agent is told which function the bug is in, so what is measured is repair, not search.",)

    def __init__(self, *, grader: CodeGrader, chars: PositiveInt = 70) -> None:
        self._grader = grader
        self._chars = chars

    async def reset(self, task: Task) -> Start:
        """Load the task and return its prompt and tools.

        Raises TaskError if its package cannot be fetched, or is not the one it was made from.
        """
        bug = Bug.of(task)
        self._package = await asyncio.to_thread(package_of, bug)
        text = bug.bugged_text(self._package)
        self._task, self._bug = task, bug
        self._base = Code(text=text, start=bug.shown[0], end=bug.shown[1], hidden=frozenset(bug.hidden))
        self._code = self._base
        self._undo: list[Code] = []
        self._viewed = self._submitted = False
        return Start(messages=(Message(role="user", content=self._prompt()),), tools=TOOLS)

    async def step(self, message: Message) -> Step:
        """Run the message's tool calls in order, up to and including a submit."""
        if not message.tool_calls:
            text = self._cut(f"no command; use {_names()}")
            return Step(messages=(Message(role="user", content=text),), signals=signals("", False, "unreadable"))
        answers: list[Message] = []
        found: dict[str, JSON] = {}
        for call in message.tool_calls:
            answer = await self._call(call)
            found = merge_signals(found, answer.signals)
            if answer.say:
                answers.append(Message(role="tool", content=answer.say, tool_call_id=call.id))
            if self._submitted:
                break
        return Step(messages=tuple(answers), signals=found, terminated=self._submitted, submitted=self._submitted)

    async def measure(self) -> Mapping[str, JSON]:
        """Grade the working copy and return the episode's signals.

        An unchanged copy fails by the definition of a task, so its tests are not run.
        """
        bug = self._bug
        found: dict[str, JSON] = {"submitted": self._submitted, "modified": self._code.text != self._base.text}
        if found["modified"]:
            verdict = await self._grade()
            found |= {
                "resolved": verdict.resolved,
                "f2p_passed": verdict.fail_to_pass_passed,
                "f2p_tests": verdict.passed_by_test(bug.f2p),
                "p2p_passed": verdict.pass_to_pass_passed,
            }
        else:
            untouched = dict.fromkeys(bug.f2p, False)
            found |= {"resolved": False, "f2p_passed": 0, "f2p_tests": untouched, "p2p_passed": len(bug.p2p)}
        return found | {"f2p_total": len(bug.f2p), "p2p_total": len(bug.p2p), "patch": self.patch()}

    def patch(self) -> str:
        """Return the working copy's unified diff against the tree with the bug in it; "" if nothing changed."""
        before, after = (code.text.splitlines(keepends=True) for code in (self._base, self._code))
        return "".join(difflib.unified_diff(before, after, f"a/{self._bug.file}", f"b/{self._bug.file}"))

    def state_key(self) -> str:
        """Return a hash of the code, of what undo would restore, and of whether the function was viewed."""
        digest = hashlib.blake2b(digest_size=12)
        for part in (self._task.id, str(self._viewed), self._code.text, *(code.text for code in self._undo)):
            digest.update(hashlib.blake2b(part.encode("utf-8", "surrogatepass")).digest())
        return digest.hexdigest()

    async def close(self) -> None:
        """Do nothing, because the sandboxes in which the episode's tests ran belong to the grader."""

    def _prompt(self) -> str:
        bug = self._bug
        test = bug.f2p[0].rpartition("::")[2].partition("[")[0]
        return f"{test} fails: {self._cut(bug.message)}\nThe bug is in {bug.function} of {bug.file}."

    async def _call(self, call: ToolCall) -> Done:
        match call.name:
            case "view":
                self._viewed = True
                return done("view", self._code.view(), looked_at_failing_code=True)
            case "fix":
                return self._fix(call.arguments.get("old"), call.arguments.get("new"))
            case "undo":
                return self._take_back()
            case "run":
                return await self._run()
            case "submit":
                self._submitted = True
                return done("submit", "")
            case name:
                return failed(name, self._cut(f"no command {name}; use {_names()}"), "unknown command")

    def _fix(self, old: JSON, new: JSON) -> Done:
        if not isinstance(old, str) or not isinstance(new, str):
            return failed("fix", "fix needs old and new as text", "bad arguments")
        try:
            edited = self._code.replaced(old, new)
        except EditError as error:
            reason = str(error)
            return failed("fix", self._cut(reason), reason.partition(":")[0].partition(";")[0].partition(",")[0])
        self._undo.append(self._code)
        self._code = edited
        line = edited.line_with(new.partition("\n")[0]) if new else ""
        return done("fix", self._cut(f"ok: {line}" if line else "ok"), modified=True)

    def _take_back(self) -> Done:
        if not self._undo:
            return failed("undo", "nothing to undo", "nothing to undo")
        self._code = self._undo.pop()
        return done("undo", "undone")

    async def _run(self) -> Done:
        verdict = await self._grade()
        tests = (*self._bug.f2p, *self._bug.p2p)
        bad = len(tests) - verdict.fail_to_pass_passed - verdict.pass_to_pass_passed
        if verdict.resolved:
            text = f"all {len(tests)} tests pass"
        else:
            first = next((verdict.messages[test] for test in tests if test in verdict.messages), "")
            text = f"{bad} of {len(tests)} tests fail: {verdict.problem or first}"
        return done("run", self._cut(text), ran_tests=True, tests_passed=verdict.resolved)

    async def _grade(self) -> Verdict:
        """Return the verdict on a fresh copy of the package with the working copy's file in it."""
        return await judge(self._grader, self._bug, self._package, self._code.text)

    def _cut(self, text: str) -> str:
        line = " ".join(text.split())
        return line if len(line) <= self._chars else line[: self._chars - 3] + "..."


def _names() -> str:
    return ", ".join(tool.name for tool in TOOLS)
