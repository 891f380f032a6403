from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import textwrap
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from turnstile.errors import TaskError
from turnstile.swe.packages import layout, pip
from turnstile.swe.packages.metadata import read_metadata
from turnstile.swe.packages.source import PypiSource, fetch, parse_source
from turnstile.swe.tree import tree_digest

SourceOf = Callable[..., Any]

BACKEND = """
    import pathlib

    def _metadata():
        return "Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0\\n"

    def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
        folder = pathlib.Path(metadata_directory) / "{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(_metadata())
        return folder.name

    def build_wheel(*args, **kwargs):
        raise RuntimeError("nobody needs a wheel of it")
"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Mapping[str, str]], Path]:
    """Publishes source distributions in a folder that is all the index pip knows; they build without a network."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)

    def publish(name: str, files: Mapping[str, str]) -> Path:
        build = {
            "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
            "backend.py": textwrap.dedent(BACKEND).replace("{name}", name),
            "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        }
        archive = folder / f"{name}-1.0.tar.gz"
        with tarfile.open(archive, "w:gz") as packed:
            for path, text in {**build, **files}.items():
                info = tarfile.TarInfo(f"{name}-1.0/{path}")
                info.size = len(text.encode())
                packed.addfile(info, io.BytesIO(text.encode()))
        return archive

    return publish


def made(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


def test_two_processes_make_a_package_once(tiny: Any) -> None:
    with ThreadPoolExecutor(4) as pool:
        packages = list(pool.map(fetch, [tiny] * 8))
    assert len(tiny.unpacked) == 1
    assert packages == packages[:1] * 8


def test_specs_are_read_and_normalised() -> None:
    source = parse_source("pypi:Python_Slugify==9.2.0")
    assert source == PypiSource(name="python-slugify", version="9.2.0")
    assert source.spec == "pypi:python-slugify==9.2.0"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("toolz==1.2.0", "write it as pypi:NAME==VERSION"),
        ("pypi:toolz", "with one exact version"),
        ("pypi:toolz>=1", "with one exact version"),
        ("pypi:--index==1", "with one exact version"),
        ("pipy:toolz==1", "unknown kind 'pipy'; did you mean 'pypi'?"),
    ],
)
def test_a_bad_spec_says_how_to_write_it(spec: str, says: str) -> None:
    with pytest.raises(TaskError) as caught:
        parse_source(spec)
    assert spec in str(caught.value)
    assert says in str(caught.value)


def test_a_package_comes_from_the_index(cache: Path, index: Callable[..., Path]) -> None:
    index("wee", {"wee.py": "x = 1\n", "test_wee.py": "", "wee.egg-info/PKG-INFO": "", "LICENSE.txt": "MIT"})
    package = fetch("pypi:wee==1.0")
    assert (package.name, package.version, package.import_root) == ("wee", "1.0", ".")
    assert package.modules == ("backend.py", "wee.py")
    assert package.tests == ("test_wee.py",)
    assert package.licence_file == "LICENSE.txt"
    assert package.tree == cache / "swe" / "wee-1.0" / "tree"
    assert not list(package.tree.glob("*.egg-info"))
    assert package.environment == {"PYTHONPATH": f".{os.pathsep}{package.deps}"}
    version = "import importlib.metadata as m; print(m.version('wee'))"
    environment = {**os.environ, **package.environment}
    command = [sys.executable, "-c", version]
    shown = subprocess.run(command, env=environment, cwd=package.tree, capture_output=True, text=True)
    assert shown.stdout == "1.0\n", shown.stderr


def test_a_package_that_the_index_lacks_is_named(cache: Path, index: Callable[..., Path]) -> None:
    index("wee", {"wee.py": ""})
    with pytest.raises(TaskError, match=r"pypi:nowhere==1: the package index has no such source distribution"):
        fetch("pypi:nowhere==1")
    with pytest.raises(TaskError, match=r"pypi:wee==2: .* it has 1\.0$"):
        fetch("pypi:wee==2")
    with pytest.raises(TaskError, match=r"pypi:wee==1\.0: its source distribution holds no tests"):
        fetch("pypi:wee==1.0")
    assert made(cache / "swe") == []  # nothing half-made stays


