"""Run tests in a sandbox and read back the outcome of each, with a verdict on the run itself.

What the code under test does (fail, hang, crash, exit, exhaust its limits) is an outcome of its tests. Only what keeps
the verifier from working is an error, which is a VerifierError and never a failed test.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from turnstile.errors import VerifierError, VerifierKilledError
from turnstile.sandboxes.base import ExecResult, Limits, Sandbox

VERIFIER = "turnstile.swe.in_sandbox.verifier"
PRELOAD = ("pytest", "_pytest.*", VERIFIER)
"""What a fork server imports before tests run in its sandboxes, so that each run starts at once."""
REQUEST = ".turnstile-request.json"
"""The file that tells the verifier what to do. It is removed before any test runs."""
KILLED = 137  # exit code of a process that was killed, for example by the kernel when memory is short
UNKNOWN = ("ERROR: not found: ", "(no match in any of ")  # what pytest prints for node ids that it cannot find
REPORT_CHARS = 64_000_000  # enough for a whole report
TEST_LIMITS = Limits(seconds=60.0, cpu_seconds=10.0)  # wide on the wall clock, since a busy machine is not a hang


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The result of a run of tests.

    `outcomes` holds passed, failed, error, skipped, xfailed, xpassed or missing (asked for, but not there or never
    reached) by node id; `messages` the first line of each error; `seconds` is the run's wall-clock time, `durations`
    that of each test. `problem` says why the run as a whole did not end or cannot be trusted (a hang, a crash, a report
    that disagrees with the exit code); the tests affected count as not passed. `waited_out` means that the wall clock
    ended the run, which a busy machine alone can cause. `uncollected` says, by file, why tests could not be collected;
    `calls` holds the functions that each test called, if asked for.
    """

    outcomes: Mapping[str, str]
    messages: Mapping[str, str] = field(default_factory=dict)
    exit_code: int
    seconds: float
    timed_out: bool = False
    waited_out: bool = False
    problem: str | None = None
    durations: Mapping[str, float] = field(default_factory=dict)
    uncollected: Mapping[str, str] = field(default_factory=dict)
    calls: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def passed(self, node_id: str) -> bool:
        """Return whether the test counts as passed; an expected failure does, a skipped or missing test does not."""
        return self.outcomes.get(node_id) in ("passed", "xfailed", "xpassed")

    def repaired(self, node_id: str) -> bool:
        """Return whether a FAIL_TO_PASS test passed; an expected failure does not count, as no repair causes one."""
        return self.outcomes.get(node_id) in ("passed", "xpassed")


async def run_tests(
    sandbox: Sandbox,
    node_ids: Sequence[str] | None = None,
    *,
    limits: Limits = TEST_LIMITS,
    env: Mapping[str, str] | None = None,
    reverse: bool = False,
    calls: str | None = None,
) -> Report:
    """Run tests (None for all) in a sandbox's root, with pytest and no plugins but its own.

    `node_ids` may name whole files; `env` adds to the sandbox's environment (PYTHONPATH entries are relative to the
    root); `reverse` runs the last test first; `calls` names a folder below the root whose functions are recorded when
    tests call them. Raises VerifierError if no verdict can be reached, and SandboxError if the sandbox is broken.
    """
    key = secrets.token_hex(16)
    canary = f"test_{secrets.token_hex(8)}"
    tests = None if node_ids is None else list(node_ids)
    request = {"key": key, "tests": tests, "canary": canary, "reverse": reverse, "calls": calls}
    await sandbox.write(REQUEST, json.dumps(request).encode())
    result = await sandbox.exec(
        ["python", "-m", VERIFIER, REQUEST],
        limits=replace(limits, output_chars=REPORT_CHARS),
        env=env,
    )
    report = read_report(result, key, canary, node_ids)
    return replace(report, waited_out=result.timed_out and result.seconds >= limits.seconds)


