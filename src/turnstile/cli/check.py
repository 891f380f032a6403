"""The command `turnstile tasks check`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnstile.cli.bars import bars
from turnstile.cli.sandbox import section_of
from turnstile.config import Kind
from turnstile.errors import ConfigError
from turnstile.runs.task_validation import CONTAINER, IMAGES, LOCAL, check_tasks
from turnstile.swe.bug import ENV
from turnstile.swe.formats.instance import INSTANCE
from turnstile.swe.grading.findings import CheckedTask
from turnstile.swe.problems.problems import REPOSITORY
from turnstile.tasks.base import load_tasks, write_tasks
from turnstile.types import Task

_SHOWN = 20  # failing tasks that are named


@click.command()
@click.argument("file")
@click.argument("knobs", nargs=-1, metavar="[KNOB=VALUE]...")
@click.option("--repeats", default=2, show_default=True, type=click.IntRange(min=1), help="Gradings of each task.")
@click.option(
    "--probes",
    "probed",
    default=2,
    show_default=True,
    type=click.IntRange(min=0),
    help="Tasks of each package on which cheats are tried, and the random agent.",
)
@click.option("--all-probes", is_flag=True, help="Try cheats, and the random agent, on every task.")
@click.option("--keep", type=click.Path(dir_okay=False, path_type=Path), help="Write the tasks that passed here.")
@click.option("--sandbox", help="The kind of sandbox; default: local for made tasks, container for instances.")
@click.option("--workers", default=2, show_default=True, type=click.IntRange(min=1), help="Test runs at once.")
@click.option("--again", is_flag=True, help="Check also what an earlier check has found out.")
def check(
    file: str,
    knobs: tuple[str, ...],
    repeats: int,
    probed: int,
    all_probes: bool,
    keep: Path | None,
    sandbox: str | None,
    workers: int,
    again: bool,
) -> int:
    """Check that the rewards of FILE's repository tasks measure what they claim.

    The repair must score 1 and no change 0, every time. Cheats must score 0: edited tests, a conftest file, a patched
    runner, a report written early, and others. A random agent plays the tasks too. For a task without a repair, the
    tests must run; such a task counts as unproven if it passes. Results are stored for each task: after an interruption
    the command continues where it stopped, and turnstile train refuses tasks that failed. The exit code is 1 if a task
    failed or could not be checked.

    Knobs are those of --sandbox, as in: --sandbox container image=python:3.12 pool.most=8. Instances run in containers
    of their own images, as root; the knobs also apply to them if --sandbox is container or remote, or if FILE holds
    only instances. If FILE holds made tasks and instances, knobs require --sandbox.
    """
    found = load_tasks(file)
    made_in, instances_in = sections(found, sandbox, knobs)
    console = Console(highlight=False)
    with bars(console) as shown:
        bar = shown.add_task("checking", total=sum(task.env in REPOSITORY for task in found))
        remembered = 0

        def done(one: CheckedTask) -> None:
            nonlocal remembered
            if one.remembered:  # these come first and at once, so they say nothing about the time left
                remembered += 1
                shown.reset(bar, completed=remembered)
            else:
                shown.update(bar, advance=1)

        checked = check_tasks(
            found,
            repeats=repeats,
            probed=None if all_probes else probed,
            sandbox=made_in,
            containers=instances_in,
            workers=workers,
            again=again,
            done=done,
        )
    print_checked(console, file, checked)
    bad = {one.task.id for one in checked if one.why or one.unknown}
    if keep is not None:
        kept = [task for task in found if task.id not in bad]
        console.print(Text(f"{keep}: {write_tasks(keep, kept)} tasks"))
    return 1 if bad else 0


def sections(tasks: Sequence[Task], sandbox: str | None, knobs: Sequence[str]) -> tuple[Kind, Kind | None]:
    """Return the sandbox section for made tasks and that for instances (None: the default).

    Raises ConfigError if it is ambiguous which of them the knobs belong to.
    """
    made, instances = (any(task.env == env for task in tasks) for env in (ENV, INSTANCE))
    if knobs and sandbox is None and made and instances:
        raise ConfigError(
            "the file holds made tasks, which are checked in local sandboxes, and instances, which are in containers: "
            "say whose the knobs are, with --sandbox container for both or --sandbox local for made tasks"
        )
    kind = sandbox or (CONTAINER if instances and not made else LOCAL.kind)
    section = section_of(kind, knobs)
    if knobs and instances and not made and kind not in IMAGES:
        raise ConfigError(f"instances are checked in containers, which do not take the knobs of {kind!r}")
    return section, section if kind in IMAGES else None


def print_checked(console: Console, file: str, found: Sequence[CheckedTask]) -> None:
    """Print one line for each package, then the failures.

    A line has the mean scores of the repair, of no change and of the random agent, the number of cheats tried and of
    those that won, and how many tasks passed without a known repair.
    """
    cheats = list(dict.fromkeys(name for one in found for name in one.tried))
    piles: dict[str, list[CheckedTask]] = {}
    for one in found:
        piles.setdefault(one.pile, []).append(one)
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("package", no_wrap=True)
    for column in ("tasks", "gold", "empty", "flaky", "killed", "random", "cheats", "won", "unproven"):
        table.add_column(column, justify="right", no_wrap=True)
    for package, pile in piles.items():
        tried = sum(len(one.tried) for one in pile)
        table.add_row(
            Text(package),
            str(len(pile)),
            _mean([score for one in pile for score in one.gold]),
            _mean([score for one in pile for score in one.empty]),
            str(sum(bool(one.flaky) for one in pile)),
            str(sum(one.killed for one in pile)),
            _mean([one.random for one in pile if one.random is not None]),
            str(tried) if tried else "-",
            str(sum(len(one.wins) for one in pile)) if tried else "-",
            str(sum(one.unproven for one in pile)),
        )
    console.print(table)
    if cheats:
        console.print(Text(f"cheats: {', '.join(cheats)}"))
    failed = [one for one in found if one.why is not None]
    unknown = [one for one in found if one.unknown is not None]
    for one in (*failed, *unknown)[:_SHOWN]:
        console.print(Text(f"{'failed' if one.why else 'unknown'}: {one.task.id}: {one.why or one.unknown}"))
    if len(failed) + len(unknown) > _SHOWN:
        console.print(Text(f"and {len(failed) + len(unknown) - _SHOWN} more"))
    passed = len(found) - len(failed) - len(unknown)
    line = f"{file}: {passed} of {len(found)} tasks passed"
    before = sum(one.remembered for one in found)
    line += f", {before} of them by what was found before" if before else ""
    unproven = sum(one.unproven for one in found)
    line += f", {unproven} of them without a known repair" if unproven else ""
    console.print(Text(line + (f", {len(unknown)} could not be checked" if unknown else "")))


def _mean(scores: Sequence[float]) -> str:
    return f"{sum(scores) / len(scores):.2f}" if scores else "-"
