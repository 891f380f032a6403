from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnstile.errors import TaskError
from turnstile.sandboxes.base import Limits
from turnstile.swe.bugs.profile import Profile, profile
from turnstile.swe.grading.bench import Bench
from turnstile.swe.grading.grader import local_grader
from turnstile.swe.packages.source import fetch

SourceOf = Callable[..., Any]
CLAMP, DIGITS, UNUSED, NOTHING = (f"src/tiny/__init__.py:{line}" for line in (4, 12, 20, 24))


async def test_a_profile_holds_stable_tests_and_the_functions_they_call(bench: Bench, tiny: Any) -> None:
    package = fetch(tiny)
    said: list[str] = []
    measured = await profile(package, bench, progress=said.append)
    assert said == ["running the tests of tiny-1.0 (1 of 2)", "running the tests of tiny-1.0 (2 of 2)"]
    assert measured.collected == 9
    assert set(measured.unstable) == {"tests/test_tiny.py::test_broken", "tests/test_flaky.py::test_skipped"}
    clamp = [f"tests/test_tiny.py::test_clamp[{case}]" for case in ("-1-0", "12-10", "5-5")]
    assert measured.covering[CLAMP] == tuple(clamp)
    assert measured.covering[DIGITS] == ("tests/test_tiny.py::test_digits",)
    assert UNUSED not in measured.covering
    assert all(function.startswith("src/tiny/") for function in measured.covering)
    assert "tests/test_flaky.py::test_expected" in measured.seconds  # an expected failure is a pass
    assert not list(package.tree.rglob("__pycache__"))
    again = await profile(package, bench, progress=said.append)
    assert again == measured
    assert len(said) == 2  # from the cache


async def test_a_torn_profile_is_measured_again(bench: Bench, tiny: Any) -> None:
    package = fetch(tiny)
    measured = await profile(package, bench)
    (path,) = package.tree.parent.glob("profile-*.json")
    path.write_text(path.read_text()[:99])
    assert (await profile(package, bench)).covering == measured.covering
    record = json.loads(path.read_text())
    assert record["digest"] == package.digest


async def test_a_test_that_passes_once_is_not_stable(bench: Bench, source_of: SourceOf, tmp_path: Path) -> None:
    flaky = f"""
        import pathlib
        def test_first_time_only():
            marker = pathlib.Path({str(tmp_path / "marker")!r})
            seen = marker.exists()
            marker.write_text("")
            assert not seen
    """
    measured = await profile(fetch(source_of({"tests/test_flaky.py": flaky})), bench)
    assert "tests/test_flaky.py::test_first_time_only" in measured.unstable
    assert "tests/test_flaky.py::test_first_time_only" not in measured.seconds


@pytest.mark.slow
async def test_a_suite_that_hangs_is_refused_and_leaves_no_process(
    bench: Bench, source_of: SourceOf, tmp_path: Path
) -> None:
    hang = f"""
        import os, pathlib, subprocess, sys
        def test_hang():
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            pathlib.Path({str(tmp_path / "pids")!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
            child.wait()
    """
    package = fetch(source_of({"tests/test_tiny.py": hang}))
    with pytest.raises(TaskError, match=r"pypi:tiny==1\.0: its tests did not end within 5 s"):
        await profile(package, bench, seconds=5)
    for pid in (tmp_path / "pids").read_text().split():
        wait_until_gone(Path(f"/proc/{pid}/stat"))


async def test_a_suite_whose_process_ends_early_is_refused(bench: Bench, source_of: SourceOf) -> None:
    package = fetch(source_of({"tests/test_flaky.py": "import os\n\n\ndef test_crash():\n    os._exit(3)\n"}))
    said = r"pypi:tiny==1\.0: its tests do not run to their end \(the tests' process ended early with exit code 3\)"
    with pytest.raises(TaskError, match=said):
        await profile(package, bench)
    assert not list(package.tree.parent.glob("profile-*"))


async def test_the_report_stays_small_for_many_tests_and_functions(bench: Bench, source_of: SourceOf) -> None:
    """Each function's name is reported once, so that the report stays small."""
    functions = "".join(f"def a_rather_long_name_of_function_{n}():\n    return {n}\n\n\n" for n in range(300))
    tests = (
        "import pytest, tiny\n\n\n@pytest.mark.parametrize('n', range(200))\ndef test_all(n):\n"
        "    assert sum(value() for name, value in vars(tiny).items() if name.startswith('a_r')) == 44850\n"
    )
    files = {"src/tiny/__init__.py": functions, "tests/test_tiny.py": tests, "tests/test_flaky.py": None}
    package = fetch(source_of(files))
    limits = Limits(seconds=60.0, cpu_seconds=60.0, file_mb=1)
    report = await bench.run(package.tree, {}, env=package.environment, calls=package.import_root, limits=limits)
    assert report.problem is None
    assert {len(called) for called in report.calls.values()} == {300}


