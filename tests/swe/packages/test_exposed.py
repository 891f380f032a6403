"""What sandboxes show of the packages that tasks are made of, looked at from inside."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import iniconfig
import pytest

from turnstile.errors import TaskError
from turnstile.sandboxes.bubblewrap import BubblewrapSandboxes
from turnstile.sandboxes.local import LocalSandboxes
from turnstile.swe.bug import Bug
from turnstile.swe.bugs.make import Progress, make
from turnstile.swe.grading.gate import check
from turnstile.swe.grading.grader import CodeGrader
from turnstile.swe.grading.testrun import PRELOAD
from turnstile.swe.packages.exposed import _LOOK, find_exposed
from turnstile.swe.packages.source import deps_home, fetch
from turnstile.swe.problems.cases import ProblemCases
from turnstile.swe.problems.problems import Problems
from turnstile.types import Task

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@pytest.fixture
async def walled(cache: Path) -> AsyncIterator[BubblewrapSandboxes]:
    provider = BubblewrapSandboxes(preload=PRELOAD, spare=0, shelf=deps_home())
    yield provider
    await provider.close()


@pytest.fixture
async def installed(source_of: Any, grader: CodeGrader, tmp_path: Path) -> tuple[Task, list[str]]:
    """A task in a package that bears the name of one that this Python has, and what was said as it was made."""
    tests = "from iniconfig import clamp\n\n\ndef test_clamp():\n    assert clamp(5, 0, 10) == 5\n"
    files = {"src/iniconfig/__init__.py": source_of().files["src/tiny/__init__.py"], "tests/test_clamp.py": tests}
    gone = {"src/tiny/__init__.py": None, "tests/test_tiny.py": None, "tests/test_flaky.py": None}
    said: list[str] = []

    def note(report: Progress) -> None:
        said.append(report.message)

    made = await make(
        source_of({**gone, **files}, name="iniconfig"), tmp_path / "out.jsonl", 1, grader=grader, progress=note
    )
    return made.tasks[0], said


async def test_a_task_whose_package_is_installed_is_refused(
    installed: tuple[Task, list[str]], walled: BubblewrapSandboxes
) -> None:
    task, said = installed
    assert any(f"iniconfig is in this Python too, at {iniconfig.__file__}" in line for line in said)
    grader = CodeGrader(walled)
    with pytest.raises(TaskError, match=r"the sandboxes show src/iniconfig/__init__\.py without its fault, at /"):
        await Problems(grader).of(task)
    (found,) = await check([task], ProblemCases(problems=Problems(grader)), repeats=1)
    assert f"at {iniconfig.__file__}" in str(found.why)
    await grader.close()


async def test_local_sandboxes_are_not_checked_for_exposed_files(
    installed: tuple[Task, list[str]], sandboxes: LocalSandboxes
) -> None:
    assert (await Problems(CodeGrader(sandboxes)).of(installed[0])).suspects == {"src/iniconfig/__init__.py"}


async def test_dependencies_of_another_package_are_hidden(source_of: Any, walled: BubblewrapSandboxes) -> None:
    package, user = fetch(source_of()), fetch(source_of(name="user-of-tiny"))
    for deps in (package.deps, user.deps):
        (deps / "helper.py").write_text("")
    shutil.copytree(package.tree / "src" / "tiny", user.deps / "tiny")
    assert await find_exposed(package, walled) == {"src/tiny/__init__.py": None}
    shutil.copytree(package.tree / "src" / "tiny", package.deps / "other" / "_vendor" / "tiny")
    assert await find_exposed(package, walled) == {
        "src/tiny/__init__.py": str(package.deps / "other" / "_vendor" / "tiny" / "__init__.py")
    }
    sandbox = await walled.start(package.tree, deps=package.deps)
    seen = await sandbox.exec(["find", str(deps_home()), "-name", "helper.py"])
    assert seen.stdout.split() == [str(package.deps / "helper.py")]


async def test_files_in_a_wheel_are_exposed(source_of: Any, walled: BubblewrapSandboxes) -> None:
    package = fetch(source_of())
    for wheel, name in (("installer/_bundled/pip-1.whl", "pip/_vendor/"), ("a-1.whl", "")):
        path = package.deps / wheel
        path.parent.mkdir(exist_ok=True, parents=True)
        with zipfile.ZipFile(path, "w") as made:
            made.writestr(f"{name}tiny/__init__.py", "")
        assert await find_exposed(package, walled) == {"src/tiny/__init__.py": f"{path}/{name}tiny/__init__.py"}
        path.unlink()
    (package.deps / "broken.whl").write_bytes(b"")
    assert await find_exposed(package, walled) == {"src/tiny/__init__.py": None}


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_files_in_the_base_of_a_virtual_environment_are_exposed(folder: str, tmp_path: Path) -> None:
    there = tmp_path / "base [x]" / "lib" / "python3.11" / folder / "tiny.py"
    there.parent.mkdir(parents=True)
    there.write_text("")
    look = f"import sys; sys.base_prefix = {str(tmp_path / 'base [x]')!r}\n{_LOOK}"
    done = subprocess.run(
        [sys.executable, "-c", look, "src", "src/tiny.py", "src/none.py"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {"src/tiny.py": str(there), "src/none.py": None}


@pytest.mark.slow
async def test_a_task_whose_package_is_hidden_is_played(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNSTILE_CACHE", str(reference.cache))
    provider = BubblewrapSandboxes(preload=PRELOAD, spare=0, shelf=deps_home())
    task = reference.made.tasks[0]
    problem = await Problems(CodeGrader(provider)).of(task)
    copy = await problem.open()
    assert Bug.of(task).file in copy.base
    assert copy.env["PYTHONPATH"].endswith(str(deps_home() / "tiny-1.0"))
    await provider.close()
