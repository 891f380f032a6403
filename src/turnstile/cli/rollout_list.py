"""The command `turnstile rollout list`."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnstile.cli.episodes import Filter, entries, episodes, filter_options
from turnstile.cli.runs import find_run
from turnstile.records.record import Phase


@click.command("list")
@click.argument("run")
@filter_options
def list_episodes(run: str, task: str | None, phase: Phase | None, step: int | None, label: str | None) -> None:
    """List the recorded episodes of RUN, one per line."""
    table = Table("step", "phase", "task", "attempt", "stop", box=None, pad_edge=False)
    for name in ("turns", "outcome", "total"):
        table.add_column(name, justify="right")
    wanted = Filter(task=task, phase=phase, step=step, label=label)
    for episode in episodes(entries(find_run(run), wanted)):
        entry, score, trajectory = episode.entry, episode.score, episode.trajectory
        judged = score.outcome is not None
        table.add_row(
            str(entry.step),
            Text(f"{entry.phase} {entry.label}".strip()),
            Text(entry.group.task.id),
            str(trajectory.attempt),
            trajectory.stop.value,
            str(len(trajectory.turns)),
            f"{sum((score.outcome or {}).values()):+.2f}" if judged else "-",
            f"{score.total:+.3f}" if judged else "-",
        )
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # no wrapping in a pipe
    console.print(table)
