"""What of a repository may be imported in the place of a library."""

from __future__ import annotations

from turnstile.swe.grading.suite import importable


def test_only_modules_and_their_folders_are_the_repositorys_own() -> None:
    paths = ["docs/execnet.rst", "pytest.ini", "src/calc/core.py", "calc/fast.cpython-311.so", "calc.pyi", "six", ""]
    assert importable(paths) == ["calc", "core", "fast", "src"]
