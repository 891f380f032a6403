"""Run an instance's tests as its data set says, and read statuses that code under test cannot simply print.

If the runner is pytest or unittest, a plugin of ours (`in_sandbox.report`, `in_sandbox.unittests`) reports every
outcome under a random key, adds a test that must fail, and counts the tests; the log then decides nothing. For other
runners there are only the log and the objections of its parser.

`grading.grader` grades generated tasks, for which we choose the runner: pytest under `in_sandbox.verifier`, on copies
that are quick to make and with outcomes that can be remembered. An instance comes with its own image, command and log,
so both share only the format of lines under a key (`testrun.read_events`).
"""

from __future__ import annotations

import inspect
import json
import re
import secrets
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from turnstile.errors import VerifierError, VerifierKilledError
from turnstile.sandboxes.base import ExecResult, Limits, Sandbox
from turnstile.swe.formats.harbor import test_command
from turnstile.swe.formats.instance import Instance
from turnstile.swe.formats.logs import unittest_line
from turnstile.swe.grading.bench import Files
from turnstile.swe.grading.testrun import KILLED, REPORT_CHARS, read_events
from turnstile.swe.in_sandbox import canary, channel, imports, origin, report, startup, testfiles, unittests
from turnstile.swe.problems.diff import touched_files

SUITE_LIMITS = Limits(seconds=1800.0, cpu_seconds=3600.0, memory_mb=1 << 20, processes=4096, file_mb=4096)
REWARD = "logs/verifier/reward.txt"
RUNNERS: Mapping[str, str] = {"pytest": "pytest", "r2e-gym": "pytest", "unittest": "unittest"}
"""The runner whose output each log parser reads, for runners with a plugin of ours."""
_FOLDER = "tmp/turnstile-report"
_PLUGINS: Mapping[str, ModuleType] = {"pytest": report, "unittest": unittests}
_ERROR = re.compile(r"^(?:E +)?((?:\w+\.)*\w*(?:Error|Exception|Failure|Warning|Interrupt|Exit)\b.*)$")
_MODULES = (".py", ".pyi", ".pyx", ".so")
_SIGNALLED = 128  # from this exit code on, a signal ended the process
_NEAR = 60  # lines after a test's name that are searched for its error


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of running a test command, as a status for each test or as the `reward` that it wrote.

    `messages` are the first lines of errors, by the name of the test or of the file that could not be collected.
    `problem` says why the run did not end or cannot be trusted, in which case its tests count as failed. `waited_out`
    means that the wall clock ended the run.
    """

    statuses: Mapping[str, str] = field(default_factory=dict)
    messages: Mapping[str, str] = field(default_factory=dict)
    reward: float | None = None
    problem: str | None = None
    timed_out: bool = False
    waited_out: bool = False
    seconds: float = 0.0


def plugin_files(runner: str, name: str, request: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files for the folder that comes first in PYTHONPATH.

    They are the runner's plugin as package `name`, the module that loads it when Python starts, and the request.
    """
    package = {"__init__": _PLUGINS[runner], "canary": canary, "channel": channel, "imports": imports,
               "origin": origin, "testfiles": testfiles}  # fmt: skip
    files = {f"{name}/{stem}.py": inspect.getsource(module).encode() for stem, module in package.items()}
    files["sitecustomize.py"] = inspect.getsource(startup).encode()
    return {**files, channel.KEYFILE: json.dumps(request).encode()}


def plugin_environment(runner: str, name: str, repository: str) -> dict[str, str]:
    """Return the environment variables that load the plugin `name`, without PYTHONPATH."""
    own = {startup.REPOSITORY: repository, startup.RUNNER: runner, startup.PLUGIN: name}
    if runner != "pytest":
        return own
    return own | {"PYTEST_PLUGINS": name, "PYTEST_XDIST_AUTO_NUM_WORKERS": "0"}  # it reports only on its own process


