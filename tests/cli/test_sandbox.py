from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dockerd import IMAGE, Dockerd
from served import served
from turnstile.cli.sandbox import find_token
from turnstile.sandboxes import folder
from turnstile.sandboxes.owner import PID, STARTED, owner_labels

Cli = Callable[..., Any]


def test_a_sound_kind_is_told_so(cli: Cli) -> None:
    done = cli("sandbox", "check", "local", "workers=1")
    assert (done.code, done.err) == (0, "")
    assert done.out == "sandbox kind 'local' does what a sandbox must do\n"


def test_a_kind_that_breaks_its_promises_is_an_error(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "leaky.py").write_text(
        "from turnstile.sandboxes.local import LocalSandboxes\n\n\n"
        "class Leaky(LocalSandboxes):\n"
        "    async def start(self, template):\n"
        "        sandbox = await super().start(template)\n"
        "        sandbox.root = template\n"
        "        return sandbox\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    done = cli("sandbox", "check", "leaky:Leaky")
    assert done.code == 1
    assert "wrong: files: two sandboxes share files\n" in done.out
    assert "wrong: start: it takes no folder of dependencies (" in done.out
    assert done.error.startswith("error: sandbox kind 'leaky:Leaky' breaks ")


def test_a_container_needs_an_image_and_an_engine(cli: Cli) -> None:
    assert "needs an image" in cli("sandbox", "check", "container").error
    done = cli("sandbox", "check", "container", "image=x", "daemon=unix:///there/is/none.sock")
    assert (done.code, "DOCKER_HOST" in done.error) == (2, True)
    assert cli("sandbox", "prune", "--daemon", "unix:///there/is/none.sock").code == 2


@pytest.mark.slow
def test_what_is_served_elsewhere_is_checked_like_any_other(tmp_path: Path, cli: Cli) -> None:
    with served(tmp_path / "served", "local") as server:
        assert server.log.startswith("sandboxes of kind 'local' are served at http://127.0.0.1:")
        token_file = f"token_file={server.token_file}"
        done = cli("sandbox", "check", "remote", f"url={server.url}", token_file)
        assert (done.code, done.err) == (0, "")
        assert done.out == "sandbox kind 'remote' does what a sandbox must do\n"


def test_a_token_file_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    token, told = find_token(tmp_path / "token")
    assert told == f"token: a new one, written to {tmp_path / 'token'}"
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert find_token(tmp_path / "token") == (token, f"token: that of {tmp_path / 'token'}")
    assert len(token) > 40


def test_where_a_token_comes_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: Cli) -> None:
    monkeypatch.delenv("TURNSTILE_SANDBOX_TOKEN", raising=False)
    assert find_token(None)[1] is None
    done = cli("sandbox", "serve", "local", "--host", "0.0.0.0")
    assert (done.code, "--token-file" in done.error) == (2, True)
    monkeypatch.setenv("TURNSTILE_SANDBOX_TOKEN", "given")
    assert find_token(None) == ("given", "token: that of TURNSTILE_SANDBOX_TOKEN")
    (tmp_path / "empty").write_text("\n")
    assert "is empty" in cli("sandbox", "serve", "local", "--token-file", str(tmp_path / "empty")).error


def test_what_cannot_be_served(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setenv("TURNSTILE_SANDBOX_TOKEN", "given")
    assert "needs an image" in cli("sandbox", "serve", "container", "--port", "0").error
    assert "no knob 'wrokers'; did you mean 'workers'?" in cli("sandbox", "serve", "local", "wrokers=1").error
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = cli("sandbox", "serve", "local", "--port", str(taken.getsockname()[1]))
    assert (done.code, "cannot listen at 127.0.0.1:" in done.error) == (2, True)


def test_prune_removes_what_killed_runs_left(
    cli: Cli, engine: Dockerd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("turnstile.cli.sandbox.default_parent", lambda: tmp_path)
    home = tmp_path / f"{folder.PREFIX}left"
    home.mkdir()
    (home / "lock").touch()
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with engine.client() as client:

        def container(labels: dict[str, str]) -> str:
            made: str = client.create_container(image=IMAGE, command=["true"], labels=labels)["Id"]
            return made

        mine = container(owner_labels())
        container({**owner_labels(), PID: str(child.pid), STARTED: "long ago"})
        strangers = container({"whose": "somebody's"})
        done = cli("sandbox", "prune", "--daemon", engine.address)
        assert done.out.splitlines() == [
            "folders of local sandboxes: 1 removed",
            "containers: 1 removed, 0 snapshots, 0 volumes",
        ]
        assert sorted(engine.containers()) == sorted([mine, strangers])
        cli("sandbox", "prune", "--daemon", engine.address, "--all")
        assert engine.containers() == [strangers]
        client.remove_container(strangers)
    assert os.listdir(tmp_path) == []


def test_images_are_made_listed_and_removed(
    cli: Cli, engine: Dockerd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("turnstile.cli.sandbox.default_parent", lambda: tmp_path / "none")
    monkeypatch.setenv("TURNSTILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCKER_HOST", engine.address)
    source = tmp_path / "tiny"
    source.mkdir()
    (source / "pyproject.toml").write_text('[project]\nname = "tiny"\nversion = "1.0"\n')
    (source / "tiny.py").write_text("ten = 10\n")
    (source / "test_tiny.py").write_text("")
    assert cli("sandbox", "image", "list").out == "no image was made here\n"
    done = cli("sandbox", "image", "build", "--image", IMAGE, "--repository", str(source))
    assert done.code == 0, done.err
    name = done.out.strip()
    assert name.startswith("localhost/turnstile/tiny-1-0-")
    assert f"making the image {name}" in done.err.replace("\n", " ")
    assert cli("sandbox", "image", "build", "--image", IMAGE, "--repository", str(source)).err == ""
    assert cli("sandbox", "image", "pull", name).out == f"{name}\n"
    assert name in cli("sandbox", "image", "list").out
    assert "one of three ways" in cli("sandbox", "image", "build").error
    assert cli("sandbox", "prune").out.splitlines()[-1].startswith("containers: 0 removed")
    assert name in cli("sandbox", "image", "list").out
    assert cli("sandbox", "prune", "--images").out.splitlines()[-1] == "images made here: 1 removed"
    assert cli("sandbox", "image", "list").out == "no image was made here\n"


def test_prune_goes_without_an_engine(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("turnstile.cli.sandbox.default_parent", lambda: tmp_path)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    done = cli("sandbox", "prune")
    assert done.code == 0
    assert "containers: not looked for (" in done.out
