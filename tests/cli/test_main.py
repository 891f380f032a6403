from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from turnstile import __version__
from turnstile.cli import main
from turnstile.cli.main import COMMANDS
from turnstile.cli.main import cli as root
from turnstile.envs.guess import guess_tasks
from turnstile.errors import CheckpointError, ConfigError, TurnstileError
from turnstile.tasks.base import write_tasks

Cli = Callable[..., Any]


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Puts a command `broken` beside the others that raises `error`."""

    @click.command()
    def broken() -> None:
        raise error

    monkeypatch.setattr(main, "broken", broken, raising=False)
    monkeypatch.setitem(root.lazy, "broken", ("turnstile.cli.main:broken", "Fails."))  # type: ignore[arg-type]


def test_help_names_every_command(cli: Cli) -> None:
    done = cli("--help")
    assert done.code == 0
    for name, (_, line) in COMMANDS.items():
        assert name in done.out
        assert line in done.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_of_its_own(cli: Cli, name: str) -> None:
    done = cli(name, "--help")
    assert (done.code, done.err) == (0, "")
    assert f"Usage: turnstile {name}" in done.out


def test_version(cli: Cli) -> None:
    assert cli("--version").out == f"turnstile {__version__}\n"


def test_an_unknown_command_names_the_nearest(cli: Cli) -> None:
    done = cli("tran")
    assert done.code == 2
    assert done.error == "error: no such command 'tran'; did you mean 'train'?; see: turnstile --help"


def test_wrong_usage_says_where_to_read(cli: Cli) -> None:
    done = cli("rollout", "show")
    assert done.code == 2
    assert done.error.startswith("error: Missing argument 'RUN'")
    assert done.error.endswith("see: turnstile rollout show --help")


@pytest.mark.parametrize(
    ("error", "code"), [(TurnstileError("it broke"), 1), (ConfigError("it broke"), 2), (CheckpointError("it broke"), 1)]
)
def test_an_error_of_ours_is_one_line_and_its_exit_code(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: TurnstileError, code: int
) -> None:
    failing(monkeypatch, error)
    done = cli("broken")
    assert (done.code, done.out, done.error) == (code, "", "error: it broke")


def test_a_fault_of_the_program_keeps_its_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ZeroDivisionError("a fault"))
    with pytest.raises(ZeroDivisionError):
        cli("broken")


def test_an_interrupt_is_a_line_and_130(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    done = cli("broken")
    assert done.code == 130
    assert done.err.strip().startswith("error: interrupted")


def test_the_installed_command_exits_with_the_code() -> None:
    code = "from turnstile.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "nothing"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")


RECIPE = """
env = { kind = "guess" }
tasks = { train = "tasks.jsonl" }
rewards = { terms = [{ kind = "mine:judge", level = 1 }] }
"""


def test_a_module_of_the_current_folder_can_be_named_in_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def judge(task, trajectory, *, limit: int):\n    return 1.0\n")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    write_tasks(tmp_path / "tasks.jsonl", guess_tasks(2, seed=1))
    command = [sys.executable, "-P", "-m", "turnstile", "train", "recipe.toml"]  # -P: Python itself does not look here
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "limit" in done.stderr


def test_ends_although_a_thread_hangs(tmp_path: Path) -> None:
    """As a tool does that was given up on: the interpreter would wait for it."""
    (tmp_path / "hung.py").write_text(HUNG)
    done = subprocess.run([sys.executable, "hung.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.startswith("turnstile")) == (0, True), done.stderr


HUNG = """
import sys, threading, time
from turnstile.cli.main import main

threading.Thread(target=time.sleep, args=(1000,)).start()
sys.argv = ["turnstile", "--version"]
main()
"""