async def run_suite(
    sandbox: Sandbox, instance: Instance, *, before: Files | None = None, limits: Limits = SUITE_LIMITS
) -> Outcome:
    """Run the instance's tests in a sandbox that starts in `/` and holds the repository as it is to be graded.

    `before` is the earlier content of the changed files. Raises VerifierError if no verdict can be reached, and
    SandboxError.
    """
    runner = RUNNERS.get(instance.log_parser)
    key, planted = secrets.token_hex(16), f"test_{secrets.token_hex(8)}"
    lines = [f"cd {shlex.quote(instance.workdir)}", "unset PYTEST_DISABLE_PLUGIN_AUTOLOAD", instance.setup]
    if runner is not None:
        name = f"report_{secrets.token_hex(4)}"
        texts = {path: data and data.decode("latin-1") for path, data in (before or {}).items() if path.endswith(".py")}
        own = await _modules(sandbox, instance)
        request = {"key": key, "canary": planted, "root": instance.workdir, "own": own, "before": texts,
                   "repaired": touched_files(instance.patch)}  # fmt: skip
        for path, data in plugin_files(runner, name, request).items():
            await sandbox.write(f"{_FOLDER}/{path}", data)
        variables = plugin_environment(runner, name, instance.workdir)
        lines += [f"export {variable}={shlex.quote(value)}" for variable, value in variables.items()]
        lines.append(f"export PYTHONPATH=/{_FOLDER}${{PYTHONPATH:+:$PYTHONPATH}}")
    lines += ["exec 2>&1", test_command(instance)]
    done = await sandbox.exec(["bash", "-c", "\n".join(lines)], limits=replace(limits, output_chars=REPORT_CHARS))
    if done.exit_code == KILLED and not done.timed_out:
        raise VerifierKilledError(f"{instance.id}: its tests were killed (exit code 137), as when memory runs out")
    found = Outcome(
        timed_out=done.timed_out,
        waited_out=done.timed_out and done.seconds >= limits.seconds,
        seconds=done.seconds,
        problem=f"timed out after {done.seconds:.0f} s" if done.timed_out else None,
    )
    if not instance.log_parser:
        return await _read_reward(sandbox, instance, done, found)
    events = list(read_events(done.stdout, key))
    if runner == "pytest" or events:
        return _read_report(instance, events, planted, done, found)
    return _read_log(instance, done, found)


async def _modules(sandbox: Sandbox, instance: Instance) -> list[str]:
    """Return the names of the repository's modules and of those in its tests' patch; none without git history."""
    command = ["git", "-c", "safe.directory=*", "-C", instance.workdir, "ls-tree", "-r", "-z", "--name-only", "HEAD"]
    listed = await sandbox.exec(command, limits=replace(SUITE_LIMITS, output_chars=REPORT_CHARS))
    if listed.exit_code != 0:
        return []
    paths = [*listed.stdout.split("\0"), *touched_files(instance.test_patch)]
    return importable(paths)


def importable(paths: Iterable[str]) -> list[str]:
    """Return the names of the modules at these paths, and of the folders that contain them."""
    parts = {part for path in paths if path.endswith(_MODULES) for part in path.split("/")}
    return sorted({part.partition(".")[0] for part in parts} - {""})


async def _read_reward(sandbox: Sandbox, instance: Instance, done: ExecResult, found: Outcome) -> Outcome:
    """Return the outcome with the number that the test script wrote, or with 0 if the script was ended early.

    Code under test can also write that number, and then end the script. Raises VerifierError if there is no number.
    """
    if found.timed_out:
        return replace(found, reward=0.0)
    if done.exit_code < 0 or done.exit_code >= _SIGNALLED:
        return replace(found, reward=0.0, problem=f"its test.sh was ended by a signal (exit code {done.exit_code})")
    try:
        text = (await sandbox.read(REWARD)).decode("utf-8", "replace").strip()
        return replace(found, reward=float(text))
    except (OSError, ValueError):
        raise VerifierError(
            f"{instance.id}: its test.sh wrote no number to /{REWARD} (exit code {done.exit_code}): "
            f"{_last_line(done.stdout)}"
        ) from None


def _read_log(instance: Instance, done: ExecResult, found: Outcome) -> Outcome:
    """Return the outcome that the log shows, without statuses if its parser objects to the log as a whole."""
    statuses = instance.statuses(done.stdout)
    problem = found.problem or instance.log_trouble(done.stdout, statuses, done.exit_code)
    failed = [test for test, status in statuses.items() if status in ("FAILED", "ERROR")]
    messages = {test: text for test in failed if (text := error_near(done.stdout, test))}
    statuses = _without_expected_failures(instance, statuses) if problem is None else {}
    return replace(found, statuses=statuses, messages=messages, problem=problem)


