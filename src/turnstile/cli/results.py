"""The table of what evaluations came to, in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from turnstile.evaluation.metrics import EpisodeResult
from turnstile.evaluation.table import make_table, to_rich

COMPARED = (("warmstart", "trained"), ("untouched", "trained"))
"""Pairs (before, after) whose difference is shown where a run has both."""


def print_results(results: Mapping[str, Sequence[EpisodeResult]]) -> None:
    """Evaluations by name, in their order, and the paired differences; nothing where there was none."""
    if not results:
        return
    pairs = [pair for pair in COMPARED if set(pair) <= set(results)]
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 100
    console.print(to_rich(make_table(results, pairs)))
