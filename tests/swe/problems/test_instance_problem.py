"""Instances on a real container engine: what the agent gets, and what of its doings counts."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from dockerd import Dockerd
from instances import STATEMENT, WORKDIR
from turnstile.errors import SandboxError, TaskError, VerifierError
from turnstile.runs.task_validation import play_randomly
from turnstile.sandboxes.base import Limits
from turnstile.sandboxes.containers.provider import ContainerSandbox, ContainerSandboxes
from turnstile.sandboxes.local import LocalSandboxes
from turnstile.swe.envs.shell import ShellEnv
from turnstile.swe.formats.instance import Instance, as_task, reversed_patch
from turnstile.swe.grading.bench import Files
from turnstile.swe.grading.gate import check
from turnstile.swe.grading.grader import CodeGrader
from turnstile.swe.grading.judge import trouble
from turnstile.swe.grading.probes import PROBES, Scene
from turnstile.swe.problems.base import Problem, graded_patch
from turnstile.swe.problems.cases import ProblemCases
from turnstile.swe.problems.copy import Change
from turnstile.swe.problems.problems import Problems
from turnstile.swe.shell_oracle import random_agent
from turnstile.tasks.demonstration import call
from turnstile.types import JSON, Task

LIMITS = Limits(seconds=60.0)
FIX = "sed -i 's/(len(values) + 1)/len(values)/' calc/__init__.py"


@pytest.fixture
async def problems(containers: Callable[..., ContainerSandboxes]) -> AsyncIterator[Problems]:
    made = Problems(CodeGrader(containers(user="0:0")))
    yield made
    await made.close()


@pytest.fixture
async def problem(problems: Problems, instance: Instance) -> Problem:
    return await problems.of(as_task(instance))


async def after(problem: Problem, *commands: str) -> Change:
    """What an agent leaves behind that runs these commands."""
    copy = await problem.open()
    try:
        for command in commands:
            code, said, _ = await copy.shell(command, limits=LIMITS)
            assert code == 0, said
        return await copy.change()
    finally:
        await copy.close()


async def test_the_gold_repair_scores_one_and_an_empty_change_zero(problem: Problem) -> None:
    gold = await problem.gold()
    assert gold is not None
    assert list(gold.files) == ["calc/__init__.py"]
    verdict = await problem.grade(gold)
    assert (verdict.resolved, verdict.problem, verdict.failed) == (True, None, ())
    empty = await problem.grade(Change())
    assert (empty.resolved, empty.failed) == (False, ("tests/test_mean.py::test_mean",))
    assert empty.messages["tests/test_mean.py::test_mean"].startswith("AssertionError: assert 2.0 == 3")


async def test_the_copy_holds_one_commit_and_no_hidden_test(problem: Problem, instance: Instance) -> None:
    copy = await problem.open()
    try:
        _, said, _ = await copy.shell(
            "git log --all --format=%s; git tag; git branch -a; git status --short", limits=LIMITS
        )
        assert said.split("\n") == ["The state that the task begins with", "v1.0", "* main", ""]
        _, said, _ = await copy.shell("git cat-file --batch-all-objects --batch-check='%(objecttype)'", limits=LIMITS)
        assert said.split().count("commit") == 1
        code, _, _ = await copy.shell(f"git cat-file -e {instance.base_commit}", limits=LIMITS)
        assert code != 0  # the task's base is there as a tree, and its past is not
        assert copy.place == WORKDIR
        assert not any(path.startswith(".git/") or path == "tests/test_mean.py" for path in copy.base)
    finally:
        await copy.close()
    assert problem.statement == STATEMENT


async def test_commits_and_a_moved_head_do_not_alter_the_change(problem: Problem) -> None:
    commit = "git -c user.name=a -c user.email=a@b commit -qam work"
    for commands in ([FIX], [FIX, commit], [FIX, commit, "git checkout -q --orphan other", "rm -rf .git"]):
        change = await after(problem, *commands)
        assert list(change.files) == ["calc/__init__.py"]
    verdict = await problem.grade(change)
    assert verdict.resolved
    assert (await problem.grade(change)).from_memo
    patch = await graded_patch(problem, change)
    assert patch.startswith("diff --git a/calc/__init__.py b/calc/__init__.py\n--- a/calc/__init__.py\n")
    assert "+    return sum(values) / len(values)\n" in patch


async def test_tests_and_settings_do_not_count(problem: Problem) -> None:
    change = await after(
        problem,
        "echo 'def test_mean(): pass' > tests/test_mean.py",
        "echo 'def test_biggest(): pass' > tests/test_calc.py",
        "echo 'collect_ignore = []' > conftest.py",
        "printf '[pytest]\\naddopts = -k nothing\\n' > pytest.ini",
        'printf \'[pytest]\\naddopts = ["-k", "nothing"]\\n\' > pytest.toml; cp pytest.toml .pytest.toml',
        "mkdir unittest; echo > unittest/__init__.py",
    )
    left_out = await problem.ignored(change.files)
    assert sorted(left_out) == sorted(change.files)
    assert len(left_out) == 7
    verdict = await problem.grade(change)
    assert (verdict.resolved, verdict.ignored) == (False, left_out)
    assert verdict.failed == ("tests/test_mean.py::test_mean",)
    assert await graded_patch(problem, change) == ""


async def test_files_of_every_kind_are_taken_up(problem: Problem) -> None:
    change = await after(
        problem,
        FIX,
        "git rm -q calc/old.py",
        "printf 'caf\\351 \\000' > calc/data.bin",
        "printf 'x' > $'calc/caf\\351.txt'",
        "printf '#!/bin/sh\\n' > run.sh; chmod +x run.sh",
        "mkdir build; echo left > build/out; echo left > trace.log",
        "ln -s /etc/passwd link",
        "mkdir -p calc/more; echo 'A = 1' > calc/more/__init__.py",
    )
    names = [
        "calc/__init__.py",
        "calc/caf\udce9.txt",
        "calc/data.bin",
        "calc/more/__init__.py",
        "calc/old.py",
        "run.sh",
    ]
    assert sorted(change.files) == names
    assert change.files["calc/old.py"] is None
    assert change.files["calc/data.bin"] == b"caf\xe9 \0"
    assert (change.executable, change.lost) == (frozenset({"run.sh"}), ("link",))
    assert (await problem.grade(change)).resolved
    patch = await graded_patch(problem, change)
    assert "deleted file mode 100644\n--- a/calc/old.py\n+++ /dev/null\n" in patch
    assert "new file mode 100755\n--- /dev/null\n+++ b/run.sh\n" in patch
    assert 'diff --git "a/calc/caf\\351.txt" "b/calc/caf\\351.txt"\n' in patch
    copy = await problem.open()
    try:  # git takes the patch, and comes to the same files
        await copy.sandbox.write("all.patch", patch.encode())
        code, said, _ = await copy.shell("git apply all.patch && rm all.patch && rm -f link", limits=LIMITS)
        assert code == 0, said
        assert (await copy.change()).files == change.files
    finally:
        await copy.close()


async def test_code_that_breaks_its_tests_fails_the_task(problem: Problem) -> None:
    broken = await problem.grade(await after(problem, "echo 'import os; os._exit(0)' >> calc/__init__.py"))
    assert not broken.resolved
    assert broken.problem == "the tests' process ended early with exit code 0"
    (verdict,) = [await problem.grade(await after(problem, "echo 'def (' >> calc/__init__.py"))]
    assert not verdict.resolved


async def test_a_change_in_the_way_of_the_tests_fails_the_task(problems: Problems, instance: Instance) -> None:
    moved = replace(
        instance,
        id="moved",
        test_patch=instance.test_patch.replace("tests/test_mean.py", "checks/test_mean.py"),
        fail_to_pass=("checks/test_mean.py::test_mean",),
    )
    problem = await problems.of(as_task(moved))
    verdict = await problem.grade(await after(problem, FIX, "echo > checks"))
    assert not verdict.resolved
    assert str(verdict.problem).startswith("the change is in the way of its tests: ")
    assert (await problem.grade(await after(problem, FIX))).resolved


async def test_a_hang_fails_the_task_and_a_killed_run_gives_no_verdict(problems: Problems, instance: Instance) -> None:
    brief = Problems(problems.grader, limits=Limits(seconds=4.0, cpu_seconds=60.0, processes=256))
    problem = await brief.of(as_task(instance))
    hung = await problem.grade(await after(problem, "echo 'while True: pass' >> calc/__init__.py"))
    assert (hung.resolved, hung.waited_out) == (False, True)
    assert str(hung.problem).startswith("timed out after ")
    with pytest.raises(VerifierError, match="killed"):
        await problem.grade(await after(problem, "echo 'import os; os.kill(os.getpid(), 9)' >> calc/__init__.py"))
    await brief.close()


async def test_an_injected_bug_leaves_no_trace(problems: Problems, instance: Instance) -> None:
    """As SWE-smith has it: the image holds the repair, and the commit that the agent sees the bug."""
    bug = (
        "--- a/calc/__init__.py\n+++ b/calc/__init__.py\n@@ -5,2 +5,2 @@\n"
        " def biggest(values):\n-    return max(values)\n+    return min(values)\n"
    )
    test = "tests/test_calc.py::test_biggest"
    made = replace(instance, id="smith", bug_patch=bug, patch=reversed_patch(bug), test_patch="",
                   fail_to_pass=(test,), pass_to_pass=())  # fmt: skip
    problem = await problems.of(as_task(made))
    copy = await problem.open()
    try:
        _, said, _ = await copy.shell("git status --short; git show --stat | tail -n 1; git log -p | grep -c 'max('",
                                      limits=LIMITS)  # fmt: skip
        assert "max(" not in (await copy.sandbox.read("calc/__init__.py")).decode()
    finally:
        await copy.close()
    assert said.splitlines()[-1] == "0"
    gold = await problem.gold()
    assert gold is not None
    assert (await problem.grade(gold)).resolved
    assert (await problem.grade(Change())).failed == (test,)


async def test_the_gate_accepts_the_instance_and_no_cheat_wins(
    problems: Problems, instance: Instance, problem: Problem
) -> None:
    (found,) = await check([as_task(instance)], ProblemCases(problems=problems), repeats=2)
    assert (found.gold, found.empty, found.flaky, found.trouble, found.unknown) == ((1, 1), (0, 0), (), None, None)
    assert (found.tried, found.wins) == (tuple(PROBES), ())
    assert found.why is None


async def test_without_a_repair_the_tests_must_run(problems: Problems, instance: Instance) -> None:
    """As of R2E-Gym: that the empty change scores 0 says nothing where it is the suite that does not run."""
    mapped = replace(
        instance,
        id="mapped",
        patch="",
        test_patch="",
        fail_to_pass=(),
        pass_to_pass=(),
        expected={"test_biggest": "PASSED", "test_known": "FAILED"},
        test_command="python3 -m pytest tests",
        log_parser="r2e-gym",
    )
    never = replace(mapped, id="never", test_command="python3 -m pytest nowhere")
    others = replace(mapped, id="others", expected={"TestA.test_nothing": "PASSED"})
    cases = ProblemCases(problems=problems, probes={name: PROBES[name] for name in ("edit_tests", "patch_runner")})
    found = await check([as_task(one) for one in (mapped, never, others)], cases, repeats=1, probed=1)
    assert [(one.gold, one.empty, one.unknown) for one in found] == [((), (0,), None)] * 3
    assert found[0].why is None
    assert [one.unproven for one in found] == [True, False, False]
    assert str(found[1].why).startswith("its tests do not run, and it has no repair: no test was run")
    assert found[2].why == "none of its tests is among those that ran, and it has no repair"
    assert [(one.tried, one.wins) for one in found if one.tried] == [(tuple(cases.cheats), ())]


async def test_an_unsound_instance_fails_with_a_reason(problems: Problems, instance: Instance) -> None:
    """As of generated tasks: without the repair the tests that it must fix fail, and the others pass."""
    mean, biggest = "tests/test_mean.py::test_mean", "tests/test_calc.py::test_biggest"
    off = (
        replace(instance, id="passing", fail_to_pass=(mean, biggest), pass_to_pass=()),
        replace(instance, id="failing", fail_to_pass=("tests/test_calc.py::test_none",), pass_to_pass=()),
    )
    found = await check([as_task(one) for one in off], ProblemCases(problems=problems), repeats=1, probed=0)
    assert found[0].why == f"with the bug: {biggest} passes"
    assert found[1].why == "the repair scores 0: tests/test_calc.py::test_none (it is missing)"
    verdicts = [await (await problems.of(as_task(instance))).grade(change) for change in (Change(files={}), Change())]
    said = trouble(verdicts[0], verdicts[1], must_fail=(), must_pass=(mean,))
    assert str(said).startswith("the repair scores 0")
    solved = replace(verdicts[0], resolved=True, failed=())
    assert str(trouble(solved, verdicts[1], must_fail=(), must_pass=(mean,))).startswith(
        f"with the bug {mean} is to pass and does not (AssertionError: assert 2.0 == 3"
    )


CASES = """diff --git a/tests/test_case.py b/tests/test_case.py
new file mode 100644
--- /dev/null
+++ b/tests/test_case.py
@@ -0,0 +1,10 @@
+import unittest
+from calc import biggest, mean
+
+
+class Case(unittest.TestCase):
+    def test_mean(self):
+        self.assertEqual(mean([2, 4]), 3)
+
+    def test_biggest(self):
+        self.assertEqual(biggest([1, 3]), 3)
"""
OWN = CASES.replace("test_case", "own").replace("+class Case", "+class Own").replace("-0,0 +1,10", "-0,0 +1,16") + (
    "+\n+\n+for name in ('test_mean', 'test_biggest'):\n+    result = unittest.TestResult()\n"
    "+    Own(name).run(result)\n+    print(name, 'ok' if result.wasSuccessful() else 'bad')\n"
)


def own_log(text: str) -> dict[str, str]:
    lines = [line.split() for line in text.splitlines() if line.startswith("test_")]
    return {line[0]: "PASSED" if line[1:] == ["ok"] else "FAILED" for line in lines}


@pytest.fixture
def of_cases(instance: Instance) -> Instance:
    """Its tests are run by unittest."""
    names = [f"{name} (tests.test_case.Case.{name})" for name in ("test_mean", "test_biggest")]
    return replace(
        instance,
        id="cases",
        test_patch=CASES,
        fail_to_pass=tuple(names[:1]),
        pass_to_pass=tuple(names[1:]),
        log_parser="unittest",
        test_command="python3 -m unittest -v tests.test_case",
    )


async def test_unittest_is_watched_as_pytest_is(problems: Problems, of_cases: Instance) -> None:
    (found,) = await check([as_task(of_cases)], ProblemCases(problems=problems), repeats=1)
    assert (found.gold, found.empty, found.trouble, found.unknown, found.wins) == ((1,), (0,), None, None, ())
    assert found.tried == tuple(PROBES)
    verdict = await (await problems.of(as_task(of_cases))).grade(Change())
    assert verdict.messages == {of_cases.fail_to_pass[0]: "AssertionError: 2.0 != 3"}


async def test_a_log_that_code_can_forge_is_refused(problems: Problems, instance: Instance, of_cases: Instance) -> None:
    """If a plugin cannot be loaded, the log decides, and code that can print it wins."""
    own = replace(
        instance,
        id="own",
        test_patch=OWN,
        fail_to_pass=("test_mean",),
        pass_to_pass=("test_biggest",),
        log_parser=f"{__name__}:own_log",
        test_command="python3 -m tests.own",
    )
    unseen = replace(of_cases, id="unseen", test_command="python3 -E -m unittest -v tests.test_case")
    cases = ProblemCases(problems=problems, probes={"print_log": PROBES["print_log"]})
    found = await check([as_task(one) for one in (own, unseen)], cases, repeats=1, probed=None)
    assert [(one.gold, one.empty) for one in found] == [((1,), (0,))] * 2
    assert [one.why for one in found] == ["a cheat scores 1: print_log"] * 2


async def test_the_random_agent_plays_instances(problems: Problems, instance: Instance) -> None:
    task, env = as_task(instance), ShellEnv(problems=problems)
    done: list[Mapping[str, JSON]] = []

    async def play(task: Task) -> bool:
        agent = random_agent(task, random.Random(0))
        seen = (await env.reset(task)).messages
        terminated = False
        while not terminated:
            step = await env.step(agent(seen))
            seen, terminated = step.messages, step.terminated
            done.append(step.signals)
        done.append(await env.measure())
        await env.close()
        return await play_randomly(env, task)

    (found,) = await check([task], ProblemCases(problems=problems, probes={}), repeats=1, play=play)
    assert (found.random, found.why) == (0, None)
    *steps, end = done
    assert [one["command"] for one in steps] == ["bash", *["view", "str_replace"] * 3, "submit"]
    assert (end["submitted"], end["modified"], end["resolved"]) == (True, True, False)


async def test_a_cheat_begins_in_the_largest_package(problems: Problems, instance: Instance) -> None:
    begun: list[str] = []

    async def note(scene: Scene) -> Files:
        begun.append(scene.file)
        return {}

    without = replace(instance, id="without", patch="")
    for one in (instance, without):
        case = await ProblemCases(problems=problems, probes={"it": note}).open(as_task(one))
        assert await case.cheat("it") is not None
    assert begun == ["calc/__init__.py"] * 2


async def test_an_agent_repairs_an_instance_in_the_shell(problems: Problems, instance: Instance) -> None:
    env = ShellEnv(problems=problems)
    start = await env.reset(as_task(instance))
    assert STATEMENT in start.messages[0].content
    await env.step(call("str_replace", path="/testbed/calc/__init__.py", old="(len(values) + 1)", new="len(values)"))
    step = await env.step(call("bash", command="echo > tests/test_more.py; python3 -m pytest tests/test_calc.py"))
    assert step.signals["tests_passed"] is True
    await env.step(call("submit"))
    found = await env.measure()
    await env.close()
    assert (found["resolved"], found["modified"], found["ignored"], found["f2p_passed"]) == (True, True, 1, 1)
    assert (found["p2p_passed"], found["p2p_total"]) == (3, 3)


async def test_an_unusable_image_gives_a_clear_error(problems: Problems, instance: Instance, containers) -> None:
    for changes, message in (
        ({"workdir": "/nowhere"}, "there is no folder /nowhere in it"),
        ({"patch": "", "bug_patch": "--- a/none.py\n+++ b/none.py\n@@ -1 +1 @@\n-a\n+b\n"}, "its bug does not apply"),
        ({"test_patch": "--- a/none.py\n+++ b/none.py\n@@ -1 +1 @@\n-a\n+b\n"}, "its tests' patch does not apply"),
        ({"image": ""}, "it names no image"),
    ):
        with pytest.raises(TaskError, match=message):
            await (await problems.of(as_task(replace(instance, **changes)))).open()
    as_user = Problems(CodeGrader(containers()))
    with pytest.raises(TaskError, match=r'user 1000 cannot write in /testbed; set sandbox.isolation.user = "0:0"'):
        await (await as_user.of(as_task(instance))).open()


async def test_a_prepared_image_that_is_gone_is_made_again(
    engine: Dockerd, problems: Problems, problem: Problem
) -> None:
    copy = await problem.open()
    sandboxes = problems.grader.bench.sandboxes
    assert isinstance(sandboxes, ContainerSandboxes)
    with engine.client() as client:
        assert isinstance(copy.sandbox, ContainerSandbox)
        image = client.inspect_container(copy.sandbox.container.identity)["Image"]
        await copy.close()
        await sandboxes.wait_for_removals()
        client.remove_image(image, force=True)
    with pytest.raises(SandboxError, match="its prepared image cannot be started from"):
        await problem.open()
    await (await problem.open()).close()


async def test_an_instance_without_a_test_is_refused() -> None:
    instance = Instance(id="testless", problem="p", image="i", patch="p")
    sandboxes = LocalSandboxes()
    with pytest.raises(TaskError, match="testless: it names no test that must pass; set `fail_to_pass` or"):
        await Problems(CodeGrader(sandboxes)).of(as_task(instance))
    await sandboxes.close()


async def test_an_instance_may_have_expected_statuses_and_hidden_tests(problems: Problems, instance: Instance) -> None:
    """As R2E-Gym has them: the tests lie in the image, and the agent's container is without."""
    mapped = replace(
        instance,
        id="mapped",
        test_patch="",
        fail_to_pass=(),
        pass_to_pass=(),
        expected={"test_biggest": "PASSED", "test_text[a b]": "PASSED", "test_known": "FAILED"},
        hidden=("/testbed/tests",),
        test_command="python3 -m pytest tests",
        log_parser="r2e-gym",
    )
    problem = await problems.of(as_task(mapped))
    change = await after(problem, "test ! -e tests", "mkdir tests; echo > tests/test_calc.py; echo > calc/new.py")
    assert await problem.ignored(change.files) == ("tests/test_calc.py",)
    verdict = await problem.grade(change)
    assert verdict.failed == ("test_known",)  # an expected failure is none
    assert verdict.fail_to_pass_passed == 2


