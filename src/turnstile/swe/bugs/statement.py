"""Write a problem statement that tells what the failing tests say, but not where the bug is or how to fix it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SHOWN = 3  # most messages quoted, and most further tests named


def problem_statement(package: str, fail_to_pass: Sequence[str], passing: int, messages: Mapping[str, str]) -> str:
    """Return a problem report that a user of the package could have written.

    `fail_to_pass` are the failing tests, the most telling first, `passing` is the number of related tests that pass,
    and `messages` holds the first line of each failing test's message. Apart from the tests and their messages, the
    report names no file, function or line.
    """
    complaints: dict[str, list[str]] = {}
    for test in fail_to_pass:
        complaints.setdefault(messages.get(test, ""), []).append(test)
    shown = [(message, tests) for message, tests in complaints.items() if message][:SHOWN]
    count = len(fail_to_pass)
    lines = [f"{package}: {'1 test fails' if count == 1 else f'{count} tests fail'} that should pass."]
    for message, tests in shown:
        more = f" (and {len(tests) - 1} more say the same)" if len(tests) > 1 else ""
        lines += ["", f"`{tests[0]}` fails{more}:", "", f"    {message}"]
    covered = {test for _, tests in shown for test in tests}
    rest = [test for test in fail_to_pass if test not in covered]
    if rest:
        names = ", ".join(f"`{test}`" for test in rest[:SHOWN])
        lines += ["", f"Also failing: {names}{', and others' if len(rest) > SHOWN else ''}."]
    if passing:
        others = "1 other test of the same code passes" if passing == 1 else f"{passing} other tests of it pass"
        lines += ["", f"{others}, and must go on passing."]
    lines += ["", "Find the cause in the package's own code and repair it; the tests are right."]
    return "\n".join(lines)
