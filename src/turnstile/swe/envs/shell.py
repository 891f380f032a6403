"""An environment for repairing a repository with a shell and an editor, for models that can call tools."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import PurePosixPath

from pydantic import PositiveFloat, PositiveInt

from turnstile.envs.base import Start, Step
from turnstile.errors import DiskFullError, OutOfMemoryError
from turnstile.sandboxes.base import Limits
from turnstile.swe.envs.shell_files import FileTools
from turnstile.swe.envs.turns import Done, done, failed, merge_signals, signals
from turnstile.swe.problems.base import Problem, graded_patch
from turnstile.swe.problems.copy import ChangeError, Copy, Manifest
from turnstile.swe.problems.problems import Problems
from turnstile.swe.rates import RATES
from turnstile.swe.rewards import DEFAULT_TERMS
from turnstile.types import JSON, Message, Task, ToolCall, ToolSpec

_PATH = {"type": "string", "description": "relative to the repository's root"}


def _tool(name: str, description: str, required: tuple[str, ...] = (), **properties: Mapping[str, JSON]) -> ToolSpec:
    schema = {"type": "object", "properties": dict(properties), "required": list(required)}
    return ToolSpec(name=name, description=description, schema=schema)


TOOLS = (
    _tool(
        "bash",
        "Run a command with bash. Every call begins in the repository's root with a fresh shell: only files last. "
        "There is no input and no network; both outputs come back as one, long ones without their middle.",
        ("command",),
        command={"type": "string"},
    ),
    _tool(
        "view",
        "Show a file with line numbers, or what is in a folder.",
        ("path",),
        path=_PATH,
        start={"type": "integer", "description": "first line, from 1"},
        end={"type": "integer", "description": "last line"},
    ),
    _tool(
        "str_replace",
        "Replace old, which must occur exactly once in the file, by new.",
        ("path", "old", "new"),
        path=_PATH,
        old={"type": "string", "description": "text to find, as it stands in the file, without line numbers"},
        new={"type": "string", "description": "text to put in its place"},
    ),
    _tool("create", "Write a new file.", ("path", "text"), path=_PATH, text={"type": "string"}),
    _tool("submit", "Hand in the repository as it is now and end."),
)
_RUNS_TESTS = re.compile(r"\b(pytest|py\.test|unittest|nosetests|tox|nox|runtests\.py|bin/test)\b")
_LONGEST = 100_000  # characters of a command


class ShellEnv:
    """One episode of repairing a repository (of a generated task or an instance) in its own sandbox.

    A command takes at most `seconds` and shows at most `chars` characters, as does `view`; `memory_mb` and `processes`
    limit it too. What the agent changed, except tests, is graded in a fresh sandbox (`swe.problems`).

    Turn signals: parsed, command, succeeded (a shell command must exit with code 0), reason (why it did not succeed),
    looked_at_failing_code (a file with the fault was viewed, or named in a shell command), ran_tests (a shell command
    called a known test runner), tests_passed (whether that command exited with code 0), modified (the files differ from
    before the turn). Episode signals: submitted, modified (there is a change to grade), resolved, f2p_passed,
    f2p_total, f2p_tests (whether each of them passed), p2p_passed, p2p_total, patch (a git diff of what is graded),
    ignored (the number of changed files that are not graded, such as tests and their settings), problem (why no test
    could pass, "" otherwise).
    """

    rates = RATES
    default_terms = DEFAULT_TERMS

    def __init__(
        self,
        *,
        problems: Problems,
        seconds: PositiveFloat = 120.0,
        chars: PositiveInt = 10_000,
        memory_mb: PositiveInt = 2048,
        processes: PositiveInt = 256,
    ) -> None:
        self._problems = problems
        self._chars = chars
        self._limits = Limits(
            seconds=seconds,
            cpu_seconds=2 * seconds,
            memory_mb=memory_mb,
            processes=processes,
            file_mb=1024,
            output_chars=chars,
        )
        self._copy: Copy | None = None

    async def reset(self, task: Task) -> Start:
        """Open a copy for the task and return the prompt and tools.

        Raises TaskError if something that the task needs is unavailable, and SandboxError.
        """
        await self.close()
        self._task = task
        self._problem: Problem = await self._problems.of(task)
        self._copy = await self._problem.open()
        self._state: Manifest | str = self._copy.base
        self._files = FileTools(self._copy, suspects=self._problem.suspects, limits=self._limits, chars=self._chars)
        self._submitted = False
        return Start(messages=(Message(role="user", content=self._prompt(self._copy)),), tools=TOOLS)

    async def step(self, message: Message) -> Step:
        """Run the message's tool calls in order, up to and including a submit."""
        if not message.tool_calls:
            text = f"There is no tool call in this; use {_names()}."
            return Step(messages=(Message(role="user", content=text),), signals=signals("", False, "unreadable"))
        answers: list[Message] = []
        found: dict[str, JSON] = {}
        for call in message.tool_calls:
            answer = await self._call(self._working_copy(), call)
            found = merge_signals(found, answer.signals)
            answers.append(Message(role="tool", content=answer.say, tool_call_id=call.id))
            if self._submitted:
                break
        return Step(messages=tuple(answers), signals=found, terminated=self._submitted, submitted=self._submitted)

    async def measure(self) -> Mapping[str, JSON]:
        """Grade the change and return the episode's signals; if only tests were changed, nothing is run."""
        problem = self._problem
        f2p, p2p = len(problem.fail_to_pass) or 1, len(problem.pass_to_pass)
        found: dict[str, JSON] = {
            "submitted": self._submitted, "modified": False, "resolved": False, "f2p_passed": 0, "f2p_total": f2p,
            "f2p_tests": dict.fromkeys(problem.fail_to_pass, False), "p2p_passed": p2p, "p2p_total": p2p, "patch": "",
            "ignored": 0, "problem": "",
        }  # fmt: skip
        try:
            change = await self._working_copy().change()
        except ChangeError as error:
            return found | {"modified": True, "p2p_passed": 0, "problem": str(error)}
        left_out = (*await problem.ignored(change.files), *change.lost)
        found["ignored"] = len(left_out)
        if not change.files.keys() - set(left_out):
            return found
        verdict = await problem.grade(change)
        return found | {
            "modified": True,
            "resolved": verdict.resolved,
            "f2p_passed": verdict.fail_to_pass_passed,
            "f2p_tests": verdict.passed_by_test(problem.fail_to_pass),
            "p2p_passed": verdict.pass_to_pass_passed,
            "patch": await graded_patch(problem, change),
            "problem": verdict.problem or "",
        }

    def state_key(self) -> str:
        """Return a hash of what has changed since the beginning, and of what was viewed last."""
        state, base = self._state, self._working_copy().base
        if isinstance(state, Mapping):
            differs: object = sorted((path, state.get(path, "")) for path in {*state, *base}
                                     if state.get(path) != base.get(path))  # fmt: skip
        else:
            differs = state
        parts = json.dumps((self._task.id, differs, self._files.open))
        return hashlib.blake2b(parts.encode(), digest_size=12).hexdigest()

    async def close(self) -> None:
        """End all processes in the copy, and remove it."""
        copy, self._copy = self._copy, None
        if copy is not None:
            await copy.close()

    def _working_copy(self) -> Copy:
        assert self._copy is not None, "reset opens it"
        return self._copy

    def _prompt(self, copy: Copy) -> str:
        where = f" at {copy.place}" if copy.place else ""
        return (
            f"Repair a problem in the repository{where}, where your commands begin.\n\n"
            f"{self._problem.statement.strip()}\n\n"
            "Look around, change the code, check your change, then submit. It is judged by tests that you may not see; "
            "what you change of tests does not count."
        )

    async def _call(self, copy: Copy, call: ToolCall) -> Done:
        given = call.arguments
        wanted = next((tool.schema["required"] for tool in TOOLS if tool.name == call.name), ())
        wrong = [name for name in wanted if not isinstance(given.get(name), str)]
        if wrong:
            return failed(call.name, f"{call.name} needs {' and '.join(wrong)} as text.", "bad arguments")
        match call.name:
            case "bash":
                return await self._bash(copy, given["command"])
            case "view":
                return await self._files.view(given["path"], given.get("start"), given.get("end"))
            case "str_replace":
                answer = await self._files.replace(given["path"], given["old"], given["new"])
            case "create":
                answer = await self._files.create(given["path"], given["text"])
            case "submit":
                self._submitted = True
                return done("submit", "Submitted.")
            case name:
                return failed(name, f"There is no tool {name}; use {_names()}.", "unknown command")
        await self._update_state(copy)
        return answer

    async def _bash(self, copy: Copy, command: str) -> Done:
        if len(command) > _LONGEST or "\0" in command or not _is_text(command):
            say = f"A command is text of at most {_LONGEST} characters; put longer ones into a file with create."
            return failed("bash", say, "bad arguments")
        looked = any(re.search(rf"(^|[\s/'\"]){re.escape(PurePosixPath(file).name)}\b", command)
                     for file in self._problem.suspects)  # fmt: skip
        ran = _RUNS_TESTS.search(command) is not None
        try:
            code, output, out_of_time = await copy.shell(command, limits=self._limits)
        except (OutOfMemoryError, DiskFullError) as error:  # the command caused it; the sandbox goes on
            reason = "out of memory" if isinstance(error, OutOfMemoryError) else "disk full"
            modified = await self._update_state(copy)
            return failed("bash", f"[{reason}]", reason, modified=modified, looked_at_failing_code=looked)
        modified = await self._update_state(copy)
        end = f"[timed out after {self._limits.seconds:g} s]" if out_of_time else f"[exit code {code}]"
        output = "\n".join(
            filter(None, (output.rstrip("\n"), end if code or out_of_time or not output.strip() else ""))
        )
        found = signals(
            "bash",
            code == 0 and not out_of_time,
            "timed out" if out_of_time else f"exit code {code}" if code else "",
            looked_at_failing_code=looked,
            ran_tests=ran,
            tests_passed=(code == 0 and not out_of_time) if ran else None,
            modified=modified,
        )
        return Done(say=output, signals=found)

    async def _update_state(self, copy: Copy) -> bool:
        """Record the state of the files, and return whether it differs from the one recorded before."""
        before = self._state
        try:
            self._state = await copy.manifest()
        except ChangeError as error:
            self._state = str(error)
        return self._state != before


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _names() -> str:
    return ", ".join(tool.name for tool in TOOLS)
