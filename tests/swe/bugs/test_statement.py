from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from turnstile.swe.bug import Bug, package_of
from turnstile.swe.bugs.statement import problem_statement
from turnstile.swe.formats import harbor
from turnstile.swe.formats.made import as_instance


def test_a_statement_gives_the_messages_of_failing_tests() -> None:
    tests = [f"t.py::test_{letter}" for letter in "abcdefgh"]
    messages = {tests[0]: "assert 1 == 2", tests[1]: "KeyError: 'x'", tests[2]: "assert 1 == 2"}
    assert problem_statement("toolz", tests, 1, messages) == (
        "toolz: 8 tests fail that should pass.\n\n"
        "`t.py::test_a` fails (and 1 more say the same):\n\n    assert 1 == 2\n\n"
        "`t.py::test_b` fails:\n\n    KeyError: 'x'\n\n"
        "Also failing: `t.py::test_d`, `t.py::test_e`, `t.py::test_f`, and others.\n\n"
        "1 other test of the same code passes, and must go on passing.\n\n"
        "Find the cause in the package's own code and repair it; the tests are right."
    )
    assert problem_statement("x", tests[:1], 0, {}).splitlines()[:3] == [
        "x: 1 test fails that should pass.",
        "",
        "Also failing: `t.py::test_a`.",
    ]


@pytest.fixture
def bugs(reference: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Bug]:
    monkeypatch.setenv("TURNSTILE_CACHE", str(reference.cache))
    return {task.id: Bug.of(task) for task in reference.made.tasks}


def test_a_made_task_does_not_name_its_repair(bugs: dict[str, Bug]) -> None:
    for bug in bugs.values():
        assert bug.f2p[0] in bug.statement
        assert bug.message in bug.statement
        lines = [text.split("\n")[bug.line - 1].strip() for text in (bug.pristine_text(package_of(bug)),
                                                                     bug.bugged_text(package_of(bug)))]  # fmt: skip
        for secret in (bug.file, f"line {bug.line}", *lines):
            assert secret not in bug.statement


def test_a_made_task_is_an_instance_whose_patches_apply(bugs: dict[str, Bug], tmp_path: Path) -> None:
    name, bug = next(iter(bugs.items()))
    package = package_of(bug)
    instance = as_instance(name, bug, package, image="tiny:1")
    (tmp_path / "bug.patch").write_text(instance.bug_patch)
    (tmp_path / "repair.patch").write_text(instance.patch)
    target = tmp_path / bug.file
    target.parent.mkdir(parents=True)
    target.write_text(bug.pristine_text(package))
    for patch, text in (("bug", bug.bugged_text(package)), ("repair", bug.pristine_text(package))):
        subprocess.run(["git", "apply", f"{patch}.patch"], cwd=tmp_path, check=True)
        assert target.read_text() == text
    folder = harbor.write_folder(instance, tmp_path / "task")
    assert harbor.read_folder(folder).fail_to_pass == bug.f2p
