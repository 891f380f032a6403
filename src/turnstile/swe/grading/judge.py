"""Grade a repository task, for the reward of an episode or to tell whether the task is sound."""

from __future__ import annotations

from collections.abc import Sequence

from turnstile.errors import VerifierError
from turnstile.swe.bug import Bug
from turnstile.swe.grading.bench import Files
from turnstile.swe.grading.grader import CodeGrader, Verdict
from turnstile.swe.packages.source import Package


async def judge(grader: CodeGrader, bug: Bug, package: Package, text: str, *, repeat: int = 0) -> Verdict:
    """Return the verdict on the bug's tests with `text` in its file. Raises as `CodeGrader.grade` does."""
    return await judge_files(grader, bug, package, {bug.file: text.encode("utf-8", "surrogatepass")}, repeat=repeat)


async def judge_files(
    grader: CodeGrader,
    bug: Bug,
    package: Package,
    files: Files,
    *,
    executable: frozenset[str] = frozenset(),
    repeat: int = 0,
) -> Verdict:
    """Return the verdict on the bug's tests with `files` as the changes to the pristine tree.

    The caller must include the bug's own file, even if the agent did not touch it. Raises as `CodeGrader.grade` does.
    """
    return await grader.grade(
        package.tree,
        files,
        executable=executable,
        fail_to_pass=bug.f2p,
        pass_to_pass=bug.p2p,
        env=package.environment,
        repeat=repeat,
    )


async def fault(grader: CodeGrader, bug: Bug, package: Package) -> str | None:
    """Return why the bug does not make a sound task, as a clause; None if it does.

    In a sound task all tests pass without the bug, and with it the FAIL_TO_PASS tests fail and no others. Raises
    TaskError if the package is not the one the bug was made in, VerifierError if the wall clock ended the tests (which
    a busy machine alone can cause), and other errors as `CodeGrader.grade` does.
    """
    gold = check_settled(await judge(grader, bug, package, bug.pristine_text(package)))
    empty = check_settled(await judge(grader, bug, package, bug.bugged_text(package))) if gold.resolved else gold
    return trouble(gold, empty, must_fail=bug.f2p, must_pass=bug.p2p)


def trouble(gold: Verdict | None, empty: Verdict, *, must_fail: Sequence[str], must_pass: Sequence[str]) -> str | None:
    """Return what the verdicts on the repair and on no change show to be wrong with a task; None if nothing.

    The result is a clause. `gold` is None if the task has no repair. Without the repair, the tests in `must_fail` must
    fail and those in `must_pass` must pass.
    """
    if gold is not None and not gold.resolved:
        first = gold.failed[0]
        return f"the repair scores 0: {first} ({gold.problem or gold.messages.get(first) or 'it was skipped'})"
    if gold is None and empty.problem is not None:  # no repair shows that the fault causes this
        return f"its tests do not run, and it has no repair: {empty.problem}"
    if gold is None and empty.silent:
        return "none of its tests is among those that ran, and it has no repair"
    passing = [test for test in must_fail if test not in empty.failed]
    if empty.resolved:
        return f"no change scores 1{f': {passing[0]} passes' if passing else ''}"
    if passing:
        return f"with the bug: {passing[0]} passes"
    failing = [test for test in must_pass if test in empty.failed]
    if failing:
        why = empty.problem or empty.messages.get(failing[0])
        return f"with the bug {failing[0]} is to pass and does not ({why})"
    return None


def check_settled(verdict: Verdict) -> Verdict:
    """Return the verdict unchanged. Raises VerifierError if the wall clock ended its tests."""
    if verdict.waited_out:
        raise VerifierError(f"the tests {verdict.problem} on the wall clock; is the machine busy?")
    return verdict