async def test_a_harbor_task_is_graded_by_its_script(problems: Problems, instance: Instance, tmp_path: Path) -> None:
    for path, text in {
        "tests/test.sh": "grep -q 'len(values)$' /testbed/calc/__init__.py\n"
        "test $? = 0 && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n",
        "solution/solve.sh": f"cd /testbed && {FIX}\n",
    }.items():
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    harbor = Instance(
        id="harbor",
        problem="p",
        image=instance.image,
        workdir=WORKDIR,
        test_command="bash /tests/test.sh",
        log_parser="",
        extra={"folder": str(tmp_path)},
    )
    problem = await problems.of(as_task(harbor))
    gold = await problem.gold()
    assert gold is not None
    assert (await problem.grade(gold)).resolved
    assert not (await problem.grade(Change())).resolved
    (tmp_path / "tests" / "test.sh").write_text("exit 3\n")
    with pytest.raises(VerifierError, match=r"wrote no number to /logs/verifier/reward.txt \(exit code 3\)"):
        await problem.grade(Change(), repeat=1)
    (tmp_path / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\nkill -TERM $$\n")
    verdict = await problem.grade(Change(), repeat=2)
    assert (verdict.resolved, verdict.problem) == (False, "its test.sh was ended by a signal (exit code 143)")
