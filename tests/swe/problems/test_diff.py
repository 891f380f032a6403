"""Diffs in git's form: git itself applies them, and they name what they touch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from turnstile.swe.problems.diff import MOST_LINES, git_diff, touched_files

PAIRS: dict[str, tuple[bytes | None, bytes | None]] = {
    "changed.py": (b"a\nb\nc\n", b"a\nB\nc\n"),
    "endless": (b"a\nb", b"a\nc"),
    "gained": (b"a", b"a\n"),
    "gone": (b"a\n\x0c\rb\n", None),
    "new dir/new file": (None, b"text\n"),
    "dos": (b"a\r\nb\r\n", b"a\r\nc\r\n"),
    "binary": (bytes(range(256)) * 9, bytes(reversed(range(256))) * 7),
    "binary-new": (None, b"\0" * 1000),
    "binary-gone": (b"\xff\0", None),
    "latin": ("café\n".encode("latin-1"), "cafés\n".encode("latin-1")),
    'qu"ote\\d\tü': (b"a\n", b"b\n"),
    "odd\udce9name": (None, b"a\n"),
    "same": (b"a\n", b"a\n"),
    "emptied": (b"a\n", b""),
    "filled": (b"", b"a\n"),
    "new-empty": (None, b""),
    "gone-empty": (b"", None),
}


@pytest.mark.parametrize("names", [*([name] for name in PAIRS), list(PAIRS)], ids=str)
def test_git_applies_the_diff(names: list[str], tmp_path: Path) -> None:
    before = {name: PAIRS[name][0] for name in names}
    after = {name: PAIRS[name][1] for name in names}
    patch = git_diff(after, before.get)
    tree = tmp_path / "tree"
    tree.mkdir()
    for name, data in before.items():
        if data is not None:
            (tree / name).write_bytes(data)
    if patch:
        done = subprocess.run(["git", "apply", "-"], cwd=tree, input=patch.encode(), capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
    found = {str(file.relative_to(tree)): file.read_bytes() for file in tree.rglob("*") if file.is_file()}
    assert found == {name: data for name, data in after.items() if data is not None}
    assert bool(patch) == (names != ["same"])


LINES = [b"line %d\n" % number for number in range(MOST_LINES)]


@pytest.mark.parametrize(
    ("old", "new", "hunk"),
    [
        (LINES, [*LINES[::-1], b"end"], f"@@ -1,{MOST_LINES} +1,{MOST_LINES + 1} @@"),
        ([], LINES + LINES, f"@@ -0,0 +1,{2 * MOST_LINES} @@"),
        (LINES + LINES, [], f"@@ -1,{2 * MOST_LINES} +0,0 @@"),
        (LINES, [*LINES[:9], b"new\n", *LINES[10:]], "@@ -7,7 +7,7 @@"),
    ],
    ids=["reordered", "filled", "emptied", "one line"],
)
def test_a_file_with_many_changes_is_one_hunk(old: list[bytes], new: list[bytes], hunk: str, tmp_path: Path) -> None:
    patch = git_diff({"file": b"".join(new)}, {"file": b"".join(old)}.get)
    assert [line for line in patch.split("\n") if line.startswith("@@")] == [hunk]
    (tmp_path / "file").write_bytes(b"".join(old))
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch.encode(), check=True)
    assert (tmp_path / "file").read_bytes() == b"".join(new)


def test_an_executable_file_stays_executable(tmp_path: Path) -> None:
    patch = git_diff({"run.sh": b"#!/bin/sh\n"}, {}.get, executable={"run.sh"})
    subprocess.run(["git", "apply", "-"], cwd=tmp_path, input=patch.encode(), check=True)
    assert (tmp_path / "run.sh").stat().st_mode & 0o100


def test_the_files_that_a_patch_touches_are_found() -> None:
    patch = git_diff({"a.py": b"x\n", "b/new.py": b"y\n", "c.py": None}, {"a.py": b"", "c.py": b"z\n"}.get)
    assert set(touched_files(patch)) == {"a.py", "b/new.py", "c.py"}
    assert touched_files("diff --git a/old b/new\nsimilarity index 100%\nrename from old\nrename to new\n") == (
        "old",
        "new",
    )
    assert touched_files("") == ()
