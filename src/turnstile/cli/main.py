"""The command `turnstile`. The module of a command is imported when that command runs, so `--help` is quick."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress

import click

from turnstile import __version__
from turnstile.errors import RESUME_HINT, TurnstileError
from turnstile.lookup import nearest

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("turnstile.cli.train:train", "Train a model as a recipe says, or go on with a run."),
    "eval": ("turnstile.cli.evaluate:evaluate", "Evaluate a model, a run or a baseline on held-out tasks."),
    "rollout": ("turnstile.cli.rollout:rollout", "Read the recorded episodes of a run."),
    "audit": ("turnstile.cli.audit:audit", "Account for every attempt of a run, or compare two runs."),
    "tasks": ("turnstile.cli.tasks:tasks", "Make, check, prepare and list task files."),
    "conversations": ("turnstile.cli.conversations:conversations", "Conversations to learn from before RL."),
    "sandbox": ("turnstile.cli.sandbox:sandbox", "Check, serve and prune sandboxes; make images for them."),
    "serve": ("turnstile.cli.serve:serve", "Serve a model over OpenAI's and Anthropic's protocols."),
    "lab": ("turnstile.cli.lab:lab", "Hold estimators and losses against exact gradients."),
    "conform": ("turnstile.cli.conform:conform_command", "Hold any advantage or loss function against the invariants."),
    "config": ("turnstile.cli.config:config", "Print a recipe with every default filled in."),
    "doctor": ("turnstile.cli.doctor:doctor", "Say what this machine can do, and what to mend."),
}
"""name -> (module:command, its line in the help)."""


class LazyGroup(click.Group):
    """A group of commands that are listed in a table and imported only when they are called."""

    def __init__(self, *, lazy: Mapping[str, tuple[str, str]], **knobs: object) -> None:
        super().__init__(**knobs)  # type: ignore[arg-type]
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            raise click.UsageError(f"no such command {cmd_name!r}; {nearest(cmd_name, self.lazy)}", ctx)
        module, _, name = self.lazy[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.lazy.items()])


cli = LazyGroup(
    name="turnstile",
    lazy=COMMANDS,
    help="Train LLM agents with reinforcement learning on tasks of many turns.",
    context_settings={"help_option_names": ["-h", "--help"]},
    params=[
        click.Option(["--version"], is_flag=True, is_eager=True, expose_value=False, callback=lambda *a: _version(*a))
    ],
)


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        click.echo(f"turnstile {__version__}")
        ctx.exit()


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. An expected error is printed as one line on standard error."""
    try:
        code = cli.main(list(arguments), prog_name="turnstile", standalone_mode=False)
    except TurnstileError as error:
        return _fail(str(error), error.exit_code)
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "turnstile"
        return _fail(f"{error.format_message()}; see: {where} --help", error.exit_code)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except click.Abort:  # click's exception for Ctrl-C
        return _fail(f"interrupted; {RESUME_HINT}", 130)
    return code if isinstance(code, int) else 0


def _fail(line: str, code: int) -> int:
    click.echo(f"error: {line}", err=True)
    return code


def main() -> None:
    """Run the command, and end the process with the command's exit code."""
    sys.path.append(os.getcwd())  # so that a recipe can name functions of modules in the current folder
    try:
        code = run(sys.argv[1:])
    except Exception:  # a bug in this program
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    with suppress(BrokenPipeError):  # the reader of the output has gone, as with `head`
        sys.stdout.flush()
    os._exit(code)  # `sys.exit` would wait for threads, such as one in which a tool hangs
