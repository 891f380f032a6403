"""The table of evaluation results in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from turnstile.evaluation.metrics import EpisodeResult
from turnstile.evaluation.table import make_table, to_rich
from turnstile.runs.report import named_pairs, named_stages


def print_results(results: Mapping[str, Sequence[EpisodeResult]]) -> None:
    """Print the same table of results as the report, in the same order, with intervals and paired differences.

    Prints nothing if `results` is empty.
    """
    if not results:
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 100
    console.print(to_rich(make_table(named_stages(results), named_pairs(results))))
