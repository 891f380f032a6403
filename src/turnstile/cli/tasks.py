"""The command `turnstile tasks`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from turnstile.cli.bars import bars
from turnstile.cli.main import LazyGroup
from turnstile.errors import ConfigError, TaskError
from turnstile.swe.bug import ENV
from turnstile.swe.bugs.candidates import DEMO_FILTER, Filter
from turnstile.swe.bugs.make import Progress
from turnstile.swe.bugs.make import make as make_tasks
from turnstile.swe.bugs.mutate import KINDS, TOKEN_KINDS
from turnstile.swe.split import by_function, by_package, shuffle_tasks
from turnstile.swe.try_tasks import Step, Tried, try_tasks
from turnstile.tasks.base import load_tasks, write_tasks

tasks = LazyGroup(
    name="tasks",
    lazy={
        "make": ("turnstile.cli.tasks:make", "Make bugs in a package, and keep those that its tests notice."),
        "describe": ("turnstile.cli.describe:describe", "Let a model word the problem statements of FILE's tasks."),
        "check": ("turnstile.cli.check:check", "Check that the rewards of FILE's tasks mean what they say."),
        "prepare": ("turnstile.cli.tasks:prepare", "Fetch the packages of FILES, and try a sample of their tasks."),
        "split": ("turnstile.cli.tasks:split", "Split FILE into training and held-out tasks."),
        "import": ("turnstile.cli.instances:import_instances", "Read the instances of a data set into one form."),
        "export": ("turnstile.cli.instances:export_tasks", "Write tasks or instances as Harbor task folders."),
        "list": ("turnstile.cli.tasks:list_tasks", "Count the tasks of FILE by package and kind of bug."),
    },
    help="Task files are JSON lines: one task a line.",
    short_help="Make, check, prepare and list task files.",
)


@click.command()
@click.argument("source")
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The task file to add to.")
@click.option(
    "-n", "--number", default=50, show_default=True, type=click.IntRange(min=1), help="Tasks of this package."
)
@click.option("--seed", default=0, show_default=True)
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    type=click.Choice(KINDS),
    help="Bugs of this kind only; repeatable. Default: all; with --small, those of one token.",
)
@click.option("--small", is_flag=True, help="Only bugs that a small model can be shown whole.")
@click.option(
    "--per-function", default=4, show_default=True, type=click.IntRange(min=1), help="At most so many a function."
)
@click.option("--workers", default=2, show_default=True, type=click.IntRange(min=1), help="Test runs at once.")
@click.option(
    "--runs",
    default=2,
    show_default=True,
    type=click.IntRange(min=2),
    help="Runs of the whole suite in which a test must pass to count.",
)
@click.option(
    "--suite-seconds", default=300.0, show_default=True, type=click.FloatRange(min=1), help="Limit of one such run."
)
@click.option("--extra", multiple=True, help="A requirement of the tests that the package does not name; repeatable.")
def make(
    source: str,
    out: Path,
    number: int,
    seed: int,
    kinds: tuple[str, ...],
    small: bool,
    per_function: int,
    workers: int,
    extra: tuple[str, ...],
    runs: int,
    suite_seconds: float,
) -> None:
    """Make bugs in a package and keep those that its tests detect.

    SOURCE is a package of the index (pypi:toolz==1.2.0), a folder (./toolz) or a commit of a git repository
    (git+file:///work/toolz@v1.2.0). After an interruption the command continues where it stopped.
    """
    base = DEMO_FILTER if small else Filter()
    wanted = Filter(
        max_line=base.max_line,
        max_shown=base.max_shown,
        unique=base.unique,
        kinds=kinds or (TOKEN_KINDS if small else KINDS),
    )
    console = Console(highlight=False)
    with bars(console) as shown:
        view = _MakeView(shown, number)
        made = asyncio.run(
            make_tasks(
                source,
                out,
                number,
                seed,
                wanted=wanted,
                per_function=per_function,
                workers=workers,
                extra=extra,
                runs=runs,
                suite_seconds=suite_seconds,
                progress=view,
            )
        )
    console.print(Text(f"{out}: {len(made.tasks)} tasks of {source}, {made.added} of them new"))
    for why, count in sorted(made.rejected.items(), key=lambda item: -item[1]):
        console.print(Text(f"  {count} candidates rejected: {why}"))
    if made.undecided:
        console.print(Text(f"  {made.undecided} candidates without a verdict: the same command tries them again"))
    if made.exhausted:
        console.print(
            Text(f"  no candidates are left: this package gives {len(made.tasks)} tasks of the kind asked for")
        )


class _MakeView:
    """A display of the progress of one task file: a line for each stage, and a bar of the valid tasks."""

    def __init__(self, bars: Bars, wanted: int) -> None:
        self._bars = bars
        self._bar = bars.add_task("starting", total=wanted)
        self._stage = ""

    def __call__(self, report: Progress) -> None:
        if report.message:
            self._bars.console.print(Text(f"{report.package}: {report.message}"))
        label = f"{report.stage} {report.package}"
        if report.stage == "validate":
            label += f" ({report.judged} of {report.candidates} candidates judged)"
        if not self._bars.console.is_terminal and report.stage != self._stage:
            self._bars.console.print(Text(f"{report.package}: {report.stage}"))
        self._stage = report.stage
        self._bars.update(self._bar, description=label, completed=report.valid)


@click.command()
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--sample", default=1, show_default=True, type=click.IntRange(min=0), help="Tasks of each package to try out."
)
@click.option("--all", "every", is_flag=True, help="Try out every task.")
@click.option("--workers", default=2, show_default=True, type=click.IntRange(min=1), help="Test runs at once.")
def prepare(files: tuple[str, ...], sample: int, every: bool, workers: int) -> None:
    """Fetch the packages that the tasks of FILES need, and validate a sample of these tasks.

    Afterwards training needs no network. A task is sound if its tests fail with its bug and pass without it; sound
    tasks are not validated again until something changes. Unsound tasks are listed. It is an error if all sampled tasks
    of a package are unsound, or if the package cannot be fetched.
    """
    found = [task for file in files for task in load_tasks(file) if task.env == ENV]
    console = Console(highlight=False)
    with bars(console) as shown:
        bar = shown.add_task("packages", total=None)

        def show(step: Step) -> None:
            shown.update(bar, description=f"{step.stage} {step.item}", total=step.total, completed=step.done)

        checked = asyncio.run(try_tasks(found, sample=None if every else sample, workers=workers, progress=show))
    for one in checked:
        package = one.package
        console.print(Text(f"{package.spec}: {len(package.tests)} test files, licence {package.licence}"))
    ready = _many(len(checked), "package is ready", "packages are ready")
    console.print(Text(ready + _verdict_text(checked)))
    for one in checked:
        for off in one.off:
            click.echo(f"warning: task {off.task.id}: {off.why}", err=True)
        if one.unknown is not None:
            click.echo(f"warning: tasks of {one.package.spec} could not be tried out: {one.unknown}", err=True)
    unknown = [one.unknown for one in checked if one.unknown is not None]
    if len(unknown) == len(checked) and unknown:
        raise TaskError(f"no task could be tried out: {unknown[0]}; see turnstile doctor, or go without: --sample 0")
    broken = [one.package.spec for one in checked if not one.usable]
    if broken:
        raise TaskError(
            f"{', '.join(broken)}: every task that was tried is off here; make the tasks again on this machine "
            f"(turnstile tasks make {broken[0]} --out FILE), or leave the package out with tasks.where in the recipe"
        )
    if any(one.off for one in checked):
        click.echo("a task that is off can never be solved: remove its line from the file, or make it again", err=True)


def _verdict_text(checked: Sequence[Tried]) -> str:
    """Return the end of a sentence that says how many tasks were tried and how they behaved, or "" if none was."""
    sound = sum(len(one.sound) for one in checked)
    off = sum(len(one.off) for one in checked)
    if not sound + off:
        return ""
    tried = _many(sound + off, "task was tried", "tasks were tried")
    if not off:
        return f"; {tried}: {'it fails' if sound == 1 else 'each fails'} with its bug and passes without"
    return (
        f"; {tried}: {_many(sound, 'is as it should be', 'are as they should be')}, {_many(off, 'is not', 'are not')}"
    )


def _many(count: int, one: str, more: str) -> str:
    return f"{count} {one if count == 1 else more}"


@click.command()
@click.argument("file")
@click.option("--train", "train_file", required=True, help="Where the training tasks go.")
@click.option("--heldout", "heldout_file", required=True, help="Where the held-out tasks go.")
@click.option("--package", "packages", multiple=True, help="Hold out this whole package; repeatable.")
@click.option("--share", type=click.FloatRange(0, 1), help="Hold out about this share of the functions.")
@click.option("--seed", default=0, show_default=True)
def split(
    file: str, train_file: str, heldout_file: str, packages: tuple[str, ...], share: float | None, seed: int
) -> None:
    """Split FILE into training and held-out tasks that have no package, or no function, in common.

    Each half is shuffled with the seed, so that its first N tasks are a fair sample of it.
    """
    if bool(packages) == (share is not None):
        raise ConfigError("say what to hold out: either --package (one or more) or --share")
    found = load_tasks(file)
    halves = by_function(found, share, seed) if share is not None else by_package(found, packages, seed)
    for name, path, half in zip(("train", "held out"), (train_file, heldout_file), halves, strict=True):
        if not half:
            raise TaskError(f"{file}: no task is left to be {'trained on' if name == 'train' else 'held out'}")
        click.echo(f"{name}: {write_tasks(path, shuffle_tasks(half, seed))} tasks in {path}")


@click.command("list")
@click.argument("file")
@click.option("--ids", is_flag=True, help="One task a line instead of counts.")
def list_tasks(file: str, ids: bool) -> None:
    """Count the tasks of FILE by package and kind of bug."""
    found = load_tasks(file)
    if ids:
        for task in found:
            click.echo(task.id)
        return
    counts = Counter((_of(task.data, "package", task.env), _of(task.data, "kind", "-")) for task in found)
    kinds = sorted({kind for _, kind in counts})
    table = Table(title=f"{len(found)} tasks", title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("package", no_wrap=True)
    for kind in (*kinds, "all"):
        table.add_column(kind, justify="right", no_wrap=True)
    for package in dict.fromkeys(package for package, _ in counts):
        row = [counts[package, kind] for kind in kinds]
        table.add_row(Text(package), *(str(count or "") for count in row), str(sum(row)))
    Console(highlight=False).print(table)


def _of(data: object, key: str, other: str) -> str:
    return str(data[key]) if isinstance(data, dict) and key in data else other
