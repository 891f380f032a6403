"""Find the licence, import root, source files, tests and dependencies of an unpacked source distribution."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from email.message import Message
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from turnstile.errors import TaskError
from turnstile.swe.tree import is_test_file

_TEST_EXTRAS = ("test", "tests", "testing")
_NOT_SOURCE = {"tests", "test", "testing", "doc", "docs", "example", "examples", "benchmark", "benchmarks", "bench",
               "build", "dist", "scripts", "tools", "setup.py", "conftest.py", "noxfile.py", "tasks.py"}  # fmt: skip
# listed in test extras but not imported by tests, such as runners and linters
_NOT_INSTALLED = re.compile(r"pytest.*|coverage.*|tox.*|nox|mypy.*|ruff|black|flake8.*|isort|pylint|twine|build|wheel|"
                            r"pre-commit|sphinx.*|setuptools.*|covdefaults|codecov|diff-cover|types-.*")  # fmt: skip


def unpack_archive(archive: Path, into: Path) -> None:
    """Unpack a source distribution into `into`, without its single top folder.

    Raises TaskError for a damaged archive.
    """
    inner = into.with_name(f"{into.name}.unpacked")
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as packed:
                packed.extractall(inner)
        else:
            with tarfile.open(archive) as packed_tar:
                packed_tar.extractall(inner, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise TaskError(f"{archive.name}: the source distribution cannot be unpacked ({error})") from error
    entries = list(inner.iterdir())
    top = entries[0] if len(entries) == 1 and entries[0].is_dir() else inner
    for entry in top.iterdir():
        entry.rename(into / entry.name)
    shutil.rmtree(inner)


def remove_build_products(tree: Path) -> None:
    """Delete what builds and test runs leave behind, so that a template holds only sources."""
    for pattern in ("*.egg-info", "*.pyc"):
        for path in sorted(tree.rglob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in ("__pycache__", ".pytest_cache", ".tox", ".mypy_cache", ".git", ".github", ".hypothesis"):
        for path in sorted(tree.rglob(name)):
            shutil.rmtree(path, ignore_errors=True)
    for name in ("build", "dist", "PKG-INFO"):
        path = tree / name
        shutil.rmtree(path) if path.is_dir() and not (path / "__init__.py").exists() else path.unlink(missing_ok=True)


def find_tests(tree: Path) -> list[str]:
    """Return the test files under `tree`, sorted, without those of documentation and examples."""
    found = (path.relative_to(tree).as_posix() for path in tree.rglob("*.py"))
    return sorted(path for path in found if is_test_file(path) and not path.startswith(("docs/", "doc/", "examples/")))


def find_import_root(tree: Path, name: str) -> str:
    """Return the folder for the import path: the one with the package, else `src` if it has code, else `.`."""
    importable = name.replace("-", "_").lower()
    candidates = [".", *sorted(entry.name for entry in tree.iterdir() if entry.is_dir())]
    candidates.sort(key=lambda folder: folder not in (".", "src", "lib"))
    for folder in candidates:
        for entry in (tree / folder).iterdir():
            plain = entry.name.lower().removesuffix(".py")
            if plain == importable and ((entry / "__init__.py").is_file() or entry.suffix == ".py"):
                return folder
    has_src = (tree / "src").is_dir() and any((tree / "src").rglob("*.py"))
    return "src" if has_src else "."


def find_modules(tree: Path, import_root: str) -> list[str]:
    """Return the package's own source files, without tests, setup scripts, documentation and examples."""
    root = tree / import_root
    modules = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        relative = path.relative_to(tree).as_posix()
        if not (_NOT_SOURCE & set(inside.parts)) and not is_test_file(relative) and inside.parts[0] != "src":
            modules.append(relative)
    return modules


def requirements(tree: Path, metadata: Message) -> list[str]:
    """Return the runtime and test requirements that apply to this Python, without test runners and linters."""
    lines = [str(value) for value in metadata.get_all("Requires-Dist") or []]
    lines += _dependency_groups(tree)
    wanted: dict[str, str] = {}
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue  # pip could not read this requirement either
        if _NOT_INSTALLED.fullmatch(canonicalize_name(requirement.name)):
            continue
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *_TEST_EXTRAS)):
            requirement.marker = None
            wanted.setdefault(canonicalize_name(requirement.name), str(requirement))
    wanted.pop(canonicalize_name(str(metadata.get("Name", ""))), None)
    return sorted(wanted.values())


def _dependency_groups(tree: Path) -> list[str]:
    """Return the requirements in the test groups of pyproject.toml (PEP 735), without included groups."""
    path = tree / "pyproject.toml"
    if not path.is_file():
        return []
    try:
        project: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        return []  # pip built the metadata without this file, so it is not needed
    groups = project.get("dependency-groups", {})
    return [line for name in _TEST_EXTRAS for line in groups.get(name, []) if isinstance(line, str)]


def pins(deps: Path) -> list[str]:
    """Return the packages in a `--target` folder as exact pins."""
    found = importlib.metadata.distributions(path=[str(deps)])
    return sorted(f"{canonicalize_name(item.metadata['Name'])}=={item.version}" for item in found)


def remove_distribution(deps: Path, name: str) -> None:
    """Delete one package from a `--target` folder, and all folders that are empty then."""
    for found in importlib.metadata.distributions(path=[str(deps)]):
        if canonicalize_name(found.metadata["Name"]) == canonicalize_name(name):
            for file in found.files or ():
                path = Path(str(found.locate_file(file)))
                if path.is_file() and path.resolve().is_relative_to(deps.resolve()):
                    path.unlink()
    for folder, _, _ in os.walk(deps, topdown=False):
        if folder != str(deps) and not os.listdir(folder):
            os.rmdir(folder)


def find_licence(tree: Path, metadata: Message) -> tuple[str, str | None]:
    """Return the licence's name from the metadata (or "unknown"), and the name of the file with its text, if any."""
    files = sorted(
        path.name for path in tree.iterdir() if re.match(r"(licen[cs]e|copying)", path.name, re.IGNORECASE)
        and path.is_file()
    )  # fmt: skip
    classifiers: Sequence[str] = [str(value) for value in metadata.get_all("Classifier") or []]
    named = [line.rsplit(" :: ", 1)[-1] for line in classifiers if line.startswith("License :: ")]
    short = str(metadata.get("License") or "").strip()
    expression = str(metadata.get("License-Expression") or "").strip()
    name = expression or (short if short and len(short) <= 40 and "\n" not in short else "") or ", ".join(named)
    return name or "unknown", files[0] if files else None
