from __future__ import annotations

import io
import json
import os
import py_compile
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from turnstile.errors import ConfigError
from turnstile.sandboxes.archive import BLOCK, HEADER, TooLargeError, add, pack_modules, pack_tree, unpack_tree
from turnstile.sandboxes.containers.runner.frames import HEAD

Entry = tuple[Mapping[str, Any], bytes]
FOLDER: Entry = ({"kind": "folder", "name": "in"}, b"")


def archive(*entries: Entry) -> io.BytesIO:
    made = io.BytesIO()
    for entry, data in entries:
        add(made, dict(entry), data)
    made.seek(0)
    return made


def file(name: str) -> Entry:
    return {"kind": "file", "name": name, "mode": 0o644}, b"data"


def link(name: str, to: str) -> Entry:
    return {"kind": "link", "name": name, "to": to}, b""


def test_a_tree_comes_out_as_it_went_in(template: Path, tmp_path: Path) -> None:
    (template / "to").symlink_to("pkg")
    (template / "pkg" / "back").symlink_to("../run.sh")
    (template / "caf\udce9").write_bytes(bytes(range(256)))
    out = tmp_path / "out"
    out.mkdir()
    with pack_tree(template) as packed:
        unpack_tree(packed, out)
    assert sorted(path.relative_to(out) for path in out.rglob("*")) == sorted(
        path.relative_to(template) for path in template.rglob("*")
    )
    assert os.readlink(out / "to") == "pkg"
    assert (out / "pkg" / "back").read_bytes() == (template / "run.sh").read_bytes()
    assert os.access(out / "run.sh", os.X_OK)
    with pack_tree(out) as again, pack_tree(template) as before:
        assert again.read() == before.read()


@pytest.mark.parametrize(
    "entries",
    [
        [file("../out-of-it")],
        [file("/tmp/out-of-it")],
        [FOLDER, file("in/../../out-of-it")],
        [file("in/before-its-folder")],
        [FOLDER, FOLDER],
        [file("a"), file("a")],
        [file("a"), link("a", "b")],
        [file("")],
        [file("..")],
        [file("a\0b")],
        [({"kind": "folder", "name": ".."}, b"")],
        [link("out", "/etc"), file("out/passwd")],
        [link("out", "/etc")],
        [link("out", "..")],
        [FOLDER, link("in/up", ".."), link("out", "in/up/../..")],
        [link("../out", "x")],
        [({"kind": "file", "name": 7}, b"")],
        [({"name": "a"}, b"")],
    ],
)
def test_an_archive_that_leaves_its_folder_is_refused(entries: list[Entry], tmp_path: Path) -> None:
    folder = tmp_path / "below" / "folder"
    folder.mkdir(parents=True)
    with pytest.raises(ValueError, match="archive"):
        unpack_tree(archive(*entries), folder)
    assert os.listdir(tmp_path) == ["below"]
    assert os.listdir(tmp_path / "below") == ["folder"]


@pytest.mark.parametrize("text", [b"x", b"\0\0\0\xff" + bytes(8) + b"short", archive(file("a")).getvalue()[:-1]])
def test_what_is_no_archive_is_refused(text: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="archive"):
        unpack_tree(io.BytesIO(text), tmp_path)


class Counted(io.BytesIO):
    """Knows how much of it was read."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.taken = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.taken += len(data)
        return data


def test_what_is_long_before_its_data_is_not_even_read(tmp_path: Path) -> None:
    long = Counted(archive(({"kind": "folder", "name": "in", "more": "x" * HEADER}, b"")).getvalue())
    with pytest.raises(ValueError, match="no archive of a template: an entry begins with 65"):
        unpack_tree(long, tmp_path)
    assert long.taken == HEAD.size
    assert list(tmp_path.iterdir()) == []


def test_what_stands_before_the_data_counts(tmp_path: Path) -> None:
    padded = archive(({"kind": "folder", "name": "in", "more": "x" * 5 * BLOCK}, b""))
    with pytest.raises(TooLargeError):
        unpack_tree(padded, tmp_path, max_bytes=5 * BLOCK)
    padded.seek(0)
    assert unpack_tree(padded, tmp_path, max_bytes=6 * BLOCK) == 6 * BLOCK


def test_the_longest_names_are_taken(tmp_path: Path) -> None:
    to = "/".join(["\udce9" * 255] * 15)
    named = archive(link("\udce9" * 255, to))
    unpack_tree(named, tmp_path)
    assert [os.readlink(path) for path in tmp_path.iterdir()] == [to]


def entries(archive: bytes) -> Iterator[tuple[str, str, bytes]]:
    stream = io.BytesIO(archive)
    while head := stream.read(HEAD.size):
        size, data_size = HEAD.unpack(head)
        entry = json.loads(stream.read(size))
        yield entry["kind"], entry["name"], stream.read(data_size)


def test_modules_go_with_byte_code_that_a_copy_can_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "carried_away"
    package.mkdir()
    for name in ("__init__", "current", "changed"):
        (package / f"{name}.py").write_text("import sys\nanswer = 41\n")
        py_compile.compile(str(package / f"{name}.py"), doraise=True)
    (package / "changed.py").write_text("import sys\nanswer = 42, and another length\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = list(entries(pack_modules(["carried_away"])))
    tag = sys.implementation.cache_tag
    code = sorted(name for _, name, _ in found if name.endswith(".pyc"))
    assert code == [f"carried_away/__pycache__/{name}.{tag}.pyc" for name in ("__init__", "current")]
    copy = tmp_path / "copy"
    for kind, name, data in found:
        if kind == "folder":
            (copy / name).mkdir(parents=True)
        else:
            (copy / name).write_bytes(data)
    os.utime(copy / "carried_away" / "current.py", (0, 0))
    shown = subprocess.run(
        [sys.executable, "-v", "-c", "import carried_away.current as it; print(it.answer)"],
        cwd=copy, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert shown.stdout == "41\n"
    assert f"code object from '{copy}/carried_away/__pycache__/current.{tag}.pyc'" in shown.stderr


def test_what_cannot_be_imported_cannot_be_carried() -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.carry names 'there_is_none'"):
        pack_modules(["there_is_none"])