def test_tests_do_not_outlive_the_process_that_runs_them(source_of: SourceOf, tmp_path: Path) -> None:
    hang = f"""
        import os, pathlib, time
        def test_hang():
            pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()) + " ")
            time.sleep(600)
    """
    fetch(source_of({"tests/test_tiny.py": hang}))
    code = (
        "import asyncio\n"
        "from turnstile.swe.bugs import profile\n"
        "from turnstile.swe.grading import grader\n"
        "from turnstile.swe.packages import source\n"
        "async def main():\n"
        "    async with grader.local_grader() as judge:\n"
        "        await profile.profile(source.fetch('pypi:tiny==1.0'), judge.bench)\n"
        "asyncio.run(main())"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    pid = tmp_path / "pid"
    while not (pid.exists() and pid.read_text().endswith(" ")):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    wait_until_gone(Path(f"/proc/{pid.read_text().strip()}/stat"))


def wait_until_gone(stat: Path) -> None:
    """Returns when a process is gone, or is dead and only not yet waited for by its parent."""
    while stat.exists():
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return  # it went between the two looks
        time.sleep(0.01)


async def test_a_suite_that_cannot_be_imported_is_refused(bench: Bench, source_of: SourceOf) -> None:
    broken = "import no_such_module\n"
    package = fetch(source_of({"tests/test_tiny.py": broken, "tests/test_flaky.py": None}))
    with pytest.raises(TaskError, match=r"none of its 0 tests passes here; the first problem: .*no_such_module"):
        await profile(package, bench)


async def test_a_suite_without_a_passing_test_is_refused(bench: Bench, source_of: SourceOf) -> None:
    package = fetch(source_of({"tests/test_tiny.py": "def test_a():\n    assert 0\n", "tests/test_flaky.py": None}))
    with pytest.raises(TaskError, match="none of its 1 tests passes here"):
        await profile(package, bench)


async def test_the_packages_settings_and_the_callers_environment_have_no_effect(
    source_of: SourceOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "1")
    check = """
        import os
        def test_environment():
            assert "SECRET" not in os.environ
            assert os.environ["TZ"] == "UTC"
    """
    package = fetch(
        source_of({"setup.cfg": "[tool:pytest]\naddopts = --no-such-option\n", "tests/test_flaky.py": check})
    )
    node = "tests/test_flaky.py::test_environment"
    async with local_grader() as grader:
        report = await grader.run_tests(package.tree, {}, [node], env=package.environment)
    assert report.outcomes == {node: "passed"}, report.messages


def test_the_most_specific_quick_tests_judge_first() -> None:
    measured = Profile(
        seconds={"a": 0.1, "b": 0.2, "c": 9.0, "d": 0.1},
        covering={"m.py:1": ("a", "b", "c", "d"), "m.py:9": ("a",), "m.py:5": ("a", "d")},
        collected=4,
        unstable=(),
    )
    assert measured.tests_of("m.py", (1, 4), 9) == ("b", "d", "a", "c")
    assert measured.tests_of("m.py", (1, 4), 2) == ("b", "d")
    assert measured.tests_of("m.py", (2, 4), 2) == ()


async def test_a_test_must_pass_in_every_run(bench: Bench, source_of: SourceOf, tmp_path: Path) -> None:
    count = tmp_path / "count"
    flaky = f"""
        import pathlib

        def test_third_time():
            place = pathlib.Path({str(count)!r})
            times = int(place.read_text()) if place.exists() else 0
            place.write_text(str(times + 1))
            assert times != 2
    """
    package = fetch(source_of({"tests/test_flaky.py": flaky}))
    test = "tests/test_flaky.py::test_third_time"
    assert test in (await profile(package, bench)).seconds
    measured = await profile(package, bench, runs=4)
    assert (measured.runs, measured.unstable) == (4, (test, "tests/test_tiny.py::test_broken"))
    assert measured.flaky == (test,)
    assert await profile(package, bench, runs=3) == measured  # as more runs were made before
