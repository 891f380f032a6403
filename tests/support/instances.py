"""A repository with a past and a future in a container image, and the instance that asks for its repair."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dockerd import Dockerd, write_root
from turnstile.swe.formats.instance import Instance

NAME = "turnstile-test-instance"
WORKDIR = "/testbed"
PROGRAMS = (*("bash", "git", "patch", "rmdir", "grep", "cp", "xargs", "sed", "find", "sort", "dirname", "basename"),)
MODULES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")

BASE: Mapping[str, str] = {
    "calc/__init__.py": """
        def mean(values):
            return sum(values) / (len(values) + 1)


        def biggest(values):
            return max(values)
    """,
    "calc/old.py": "UNUSED = 1\n",
    "tests/__init__.py": "",
    "tests/test_calc.py": """
        import pytest
        from calc import biggest, mean


        def test_biggest():
            assert biggest([1, 3, 2]) == 3


        @pytest.mark.xfail
        def test_known():
            assert mean([7]) == 0


        @pytest.mark.parametrize("text", ["a b", "c"])
        def test_text(text):
            assert text
    """,
    "setup.cfg": "[tool:pytest]\naddopts = -q\nfilterwarnings =\n    error\n",
    ".gitignore": "*.log\nbuild/\n",
}
PLUGIN: Mapping[str, str] = {  # of pytest, as images have them
    "handy.py": "",
    "handy-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: handy\nVersion: 1.0\n",
    "handy-1.0.dist-info/entry_points.txt": "[pytest11]\nhandy = handy\n",
}
TESTS = textwrap.dedent(
    """
    from calc import mean


    def test_mean():
        assert mean([2, 4]) == 3
    """
)
STATEMENT = "mean([2, 4]) gives 2.0 instead of 3."


def write_repository(folder: Path) -> Instance:
    """The repository at its base commit, with the repair in a later commit on a branch, a tag and a stash; and the
    instance without its image."""
    git = ["git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]

    def run(*command: str) -> str:
        return subprocess.run([*git, *command], check=True, capture_output=True, text=True).stdout

    def write(path: str, text: str) -> None:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(textwrap.dedent(text).lstrip("\n"))

    folder.mkdir()
    run("init", "-q", "-b", "main")
    for path, text in BASE.items():
        write(path, text)
    run("add", "-A")
    run("commit", "-q", "-m", "Begin")
    run("tag", "v1.0")
    base = run("rev-parse", "HEAD").strip()
    run("checkout", "-q", "-b", "future")
    write("calc/__init__.py", BASE["calc/__init__.py"].replace("(len(values) + 1)", "len(values)"))
    run("commit", "-q", "-am", "Divide by the number of values")
    patch = run("diff", base, "HEAD")
    write("tests/test_mean.py", TESTS)
    run("add", "-A")
    run("commit", "-q", "-m", "Test it")
    test_patch = run("diff", "HEAD~1", "HEAD")
    run("tag", "v1.1")
    run("checkout", "-q", "main")
    return Instance(
        id="calc__calc-1",
        problem=STATEMENT,
        repo="calc/calc",
        base_commit=base,
        patch=patch,
        test_patch=test_patch,
        fail_to_pass=("tests/test_mean.py::test_mean",),
        pass_to_pass=(
            "tests/test_calc.py::test_biggest",
            "tests/test_calc.py::test_known",
            "tests/test_calc.py::test_text[a",
        ),
        workdir=WORKDIR,
    )


def instance_image(engine: Dockerd, folder: Path) -> Instance:
    """Puts the image into the engine; the instance names it."""
    instance = write_repository(folder / "repository")
    site = Path(sysconfig.get_paths()["purelib"])
    more: dict[str, str | Path] = {}
    for name in MODULES:
        place = site / name
        for file in place.rglob("*"):
            if file.is_file() and file.suffix != ".pyc":
                more[f"/modules/{file.relative_to(site)}"] = file
    more["/modules/py.py"] = site / "py.py"
    for name, text in PLUGIN.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        more[f"/modules/{name}"] = folder / name
    for found, _, names in os.walk(folder / "repository"):
        for name in names:
            file = Path(found) / name
            more[f"{WORKDIR}/{file.relative_to(folder / 'repository')}"] = file
    archive = folder / "image.tar"
    write_root(archive, True, programs=PROGRAMS, more=more)
    with engine.client() as client:
        client.import_image(str(archive), repository=NAME, changes=["ENV PYTHONPATH=/modules"])
    archive.unlink()
    return replace(instance, image=NAME)