def read_report(result: ExecResult, key: str, canary: str, node_ids: Sequence[str] | None) -> Report:
    """Return the report on what the verifier wrote. Raises VerifierError if the verifier itself failed."""
    events = list(read_events(result.stdout, key))
    stderr = result.stderr.strip().splitlines()
    if not events:
        raise VerifierError(
            f"the verifier wrote no report (exit code {result.exit_code}"
            f"{', out of time' if result.timed_out else ''}): {stderr[-1] if stderr else 'no output'}"
        )
    if result.exit_code == KILLED and not result.timed_out:
        raise VerifierKilledError(
            "the verifier was killed (exit code 137), by the kernel when memory ran out or by the code under test"
        )
    internal = [event for event in events if event["event"] == "internal"]
    started = any(event["event"] == "start" for event in events)
    if internal and not started and not internal[0]["inside"]:  # after a start, the code caused it
        raise VerifierError(f"the verifier itself failed: {internal[0]['message']}")

    reported = [event for event in events if event["event"] == "test"]
    tests = {event["id"]: event for event in reported}
    outcomes: dict[str, str] = {name: event["outcome"] for name, event in tests.items()}
    messages: dict[str, str] = {name: event["message"] for name, event in tests.items() if event["message"]}
    planted = [name for name in outcomes if name.endswith("::" + canary)]
    canaries = [outcomes.pop(name) for name in planted]
    for name in planted:
        messages.pop(name, None)
    problem = trouble(result, events, canaries, len(reported), len(tests))
    running = [event["id"] for event in events if event["event"] == "start"][-1:]
    if problem is not None and running and running[0] not in tests and not running[0].endswith("::" + canary):
        outcomes[running[0]] = "failed"
        messages[running[0]] = problem
    if problem is not None and events[-1]["event"] == "end":
        outcomes = dict.fromkeys(outcomes, "error")  # complete, but it cannot be trusted
    uncollected = {event["id"]: event["message"] for event in events if event["event"] == "collect"}
    complaint = next((line for line in stderr if not line.startswith(UNKNOWN)), "")
    add_missing(outcomes, messages, node_ids, uncollected, problem or complaint)
    return Report(
        outcomes=outcomes,
        messages=messages,
        exit_code=result.exit_code,
        seconds=result.seconds,
        timed_out=result.timed_out,
        problem=problem,
        durations={name: tests[name]["seconds"] for name in outcomes if name in tests},
        uncollected=uncollected,
        calls=read_calls(events, outcomes),
    )


def read_events(text: str, key: str) -> Iterator[dict[str, Any]]:
    """Yield the report's events.

    A line that was cut short is skipped. In that case the counts do not agree or the end is missing.
    """
    for line in text.splitlines():
        if line.startswith(key + " "):
            with suppress(json.JSONDecodeError):
                yield json.loads(line[len(key) :])


def read_calls(events: Sequence[Mapping[str, Any]], wanted: Collection[str]) -> dict[str, list[str]]:
    """Return the functions that each test called; the report names each function once and then uses its number.

    Raises VerifierError if a name is missing.
    """
    functions: dict[int, str] = {}
    for event in events:
        if event["event"] == "functions":
            functions.update(enumerate(event["names"], start=event["first"]))
    tests = {event["id"]: event["calls"] for event in events if event["event"] == "test" and "calls" in event}
    try:
        return {test: [functions[number] for number in called] for test, called in tests.items() if test in wanted}
    except KeyError:
        raise VerifierError("the report names no function by a number that it uses; a part of it was lost") from None


def trouble(
    result: ExecResult, events: Sequence[Mapping[str, Any]], canaries: Sequence[str], reported: int, tests: int
) -> str | None:
    """Return what is wrong with a run as a whole, in a few words; None if nothing is."""
    if result.timed_out:
        return f"timed out after {result.seconds:.1f} s"
    broken = next((event["message"] for event in events if event["event"] == "internal"), None)
    if broken is not None:
        return f"pytest broke off: {broken}"
    end = events[-1]
    if end["event"] != "end":
        return f"the tests' process ended early with exit code {result.exit_code}"
    if end["exit_code"] != result.exit_code:
        return f"the report says exit code {end['exit_code']}, the process ended with {result.exit_code}"
    if end["reported"] != reported:
        return f"the report counts {end['reported']} tests and names {reported}"
    if reported != tests:
        return f"the report names {tests} tests and gives {reported} outcomes"
    tampered = next((event["what"] for event in events if event["event"] == "tampered"), None)
    if tampered is not None:
        return f"what runs the tests was changed while they ran: {tampered}"
    if tests and not canaries:
        return "a test that must fail is missing"
    wrong = [outcome for outcome in canaries if outcome not in ("failed", "error")]
    if wrong:
        return f"a test that must fail came out as {wrong[0]}"
    if tests and result.exit_code != 1:
        return f"a test failed and the exit code is {result.exit_code}"
    return None


def add_missing(
    outcomes: dict[str, str],
    messages: dict[str, str],
    node_ids: Sequence[str] | None,
    uncollected: Mapping[str, str],
    reason: str,
) -> None:
    """Add an outcome for every requested test that has none, and for the files that could not be collected."""
    whole_files = node_ids is None
    for node_id in node_ids or ():
        file, colons, _ = node_id.partition("::")
        whole_files = whole_files or not colons
        if colons and node_id not in outcomes:
            outcomes[node_id] = "error" if file in uncollected else "missing"
            messages[node_id] = uncollected.get(file) or reason or "no such test"
    if whole_files:
        for file, message in uncollected.items():
            outcomes.setdefault(file, "error")
            messages.setdefault(file, message)
