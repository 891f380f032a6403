"""The command `turnstile audit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnstile.cli.runs import find_run
from turnstile.errors import ConfigError
from turnstile.records.balance import Balance, BinShare, StepBalance, TaskBalance
from turnstile.runs.audit import Audited, audit_run, compare_runs

SHOWN = 10
"""The number of tasks, and of steps, that are listed unless all are requested."""


@click.command(short_help="Account for every attempt of a run, or compare two runs.")
@click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN2]")
@click.option("--diff", is_flag=True, help="Say at which step RUN and RUN2 parted, and why.")
@click.option("--record", is_flag=True, help="Read the whole record too, and hold it against the ledger.")
@click.option("--all", "everything", is_flag=True, help=f"List every task and step, not only {SHOWN} of each.")
def audit(runs: tuple[str, ...], diff: bool, record: bool, everything: bool) -> int:
    """Report what became of every attempt of RUN.

    Counts attempts by state, step and task, and lists those that were lost or were trained on more often than the
    recipe declares. Also compares how often short or easy tasks are trained on with how often they are played. The exit
    code is 1 if an attempt was lost or was trained on too often, or with --diff if the runs differ.
    """
    folders = [find_run(run) for run in runs]
    if len(folders) != 1 + diff:
        raise ConfigError("--diff compares two runs, and without it one is audited: turnstile audit RUN")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # no wrapping in a pipe
    if diff:
        return _compare(console, *folders)
    audited = audit_run(folders[0], record=record)
    _print(console, folders[0], audited, everything=everything)
    return 0 if audited.audit.balanced else 1


def _print(console: Console, run: Path, audited: Audited, *, everything: bool) -> None:
    found = audited.audit
    stands = "no step stands yet" if found.committed is None else f"step {found.committed} of {audited.steps} stands"
    console.print(Text(f"{run}: {stands}; {found.issued} attempts issued, {found.uses} uses in training"))
    table = _table("state", "attempts", "why")
    for state, count in found.states.items():
        why = "; ".join(f"{reason} {times}" for reason, times in found.why.get(state, ())[:3])
        table.add_row(state.value, str(count), Text(why))
    table.columns[2].justify = "left"
    console.print(table)
    _print_steps(console, found.steps, audited.staleness, everything=everything)
    _print_tasks(console, found.tasks, everything=everything)
    if found.open:
        console.print(f"attempts of steps that are not done yet, which are in none of the shares below: {found.open}")
    _print_shares(console, "by length", found.by_length)
    _print_shares(console, "by difficulty", found.by_difficulty)
    for name, count, lines in (
        ("lost", found.lost_count, found.lost),
        ("used more often than declared", found.overused_count, found.overused),
    ):
        console.print(Text(f"{name}: {count}", style="" if not count else "red"))
        for line in lines:
            console.print(Text(f"  {line}"))


def _print_steps(
    console: Console, steps: Sequence[StepBalance], staleness: Mapping[int, tuple[float, float]], *, everything: bool
) -> None:
    """Print the last steps, or with `everything` all.

    Staleness is in weight versions: the mean over a step's tokens, and the maximum.
    """
    table = _table("step", *COUNTS, "staleness", "at most")
    shown = steps if everything else steps[-SHOWN:]
    if len(shown) < len(steps):
        console.print(f"the last {len(shown)} of {len(steps)} steps; --all lists every one")
    for step in shown:
        mean, most = staleness.get(step.step, (None, None))
        old = ("-" if mean is None else f"{mean:.2f}", "-" if most is None else f"{most:.0f}")
        table.add_row(str(step.step), *_count_cells(step), *old)
    console.print(table)


def _print_tasks(console: Console, tasks: Sequence[TaskBalance], *, everything: bool) -> None:
    """Print the tasks, ordered by the share of their attempts that was trained on, smallest first."""
    table = _table("task", *COUNTS)
    ordered = sorted(tasks, key=lambda task: (task.admitted / task.issued, task.task))
    shown = ordered if everything else ordered[:SHOWN]
    for task in shown:
        table.add_row(Text(task.task), *_count_cells(task))
    console.print(table)
    if len(shown) < len(ordered):
        console.print(f"and {len(ordered) - len(shown)} more tasks, which --all lists")


COUNTS = ("issued", "admitted", "gated out", "given up", "open", "finished")


def _count_cells(balance: Balance) -> list[str]:
    """Return the cells of the columns `COUNTS`. Finished attempts are among the open ones."""
    counts = (balance.issued, balance.admitted, balance.gated_out, balance.given_up, balance.open, balance.finished)
    return [str(count) for count in counts]


def _print_shares(console: Console, title: str, shares: Sequence[BinShare]) -> None:
    """Print each bin's share of the attempts that are settled and of those admitted to training, and their ratio."""
    table = _table(title, "tasks", "settled", "admitted", "of settled", "of admitted", "ratio")
    for share in shares:
        percent = (f"{100 * part:.1f} %" for part in (share.of_settled, share.of_admitted))
        ratio = f"{share.of_admitted / share.of_settled:.2f}"
        table.add_row(Text(share.label), str(share.tasks), str(share.settled), str(share.admitted), *percent, ratio)
    console.print(table)


def _table(first: str, *others: str) -> Table:
    table = Table(first, box=None, pad_edge=False)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _compare(console: Console, one: Path, other: Path) -> int:
    found = compare_runs(one, other)
    for what, names in (("recipe", found.recipe), ("versions", found.versions)):
        if names:
            console.print(Text(f"{what}: {', '.join(names)} differ"))
    if found.record is not None:
        console.print(Text(str(found.record)))
        if found.record.step > 0:
            console.print(Text(f"everything before step {found.record.step} is equal"))
    elif found.weights is not None:
        console.print(Text(f"the weights after step {found.weights} differ, though all that is recorded is equal"))
    else:
        console.print(Text(f"equal up to step {found.equal_until}, the last that both have"))
    return 0 if found.same else 1