def test_a_dependency_that_does_not_install_is_named(cache: Path, index: Callable[..., Path]) -> None:
    index("wee", {"wee.py": "", "test_wee.py": "", "PKG-INFO": "Name: wee\nRequires-Dist: nowhere>=2\n"})
    with pytest.raises(TaskError, match=r"pypi:wee==1\.0: its dependencies \(nowhere>=2\) do not install: .*nowhere"):
        fetch("pypi:wee==1.0")


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "x-1.tar.gz").write_bytes(b"\x1f\x8b broken")
    (tmp_path / "into").mkdir()
    with pytest.raises(TaskError, match=r"x-1\.tar\.gz: the source distribution cannot be unpacked"):
        layout.unpack_archive(tmp_path / "x-1.tar.gz", tmp_path / "into")


def test_an_archive_cannot_leave_its_folder(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x-1.tar.gz", "w:gz") as packed:
        packed.addfile(tarfile.TarInfo("../outside"), io.BytesIO())
    (tmp_path / "into").mkdir()
    with pytest.raises(TaskError, match="cannot be unpacked"):
        layout.unpack_archive(tmp_path / "x-1.tar.gz", tmp_path / "into")
    assert not (tmp_path / "outside").exists()


def test_a_missing_pip_gives_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(TaskError, match="ensurepip"):
        pip.download_sdist("wee", "1.0", tmp_path)


def test_the_cache_is_reused(tiny: Any) -> None:
    first = fetch(tiny)
    assert fetch(tiny) == first
    assert len(tiny.unpacked) == 1
    assert first.import_root == "src"
    assert first.modules == ("src/tiny/__init__.py",)
    assert first.tests == ("tests/test_flaky.py", "tests/test_tiny.py")
    assert (first.licence, first.licence_file) == ("MIT License", "LICENSE")
    assert first.environment == {"PYTHONPATH": os.pathsep.join(("src", ".", str(first.deps)))}


@pytest.mark.parametrize("damage", ["changed", "missing", "added", "no record", "torn record", "no deps"])
def test_a_damaged_cache_is_rebuilt(tiny: Any, damage: str) -> None:
    package = fetch(tiny)
    module, record = package.tree / package.modules[0], package.tree.with_name("package.json")
    match damage:
        case "changed":
            module.write_text("x = 1\n")
        case "missing":
            module.unlink()
        case "added":
            (package.tree / "extra.py").write_text("")
        case "no record":
            record.unlink()
        case "torn record":
            record.write_text(record.read_text()[:50])
        case "no deps":
            (package.deps / "tiny-1.0.dist-info" / "METADATA").unlink()
            (package.deps / "tiny-1.0.dist-info").rmdir()
            package.deps.rmdir()
    assert fetch(tiny) == package
    assert len(tiny.unpacked) == 2
    assert tree_digest(package.tree) == package.digest
    assert made(package.tree.parent.parent) == ["tiny-1.0"]


def test_byte_code_in_the_tree_does_not_count_as_damage(tiny: Any) -> None:
    package = fetch(tiny)
    (package.tree / "src/tiny/__pycache__").mkdir()
    (package.tree / "src/tiny/__pycache__/x.pyc").write_bytes(b"")
    assert fetch(tiny) == package
    assert len(tiny.unpacked) == 1


@pytest.mark.parametrize(
    ("files", "root"),
    [
        (("src/wee/__init__.py", "tests/test_a.py"), "src"),
        (("wee/__init__.py", "src/other.py"), "."),
        (("wee.py", "test_wee.py"), "."),
        (("python/wee/__init__.py",), "python"),
        (("lib/another/__init__.py",), "."),
        (("src/another/__init__.py",), "src"),
    ],
)
def test_the_import_root_is_found(tmp_path: Path, files: tuple[str, ...], root: str) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    assert layout.find_import_root(tmp_path, "wee") == root


def test_test_requirements_are_those_of_this_python_without_runners(tmp_path: Path) -> None:
    metadata = Message()
    metadata["Name"] = "wee"
    for line in (
        "six>=1", "pytest; extra == 'test'", "pytest-cov; extra == 'test'", "freezegun>1; extra == 'tests'",
        "sphinx; extra == 'docs'", "furo; extra == 'docs'", "old; python_version < '3'", "wee[fast]; extra == 'test'",
        "not a requirement at all",
    ):  # fmt: skip
        metadata["Requires-Dist"] = line
    (tmp_path / "pyproject.toml").write_text('[dependency-groups]\ntest = ["hypothesis", {include-group = "x"}]\n')
    assert layout.requirements(tmp_path, metadata) == ["freezegun>1", "hypothesis", "six>=1"]


def test_old_metadata_is_read(tmp_path: Path) -> None:
    (tmp_path / "wee.egg-info").mkdir()
    (tmp_path / "PKG-INFO").write_text("Metadata-Version: 1.2\nName: wee\nLicense: BSD\n")
    (tmp_path / "wee.egg-info/requires.txt").write_text("six\n\n[test]\nmock\n\n[:python_version<'3']\nold\n")
    metadata = read_metadata(tmp_path)
    assert layout.requirements(tmp_path, metadata) == ["mock", "six"]
    assert layout.find_licence(tmp_path, metadata) == ("BSD", None)


PLUGIN = {
    "wee.egg-info/entry_points.txt": "[wee.plugins]\nloud = tiny:clamp\n",
    "pyproject.toml": """
        [project]
        name = "tiny"
        [project.entry-points."wee.plugins"]
        loud = "tiny:clamp"
    """,
    "setup.cfg": """
        [options.entry_points]
        wee.plugins =
            loud = tiny:clamp
    """,
}


@pytest.mark.parametrize("place", PLUGIN)
def test_plugins_are_found_as_if_the_package_were_installed(place: str, source_of: SourceOf) -> None:
    """Suites use them; what offers them is not part of the sources."""
    package = fetch(source_of({place: PLUGIN[place]}))
    code = "import importlib.metadata as m; print([(p.name, p.value) for p in m.entry_points(group='wee.plugins')])"
    environment = {**os.environ, **package.environment}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, cwd=package.tree, capture_output=True)
    assert shown.stdout.decode() == "[('loud', 'tiny:clamp')]\n", shown.stderr


