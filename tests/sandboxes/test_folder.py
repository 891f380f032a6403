from __future__ import annotations

import errno
import logging
import os
import py_compile
import subprocess
import sys
import time
from pathlib import Path

import pytest

from turnstile.errors import SandboxError
from turnstile.sandboxes import folder as module
from turnstile.sandboxes.folder import PREFIX, Home, copy_tree, read_inside, remove_tree, sweep, write_inside


def test_a_copy_holds_files_modes_and_inner_links_only(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a" / "b").mkdir(parents=True)
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_text("secret")
    (source / "a" / "b" / "script").write_text("x")
    (source / "a" / "b" / "script").chmod(0o750)
    (source / "inner").symlink_to("a/b/script")
    (source / "outer").symlink_to("../secret")
    (source / "absolute").symlink_to(source / "a" / "b" / "script")
    os.mkfifo(source / "pipe")
    copy_tree(source, tmp_path / "copy")
    found = sorted(path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*"))
    assert found == ["a", "a/b", "a/b/script", "inner"]
    assert (tmp_path / "copy" / "a" / "b" / "script").stat().st_mode & 0o777 == 0o750
    assert os.readlink(tmp_path / "copy" / "inner") == "a/b/script"


def test_only_byte_code_checked_by_hash_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name, mode in (
        ("timed", py_compile.PycInvalidationMode.TIMESTAMP),
        ("hashed", py_compile.PycInvalidationMode.CHECKED_HASH),
        ("trusted", py_compile.PycInvalidationMode.UNCHECKED_HASH),
    ):
        (source / f"{name}.py").write_text("")
        py_compile.compile(str(source / f"{name}.py"), invalidation_mode=mode)
    copy_tree(source, tmp_path / "copy")
    assert [path.name.split(".")[0] for path in (tmp_path / "copy").rglob("*.pyc")] == ["hashed"]


def test_a_missing_template_is_said(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="no template folder"):
        copy_tree(tmp_path / "none", tmp_path / "copy")


def test_reading_a_pipe_does_not_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no plain file"):
        read_inside(tmp_path, "pipe")


def test_a_write_never_goes_through_a_link(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.write_text("kept")
    os.link(outside, root / "hard")
    write_inside(root, "hard", b"new")
    assert outside.read_text() == "kept"
    assert read_inside(root, "hard") == b"new"
    (root / "soft").symlink_to(outside)
    with pytest.raises(ValueError, match="leaves the sandbox"):
        write_inside(root, "soft", b"new")


def test_a_write_keeps_the_mode(tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("old")
    (tmp_path / "tool").chmod(0o755)
    write_inside(tmp_path, "tool", b"new")
    assert (tmp_path / "tool").stat().st_mode & 0o777 == 0o755


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_machine_is_infrastructure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_text("x")
    home = Home(tmp_path / "home")
    monkeypatch.setattr(module, "copy_file", full)
    with pytest.raises(SandboxError, match=r"cannot write to .*copy: No space left on device; make room"):
        copy_tree(tmp_path / "source", tmp_path / "copy")
    monkeypatch.setattr(module.tempfile, "mkstemp", full)
    with pytest.raises(SandboxError, match="No space left"):
        write_inside(tmp_path, "a/b", b"new")
    monkeypatch.setattr(module.Path, "mkdir", full)
    with pytest.raises(SandboxError, match="No space left"):
        home.new_sandbox()
    home.remove()


def test_what_an_agent_made_impossible_stays_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError):
        write_inside(tmp_path, "file/inner", b"new")


def test_a_locked_tree_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "tree"
    (folder / "locked").mkdir(parents=True)
    (folder / "locked" / "file").write_text("x")
    (folder / "locked").chmod(0)
    remove_tree(folder)
    assert not folder.exists()


def test_leavings_of_a_killed_process_are_swept_and_those_of_a_living_one_are_not(tmp_path: Path) -> None:
    alive = Home(tmp_path)
    code = "import os, sys; from pathlib import Path; from turnstile.sandboxes.folder import Home\n"
    code += "home = Home(Path(sys.argv[1])); home.new_sandbox(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert len(list(tmp_path.glob(PREFIX + "*"))) == 2
    assert sweep(tmp_path) == 1
    assert list(tmp_path.glob(PREFIX + "*")) == [alive.path]
    alive.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_swept_stops_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a file of that name nor leavings on a machine that does not let go of them."""
    (tmp_path / f"{PREFIX}file").write_text("no home")
    for name in ("stuck", "other"):
        (tmp_path / f"{PREFIX}{name}").mkdir()
        (tmp_path / f"{PREFIX}{name}" / "lock").touch()

    def stuck(folder: Path) -> None:
        if folder.name.endswith("stuck"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        remove_tree(folder)

    monkeypatch.setattr(module, "remove_tree", stuck)
    with caplog.at_level(logging.WARNING):
        home = Home(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path != home.path) == [f"{PREFIX}file", f"{PREFIX}stuck"]
    assert f"{PREFIX}stuck, left by a process that is no more, cannot be removed" in caplog.text
    assert f"{PREFIX}file" not in caplog.text
    home.remove()


@pytest.mark.parametrize("call", ["io.open", "fcntl.flock", "os.rename"])
def test_what_a_process_left_that_was_killed_while_making_its_home_is_swept_in_time(tmp_path: Path, call: str) -> None:
    """Killed where it would make its lock, take it, or give it its name."""
    code = "import os, sys, fcntl, io; from pathlib import Path; from turnstile.sandboxes.folder import Home\n"
    code += f"{call} = lambda *_, **__: os.kill(os.getpid(), 9)\n"
    code += "Home(Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -9
    (left,) = tmp_path.glob(PREFIX + "*")
    assert not (left / "lock").exists()
    assert sweep(tmp_path) == 0  # it might be in the making
    an_hour_ago = time.time() - 3600
    os.utime(left, (an_hour_ago, an_hour_ago))
    assert sweep(tmp_path) == 1
    assert not left.exists()
