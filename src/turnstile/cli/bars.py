"""Progress bars that disappear when done, and print nothing without a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def bars(console: Console) -> Progress:
    """Return progress bars with a description, a count, and the elapsed and the remaining time.

    They print nothing if the output is not a terminal.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, speed_estimate_period=300.0
    )