def test_pins_of_a_task_file_replace_the_metadata(cache: Path, source_of: SourceOf) -> None:
    source = source_of({"PKG-INFO": "Name: tiny\nRequires-Dist: nowhere\n"})
    package = fetch(source, requires=())
    assert package.requires == ()
    assert fetch(source, requires=()) == package
    record = json.loads(package.tree.with_name("package.json").read_text())
    assert record["spec"] == "pypi:tiny==1.0"


def wheel(folder: Path, name: str, *requires: str) -> None:
    """A built package with one module of its name."""
    metadata = [
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        *(f"Requires-Dist: {one}\n" for one in requires),
    ]
    about = f"{name}-1.0.dist-info"
    files = {
        f"{name}/__init__.py": "x = 1\n",
        f"{about}/METADATA": "".join(metadata),
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{about}/RECORD"))
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as packed:
        for path, text in files.items():
            packed.writestr(path, text)


@pytest.mark.slow
def test_a_package_is_not_among_its_own_dependencies(cache: Path, index: Callable[..., Path]) -> None:
    helper = "Requires-Dist: helper\n"
    about = f"Metadata-Version: 2.1\nName: wee\nVersion: 1.0\n{helper}"
    folder = index("wee", {"wee/__init__.py": "x = 1\n", "test_wee.py": "", "PKG-INFO": about}).parent
    wheel(folder, "wee")
    wheel(folder, "helper", "wee")
    package = fetch("pypi:wee==1.0")
    assert package.requires == ("helper==1.0",)
    assert (package.deps / "helper" / "__init__.py").is_file()
    assert not (package.deps / "wee").exists()
    assert fetch("pypi:wee==1.0", requires=["helper==1.0", "wee==1.0"]) == package  # as older task files have it
