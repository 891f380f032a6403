"""A table of policies and their rates, with paired differences, for the terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import isnan

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from turnstile.evaluation.metrics import (
    NUMBERS,
    EpisodeResult,
    Interval,
    compared_rates,
    errors,
    max_samples,
    paired_difference,
    pass_at_k,
    rate,
    with_verdict,
)

Stages = Mapping[str, Sequence[EpisodeResult]]
"""Results by the policy's name, in the order in which they are shown."""

NOTE = "Brackets: 95 % interval, bootstrap over tasks. A vs B: A - B paired by task, bold where it excludes zero."
NOTHING = "-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A value, a detail shown smaller below it, and whether to emphasise the value."""

    text: str
    detail: str = ""
    strong: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The row of a policy, or of the difference between two policies."""

    name: str
    cells: tuple[Cell, ...]
    difference: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """The content of a table. `columns` are the headings of the cells, which follow the policy's name."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str = NOTE


def make_table(stages: Stages, pairs: Sequence[tuple[str, str]] = (), *, ks: Sequence[int] | None = None) -> Table:
    """Return the table of all stages, followed by a row (after vs before) for each pair of stage names.

    `ks` are the k of the pass@k columns, which use the last rate. The default is the largest number of samples of any
    task, without a column if that is one (pass@1 is the rate itself). Raises KeyError for a pair that names no stage.
    """
    names = compared_rates(result for results in stages.values() for result in results)
    if names[-1] in NUMBERS:
        ks = ()
    elif ks is None:
        most = max((max_samples(results) for results in stages.values()), default=0)
        ks = (most,) if most > 1 else ()
    rows = [Row(name=name, cells=_policy(results, names, ks)) for name, results in stages.items()]
    for before, after in pairs:
        cells = _difference(stages[before], stages[after], names, ks)
        rows.append(Row(name=f"{after} vs {before}", cells=cells, difference=True))
    columns = (*names, *(f"pass@{k}" for k in ks), "turns", "episodes")
    return Table(columns=columns, rows=tuple(rows), note=_note(stages))


def number(value: float, *, signed: bool = False, digits: int = 3) -> str:
    """Return a number as short text, such as .188, 1.000 or +.104; a dash for NaN."""
    if isnan(value):
        return NOTHING
    text = f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"
    return text.replace("0.", ".", 1) if abs(value) < 1 and digits > 1 and text.lstrip("+-").startswith("0.") else text


def bounds(interval: Interval, *, digits: int = 3) -> str:
    """Return the ends of an interval as text, such as [.083, .313]; "" without tasks."""
    if interval.n_tasks == 0:
        return ""
    return f"[{number(interval.low, digits=digits)}, {number(interval.high, digits=digits)}]"


def to_rich(table: Table) -> RichTable:
    """Return the table for a rich console."""
    shown = RichTable(box=box.SIMPLE_HEAD, padding=0, caption=table.note, caption_justify="left")
    shown.add_column("policy", min_width=12)
    for name in table.columns:
        shown.add_column(name, justify="right", no_wrap=True)
    for row, following in zip_longest(table.rows, table.rows[1:]):
        cells = []
        for cell in row.cells:
            text = Text(cell.text, style="bold" if cell.strong or not row.difference else "")
            small = cell.detail.replace(", ", ",").strip("()")  # so that the whole table fits 80 columns
            cells.append(text.append(f"\n{small}", style="not bold dim") if small else text)
        last = following is not None and following.difference and not row.difference
        shown.add_row(Text(row.name), *cells, end_section=last)
    return shown


def to_markdown(table: Table) -> str:
    """Return the table as Markdown, with one line per policy and intervals in brackets."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    def value(cell: Cell) -> str:
        return f"{f'**{cell.text}**' if cell.strong else cell.text} {cell.detail}".strip()

    lines = [line(("policy", *table.columns)), line(("---", *("---:" for _ in table.columns)))]
    lines += [
        line((row.name.replace("|", "\\|"), *(value(cell).replace("|", "\\|") for cell in row.cells)))
        for row in table.rows
    ]
    return "\n".join([*lines, "", table.note]) + "\n"


def _note(stages: Stages) -> str:
    lost = [f"{name}: {errors(results)}" for name, results in stages.items() if errors(results)]
    return f"{NOTE} Episodes lost to infrastructure, counted nowhere: {', '.join(lost)}." if lost else NOTE


def _policy(results: Sequence[EpisodeResult], names: Sequence[str], ks: Sequence[int]) -> tuple[Cell, ...]:
    found = [rate(results, name) for name in names] + [pass_at_k(results, k, names[-1]) for k in ks]
    turns = rate(results, "turns")
    tasks = turns.n_tasks
    return (
        *(Cell(text=number(part.mean), detail=bounds(part, digits=2)) for part in found),
        Cell(text=number(turns.mean, digits=1)),
        Cell(text=str(len(with_verdict(results))), detail=f"({tasks} task{'s' * (tasks != 1)})" if tasks else ""),
    )


def _difference(
    before: Sequence[EpisodeResult], after: Sequence[EpisodeResult], names: Sequence[str], ks: Sequence[int]
) -> tuple[Cell, ...]:
    found = [paired_difference(before, after, name) for name in names]
    turns = paired_difference(before, after, "turns")
    pairs = f"({turns.n_tasks} pair{'s' * (turns.n_tasks != 1)})" if turns.n_tasks else ""
    return (
        *(_signed(part, detail=bounds(part)) for part in found),
        *(Cell(text="") for _ in ks),
        _signed(turns, digits=1),
        Cell(text=str(turns.n_episodes), detail=pairs),
    )


def _signed(part: Interval, *, detail: str = "", digits: int = 3) -> Cell:
    return Cell(text=number(part.mean, signed=True, digits=digits), detail=detail, strong=part.excludes_zero)
