"""Sources that are a folder or a commit, with real repositories."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from turnstile.errors import TaskError
from turnstile.swe.bug import Bug, package_of
from turnstile.swe.bugs.make import make
from turnstile.swe.grading.grader import CodeGrader
from turnstile.swe.grading.judge import fault
from turnstile.swe.packages.metadata import static_metadata
from turnstile.swe.packages.source import fetch, parse_source

from ..conftest import TINY, write_tree

PROJECT = '[project]\nname = "Tiny_Thing"\nversion = "1.5"\nlicense = "MIT"\n'
Git = Callable[..., str]


@pytest.fixture
def project(cache: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "work" / "tiny"
    files = {name: text for name, text in TINY.items() if name not in ("PKG-INFO", "setup.py")}
    write_tree(folder, {**files, "pyproject.toml": PROJECT, "build/left.py": "x = 1\n"})
    return folder


@pytest.fixture
def git(project: Path) -> Git:
    """Runs git in the project, which is a repository of one commit tagged v1."""

    def run(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
            cwd=project,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    run("init", "-q", "-b", "main")
    run("add", ".")
    run("commit", "-qm", "first")
    run("tag", "v1")
    return run


def test_a_folder_is_a_package(project: Path) -> None:
    source = parse_source(str(project))
    assert (source.kind, source.name) == ("path", "tiny-thing")
    assert source.version.startswith("1.5+")
    package = fetch(source)
    assert (package.import_root, package.licence, package.requires) == ("src", "MIT", ())
    assert package.tests == ("tests/test_flaky.py", "tests/test_tiny.py")
    assert not (package.tree / "build").exists()
    assert parse_source(f"path:{project}") == source
    assert parse_source(package.spec) == source


def test_a_folder_that_changes_is_another_package(project: Path) -> None:
    first = fetch(str(project))
    (project / "src/tiny/__init__.py").write_text("x = 1\n")
    second = fetch(str(project))
    assert first.label != second.label
    assert fetch(first.spec) == first  # from the cache
    (first.tree.with_name("package.json")).unlink()
    with pytest.raises(TaskError, match=r"have changed since; make the tasks again"):
        fetch(first.spec)


def test_a_commit_is_a_package_without_its_history(project: Path, git: Git) -> None:
    first = git("rev-parse", "HEAD")
    (project / "later.py").write_text("answer = 42\n")
    git("add", ".")
    git("commit", "-qm", "later")
    url = f"git+file://{project}"
    package = fetch(f"{url}@v1")
    assert package.spec == f"{url}@{first}#tiny-thing==1.5+g{first[:12]}"
    assert not (package.tree / "later.py").exists()
    assert not list(package.tree.parent.rglob(".git"))
    assert fetch(f"{url}@{first}") == package
    assert (fetch(f"{url}@main").tree / "later.py").is_file()


def test_a_branch_that_moved_is_followed_and_a_pinned_commit_needs_no_repository(project: Path, git: Git) -> None:
    url = f"git+file://{project}"
    before = fetch(f"{url}@main")
    (project / "later.py").write_text("")
    git("add", ".")
    git("commit", "-qm", "later")
    assert (fetch(f"{url}@main").tree / "later.py").is_file()
    project.rename(project.with_name("moved"))
    assert fetch(before.spec) == before


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("./nowhere", "there is no folder"),
        ("git+file:///nowhere/x", "write it as git+URL@REVISION"),
        ("git+file:///nowhere/x@main", "it cannot be cloned: fatal"),
        ("git+file:///nowhere/x@--upload-pack=y", "write it as git+URL@REVISION"),
    ],
)
def test_a_source_that_cannot_be_had_gives_a_clear_error(cache: Path, spec: str, says: str) -> None:
    with pytest.raises(TaskError) as caught:
        parse_source(spec)
    assert says in str(caught.value)


def test_an_unknown_revision_is_refused(project: Path, git: Git) -> None:
    with pytest.raises(TaskError, match="the repository has no revision 'v9'"):
        parse_source(f"git+file://{project}@v9")


def test_static_metadata_is_read() -> None:
    def needs(metadata: Message) -> list[str]:
        return [str(line) for line in metadata.get_all("Requires-Dist") or []]

    new = '[project]\nname = "x"\ndependencies = ["six"]\n[project.optional-dependencies]\nt = ["mock; os_name != 1"]\n'
    assert needs(static_metadata({"pyproject.toml": new})) == ["six", "mock; (os_name != 1) and extra == 't'"]
    old = "[metadata]\nname = x\nversion = attr: x.v\n[options]\ninstall_requires =\n  six\n  # no\n"
    metadata = static_metadata({"setup.cfg": old + "[options.extras_require]\ntest = mock\n"})
    assert needs(metadata) == ["six", "mock; extra == 'test'"]
    assert (metadata["Name"], metadata["Version"], metadata["Dynamic"]) == ("x", None, None)
    assert static_metadata({"pyproject.toml": '[project]\nname = "x"\ndynamic = ["dependencies"]'})["Dynamic"]
    assert static_metadata({})["Dynamic"]


@pytest.mark.slow
async def test_tasks_of_a_commit_are_made_and_found_again(
    project: Path, git: Git, grader: CodeGrader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = await make(f"git+file://{project}@v1", tmp_path / "out.jsonl", 1, runs=3, grader=grader)
    bug = Bug.of(made.tasks[0])
    monkeypatch.setenv("TURNSTILE_CACHE", str(tmp_path / "another"))
    assert await fault(grader, bug, package_of(bug)) is None
