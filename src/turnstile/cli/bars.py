"""Progress bars that leave nothing behind and are silent where nobody looks."""

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
    """Bars with a description, a count, the time and the time left; nothing where the output is no terminal."""
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