def error_near(log: str, test: str) -> str:
    """Return the error text closest after a line that names the test (fewer than 60 lines later); "" if none."""
    name = test.partition(" ")[0]
    found, nearest, since = "", _NEAR, _NEAR
    for line in log.splitlines():
        since = 0 if name in line else since + 1
        match = _ERROR.match(line)
        if match and 0 < since < nearest:
            found, nearest = match[1][: channel.LONGEST], since
    return found


def _read_report(
    instance: Instance, events: Sequence[Mapping[str, Any]], canary: str, done: ExecResult, found: Outcome
) -> Outcome:
    if not any(event["event"] == "begin" for event in events):
        if found.timed_out:
            return found
        raise VerifierError(
            f"{instance.id}: pytest did not start (exit code {done.exit_code}): {_last_line(done.stdout)}"
        )
    tests = [event for event in events if event["event"] == "test"]
    planted = [event["outcome"] for event in tests if canary in event["id"]]
    named = [event for event in tests if canary not in event["id"]]
    problem = found.problem or _trouble(events, tests, planted, done)
    lines = "\n".join(_line(instance, event) for event in named)
    statuses = _without_expected_failures(instance, instance.statuses(lines)) if problem is None else {}
    if problem is not None and not tests:
        problem += _pytest_reason(done.stdout)
    unread = {event["id"]: event["message"] for event in events if event["event"] == "collect"}
    messages = {**unread, **dict(_messages(instance, named))}
    return replace(found, statuses=statuses, messages=messages, problem=problem)


def _line(instance: Instance, event: Mapping[str, Any]) -> str:
    """Return an outcome as the line of a log, for the instance's parser."""
    if RUNNERS[instance.log_parser] == "unittest":
        return unittest_line(event["id"], event["outcome"])
    return f"{event['outcome']} {event['id']}"


def _messages(instance: Instance, tests: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, str]]:
    """Yield the tests with error messages, as (name that the instance's parser gives to the test, message)."""
    for event in tests:
        if event["message"]:
            yield from ((name, event["message"]) for name in instance.statuses(_line(instance, event)))


def _without_expected_failures(instance: Instance, statuses: Mapping[str, str]) -> dict[str, str]:
    """Return the statuses with expected failures of FAIL_TO_PASS tests turned into failures.

    No repair causes an expected failure, but cheats do.
    """
    wanted = frozenset(instance.fail_to_pass)
    return {
        test: "FAILED" if status == "XFAIL" and not wanted.isdisjoint((test, test.partition(" ")[0])) else status
        for test, status in statuses.items()
    }


def _trouble(
    events: Sequence[Mapping[str, Any]], tests: Sequence[Mapping[str, Any]], planted: Sequence[str], done: ExecResult
) -> str | None:
    """Return what is wrong with a run as a whole, in a few words; None if nothing is."""
    tampered = next((event["what"] for event in events if event["event"] == "tampered"), None)
    if tampered is not None:
        return f"what runs the tests was changed while they ran: {tampered}"
    ends = [event for event in events if event["event"] == "end"]
    if not ends:
        return f"the tests' process ended early with exit code {done.exit_code}"
    if len(ends) > 1 or ends[0]["count"] != len(tests) or len({event["id"] for event in tests}) != len(tests):
        return f"the report counts {ends[0]['count']} tests and gives {len(tests)} outcomes"
    if not tests:
        return "no test was run"
    if not planted:
        return "a test that must fail is missing"
    if any(outcome not in ("FAILED", "ERROR") for outcome in planted):
        return f"a test that must fail came out as {planted[0]}"
    if ends[0]["exit_code"] == 0 or done.exit_code == 0:
        return "a test failed and the exit code is 0"
    return None


def _last_line(text: str) -> str:
    return next(iter(text.strip().splitlines()[-1:]), "no output")[:200]


def _pytest_reason(log: str) -> str:
    """Return pytest's own reason for running no test, as the end of a sentence; "" if it gave none."""
    found = re.findall(r"^(?:E  +|ERROR:? )(.*)$", log, re.MULTILINE)
    return f": {found[-1][:200]}" if found else ""
