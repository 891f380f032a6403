"""A package of ten lines with a suite of its own, as a source that needs no package index."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from turnstile.sandboxes.base import Limits
from turnstile.sandboxes.local import LocalSandboxes
from turnstile.swe.bugs.make import Made, make
from turnstile.swe.grading.bench import Bench
from turnstile.swe.grading.grader import CodeGrader
from turnstile.swe.grading.testrun import PRELOAD

QUICK = Limits(seconds=60.0, cpu_seconds=1.0)  # a busy loop is over in a second, and a busy machine is not a hang

TINY: Mapping[str, str] = {
    "src/tiny/__init__.py": '''
        """Small sums."""


        def clamp(value, low, high):
            """Between low < high."""
            # low <= value
            if value < low:
                return low
            return min(value, high)


        def digits(n):
            count = 1
            while n > 9:
                n = n // 10
                count += 1
            return count


        def unused(a):
            return a + 1


        def nothing(flag):
            if flag and 0:
                pass
            return 7
    ''',
    "tests/test_tiny.py": """
        import pytest
        from tiny import clamp, digits, nothing

        @pytest.mark.parametrize("value, want", [(-1, 0), (5, 5), (12, 10)])
        def test_clamp(value, want):
            assert clamp(value, 0, 10) == want

        def test_digits():
            assert digits(7) == 1
            assert digits(123) == 3

        def test_nothing():
            nothing(True)

        def test_broken():
            assert digits(5) == 99
    """,
    "tests/test_flaky.py": """
        import os, pathlib

        def test_only_first_time():
            seen = pathlib.Path(os.environ.get("HOME")) / "seen"
            assert not seen.exists()

        @__import__("pytest").mark.skip
        def test_skipped():
            pass

        @__import__("pytest").mark.xfail
        def test_expected():
            assert False
    """,
    "setup.py": "from setuptools import setup\n",
    "LICENSE": "MIT",
    "PKG-INFO": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\nClassifier: License :: OSI Approved :: MIT License\n",
}


@dataclass(frozen=True, kw_only=True)
class FolderSource:
    """A `Source` that writes given files; `unpacked` counts how often."""

    files: Mapping[str, str]
    name: str = "tiny"
    version: str = "1.0"
    kind: str = "pypi"
    unpacked: list[Path] = field(default_factory=list)

    @property
    def spec(self) -> str:
        return f"pypi:{self.name}=={self.version}"

    def unpack(self, into: Path) -> None:
        self.unpacked.append(into)
        write_tree(into, self.files)


def write_tree(root: Path, files: Mapping[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(textwrap.dedent(text).lstrip("\n"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TURNSTILE_CACHE", str(folder))
    return folder


@pytest.fixture
def source_of(cache: Path) -> Callable[..., FolderSource]:
    """Makes a source of the tiny package with files replaced (a text) or left out (None)."""

    def make(changes: Mapping[str, str | None] = {}, **fields: str) -> FolderSource:
        files = {path: text for path, text in {**TINY, **changes}.items() if text is not None}
        return FolderSource(files=files, **fields)

    return make


@pytest.fixture
def tiny(source_of: Callable[..., FolderSource]) -> FolderSource:
    return source_of()


@dataclass(frozen=True)
class Reference:
    """Everything the tiny package gives, made once; others compare with its first lines."""

    cache: Path
    out: Path
    made: Made

    def head(self, n: int) -> bytes:
        return b"".join(self.out.read_bytes().splitlines(keepends=True)[:n])


@pytest.fixture(scope="session")
def sandboxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSandboxes]:
    provider = LocalSandboxes(preload=PRELOAD, root=tmp_path_factory.mktemp("sandboxes"))
    yield provider
    asyncio.run(provider.close())


@pytest.fixture
def bench(sandboxes: LocalSandboxes) -> Bench:
    return Bench(sandboxes)


@pytest.fixture
def grader(sandboxes: LocalSandboxes) -> CodeGrader:
    return CodeGrader(sandboxes, limits=QUICK)


@pytest.fixture(scope="session")
def reference(sandboxes: LocalSandboxes, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("reference")
    source, out = FolderSource(files=TINY), folder / "all.jsonl"
    judge = CodeGrader(sandboxes, limits=QUICK)
    made = asyncio.run(make(source, out, 99, cache=folder / "cache", per_function=99, grader=judge))
    return Reference(folder / "cache", out, made)
