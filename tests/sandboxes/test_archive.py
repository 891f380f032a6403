from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from turnstile.sandboxes.archive import add, pack_tree, unpack_tree

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
