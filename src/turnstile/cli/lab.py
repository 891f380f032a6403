"""The command `turnstile lab`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from rich.console import Console
from rich.text import Text

from turnstile.cli.bars import bars
from turnstile.config import Kind, make_recipe
from turnstile.credit.base import GIVEN
from turnstile.errors import ConfigError
from turnstile.lab.curves import Plan, race
from turnstile.lab.figures import draw_study, to_png
from turnstile.lab.loss_study import (
    DRIFTS,
    GAPS,
    every_factor,
    factor_subject,
    multiplier_subjects,
    study_factors,
    study_losses,
)
from turnstile.lab.losses import LossSubject, declared_losses, every_loss, loss_subject
from turnstile.lab.measure import Subject
from turnstile.lab.processes import PROCESSES, make
from turnstile.lab.study import Line, Setting, study
from turnstile.lab.subjects import declared_subjects, everyone, subject
from turnstile.lab.table import Grid, details, directions, learning, progress, to_rich
from turnstile.lab.world import list_world
from turnstile.wiring.kinds import bind

_FEW = 6  # the largest number of estimators for which every figure is shown
_GIVEN = {"credit": GIVEN, "loss": ("logprobs", "batch"), "loss_multiplier": ("batch",)}
_One = TypeVar("_One")


@click.command(short_help="Measure estimators and losses against exact gradients.")
@click.argument("names", nargs=-1, metavar="[NAME [KNOB=VALUE]...]...")
@click.option("--losses", is_flag=True, help="NAMEs are losses, with leave-one-out advantages, not estimators.")
@click.option("--multipliers", is_flag=True, help="NAMEs are loss multipliers; the sampler differs from the trainer.")
@click.option(
    "--curves", is_flag=True, help="Learn with each estimator, five seeds, instead of measuring its gradient."
)
@click.option("--process", "processes", multiple=True, help="A process of the lab; may be repeated (default: all).")
@click.option("--size", default=8, show_default=True, type=click.IntRange(min=2), help="Attempts of a group.")
@click.option("--groups", default=256, show_default=True, type=click.IntRange(min=32), help="Groups drawn.")
@click.option("--seed", default=0, show_default=True, help="Seed of the policy and of the episodes.")
@click.option("--branched", is_flag=True, help="Half of a group's attempts branch from the others.")
@click.option("--details", "all_details", is_flag=True, help=f"Every figure, also of more than {_FEW} estimators.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Write figures and plots to this folder.")
def lab(
    names: tuple[str, ...],
    losses: bool,
    multipliers: bool,
    curves: bool,
    processes: tuple[str, ...],
    size: int,
    groups: int,
    seed: int,
    branched: bool,
    all_details: bool,
    out: Path | None,
) -> None:
    """Measure the bias and noise of estimators on small decision processes.

    By default all estimators are measured, each with all sets of knobs that it declares. NAME is a kind of a recipe's
    [credit], or any package.module:function of the same form. Its knobs follow it, as in: turnstile lab grpo scale=none
    rloo. With --losses, NAME is a kind of [loss], whose gradient is taken at the policy and after the policy has moved.
    With --multipliers, it is a kind of [[loss_multipliers]], which is compared with plain policy gradient. The last
    column lists the invariants of a training signal that are broken.
    """
    if losses + multipliers + curves + branched > 1:
        raise click.UsageError(
            "--losses, --multipliers, --curves and --branched are different measurements; give one of them"
        )
    settings = [
        Setting(process=make(name), size=size, groups=groups, seed=seed, branched=branched)
        for name in processes or tuple(PROCESSES)
    ]
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 132
    if curves:
        learn_curves(console, _estimators(names), settings, out)
        return
    subjects = _losses(names) if losses else _multipliers(names) if multipliers else _estimators(names)
    drifts = DRIFTS if losses else GAPS if multipliers else (0.0,)
    with bars(console) as shown:
        bar = shown.add_task("measuring", total=len(subjects) * len(settings) * len(drifts))

        def done(line: Line) -> None:
            shown.update(bar, advance=1)

        lines = (
            (study_losses if losses else study_factors)(
                [each for each in subjects if isinstance(each, LossSubject)], settings, done=done
            )
            if losses or multipliers
            else study([each for each in subjects if isinstance(each, Subject)], settings, done)
        )
    every = all_details or len(subjects) <= _FEW
    for grid in grids(lines, every):
        console.print(to_rich(grid))
    print_notes(console, lines, subjects, every)
    if out is not None:
        keep(out, lines)
        console.print(Text(f"kept in {out}"))


def learn_curves(console: Console, subjects: Sequence[Subject], settings: Sequence[Setting], out: Path | None) -> None:
    """Print what each estimator learns, and with `out` save it there as curves.json."""
    with bars(console) as shown:
        bar = shown.add_task("learning", total=len(subjects) * len(settings))
        worlds = [list_world(setting.process) for setting in settings]
        races = race(subjects, worlds, Plan(), done=lambda found: shown.update(bar, advance=1))
    grid = learning(races)
    console.print(to_rich(grid))
    console.print(Text(grid.note, style="dim"))
    for refused in dict.fromkeys(f"{each.estimator}: {each.refused}" for each in races if each.refused):
        console.print(Text(f"not measured: {refused}"))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"races": [each.to_json() for each in races]}, indent=1)
        (out / "curves.json").write_text(text + "\n", encoding="utf-8")
        console.print(Text(f"kept in {out}"))


def read_words(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each name with the knobs that follow it. Raises ConfigError for a knob without a name."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if "=" not in word:
            found.append((word, []))
        elif found:
            found[-1][1].append(word)
        else:
            raise ConfigError(f"{word!r} is a knob without an estimator; write the estimator before it")
    return found


def _estimators(words: Sequence[str]) -> list[Subject]:
    return _read("credit", words, subject, declared_subjects) if words else everyone()


def _losses(words: Sequence[str]) -> list[LossSubject]:
    return _read("loss", words, loss_subject, declared_losses) if words else every_loss()


def _multipliers(words: Sequence[str]) -> list[LossSubject]:
    bare, *_ = found = every_factor()
    return [bare, *_read("loss_multiplier", words, factor_subject, multiplier_subjects)] if words else found


def _read(
    room: Literal["credit", "loss", "loss_multiplier"],
    words: Sequence[str],
    one: Callable[[str, Mapping[str, Any]], _One],
    every: Callable[[str], list[_One]],
) -> list[_One]:
    """Return the subjects that `words` name. A name without knobs stands for all sets of knobs that it declares."""
    found: list[_One] = []
    for name, knobs in read_words(words):
        section = _section(room, name, knobs)
        bind(room, section, given=_GIVEN[room])
        found += [one(name, section.knobs)] if knobs else every(name)
    return found


def _section(room: Literal["credit", "loss", "loss_multiplier"], name: str, knobs: Sequence[str]) -> Kind:
    """Return the recipe section for a name with its knobs."""
    if room == "loss_multiplier":
        return make_recipe(
            {"loss_multipliers": [{"kind": name}]}, [f"loss_multipliers.0.{knob}" for knob in knobs]
        ).loss_multipliers[0]
    found: Kind = getattr(make_recipe({room: {"kind": name}}, [f"{room}.{knob}" for knob in knobs]), room)
    return found


def grids(lines: Sequence[Line], every: bool) -> list[Grid]:
    """Return the tables of `lines`: two over all processes and, with `every`, one more for each process.

    With `every` and a single process, return only the table of that process.
    """
    processes = list(dict.fromkeys(line.column for line in lines))
    found = [details(lines, process) for process in processes] if every else []
    return found if every and len(processes) == 1 else [*found, directions(lines), progress(lines)]


def print_notes(
    console: Console, lines: Sequence[Line], subjects: Sequence[Subject | LossSubject], every: bool
) -> None:
    """Print the notes on the tables, what could not be measured, and with `every` the broken invariants."""
    for note in dict.fromkeys(grid.note for grid in grids(lines, every)):
        console.print(Text(note, style="dim"))
    for refused in dict.fromkeys(f"{line.estimator}: {line.refused}" for line in lines if line.refused):
        console.print(Text(f"not measured: {refused}"))
    for each in subjects:
        for number, seen in each.broken.items() if every else ():
            console.print(Text(f"{each.label} breaks invariant {number}: {seen}"))


def keep(out: Path, lines: Sequence[Line]) -> None:
    """Write `lines` to the folder `out` as lab.json, and their plot as lab.png."""
    out.mkdir(parents=True, exist_ok=True)
    body = {"lines": [line.to_json() for line in lines]}
    (out / "lab.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    (out / "lab.png").write_bytes(to_png(draw_study(lines)))
