from __future__ import annotations

import io
import json
import os
import py_compile
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnstile.errors import ConfigError
from turnstile.sandboxes.archive import pack_modules
from turnstile.sandboxes.runner import HEAD


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
