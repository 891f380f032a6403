"""`turnstile lab`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from turnstile.build.kinds import bind
from turnstile.cli.bars import bars
from turnstile.config import make_recipe
from turnstile.errors import ConfigError
from turnstile.evaluation.lab.figures import draw_study, to_png
from turnstile.evaluation.lab.measure import Subject
from turnstile.evaluation.lab.processes import PROCESSES, make
from turnstile.evaluation.lab.study import Line, Setting, study
from turnstile.evaluation.lab.subjects import declared, everyone, subject
from turnstile.evaluation.lab.table import Grid, details, directions, progress, to_rich

_FEW = 6  # estimators of which every figure is shown
_GIVEN = ("groups", "scores", "aux", "state")


@click.command(short_help="Hold estimators against processes whose exact gradient is known.")
@click.argument("estimators", nargs=-1, metavar="[ESTIMATOR [KNOB=VALUE]...]...")
@click.option("--process", "processes", multiple=True, help="A process of the lab, again for more; default: all.")
@click.option("--size", default=8, show_default=True, type=click.IntRange(min=2), help="Attempts of a group.")
@click.option("--groups", default=256, show_default=True, type=click.IntRange(min=32), help="Groups drawn.")
@click.option("--seed", default=0, show_default=True, help="Of the policy and of what is drawn.")
@click.option("--details", "all_details", is_flag=True, help=f"Every figure, also of more than {_FEW} estimators.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Keep the figures and plots here.")
def lab(
    estimators: tuple[str, ...],
    processes: tuple[str, ...],
    size: int,
    groups: int,
    seed: int,
    all_details: bool,
    out: Path | None,
) -> None:
    """Measures bias and noise of ESTIMATORs on small decision processes; by default of all, with all declared knobs.

    An ESTIMATOR is a kind of a recipe's [credit], or any package.module:function of the same shape; knobs follow it,
    as in: turnstile lab grpo scale=none rloo. The last column says which invariants of a training signal it breaks.
    """
    subjects = read_subjects(estimators)
    settings = [
        Setting(process=make(name), size=size, groups=groups, seed=seed) for name in processes or tuple(PROCESSES)
    ]
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 132
    with bars(console) as shown:
        bar = shown.add_task("measuring", total=len(subjects) * len(settings))
        lines = study(subjects, settings, lambda line: shown.update(bar, advance=1))
    for grid in grids(lines, all_details or len(subjects) <= _FEW):
        console.print(to_rich(grid))
    print_notes(console, lines, subjects)
    if out is not None:
        keep(out, lines)
        console.print(Text(f"kept in {out}"))


def read_subjects(words: Sequence[str]) -> list[Subject]:
    """Estimators from the words of a command line: a name with the knobs behind it, all declared ones where there are
    none, and everything there is without any word. Raises ConfigError for what cannot be read."""
    if not words:
        return everyone()
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if "=" not in word:
            found.append((word, []))
        elif found:
            found[-1][1].append(word)
        else:
            raise ConfigError(f"{word!r} is a knob without an estimator; write the estimator before it")
    subjects = []
    for name, knobs in found:
        if not knobs:
            subjects += declared(name)
            continue
        section = make_recipe({"credit": {"kind": name}}, [f"credit.{knob}" for knob in knobs]).credit
        bind("credit", section, given=_GIVEN)
        subjects.append(subject(name, section.knobs))
    return subjects


def grids(lines: Sequence[Line], every: bool) -> list[Grid]:
    """The tables of these lines: two of all processes, and one for each where `every` figure is wanted."""
    processes = list(dict.fromkeys(line.process for line in lines))
    found = [details(lines, process) for process in processes] if every else []
    return found if every and len(processes) == 1 else [*found, directions(lines), progress(lines)]


def print_notes(console: Console, lines: Sequence[Line], subjects: Sequence[Subject]) -> None:
    """What the tables' columns are, what could not be measured, and which invariants are broken."""
    for note in dict.fromkeys(grid.note for grid in grids(lines, len(subjects) <= _FEW)):
        console.print(Text(note, style="dim"))
    for refused in dict.fromkeys(f"{line.estimator}: {line.refused}" for line in lines if line.refused):
        console.print(Text(f"not measured: {refused}"))
    for each in subjects:
        for number, seen in each.broken.items() if len(subjects) <= _FEW else ():
            console.print(Text(f"{each.label} breaks invariant {number}: {seen}"))


def keep(out: Path, lines: Sequence[Line]) -> None:
    """Writes lab.json and lab.png."""
    out.mkdir(parents=True, exist_ok=True)
    body = {"lines": [line.to_json() for line in lines]}
    (out / "lab.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    (out / "lab.png").write_bytes(to_png(draw_study(lines)))
