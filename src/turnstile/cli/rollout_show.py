"""The command `turnstile rollout show`."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import click
from rich.console import Console
from rich.text import Text

from turnstile.agents.base import Tokenizer
from turnstile.cli.episodes import Filter, entries, episodes, filter_options, select
from turnstile.cli.runs import find_run
from turnstile.cli.show import show_episode, show_tokens
from turnstile.engines.text_codec import TextTokenizer, is_text_prompt
from turnstile.errors import ConfigError
from turnstile.models.load import load_tokenizer
from turnstile.records.record import Phase
from turnstile.runs.run_folder import read_recipe
from turnstile.trainer import checkpoint


@click.command(short_help="Show one episode turn by turn, or token by token.")
@click.argument("run")
@filter_options
@click.option("--best", "which", flag_value="best", help="The episode with the highest reward.")
@click.option("--worst", "which", flag_value="worst", help="The episode with the lowest reward.")
@click.option("--attempt", type=click.IntRange(min=0), help="This attempt of its group.")
@click.option("--tokens", is_flag=True, help="Every token, with what was trained on it.")
def show(
    run: str,
    task: str | None,
    phase: Phase | None,
    step: int | None,
    label: str | None,
    which: str | None,
    attempt: int | None,
    tokens: bool,
) -> None:
    """Show one episode of RUN: with --best or --worst the one that they name, else the latest that matches.

    With --tokens it is a training episode, unless --phase or --label is given.
    """
    folder = find_run(run)
    if tokens and phase is None and label is None:
        phase = "train"
    wanted = Filter(task=task, phase=phase, step=step, label=label)
    episode = select(episodes(entries(folder, wanted), attempt), which)
    console = Console(highlight=False)
    turns = episode.trajectory.turns
    spelled = bool(turns) and is_text_prompt(turns[0].context_ids)
    tokenizer = TextTokenizer() if spelled else _tokenizer(folder, console)
    (show_tokens if tokens else show_episode)(console, episode, tokenizer)


def _tokenizer(folder: Path, console: Console) -> Tokenizer | None:
    """Return the tokenizer kept with the run's last weights, or the recipe's if the run has no weights.

    If it cannot be loaded, print why and return None; token ids are shown then.
    """
    newest = checkpoint.newest_folder(folder / "checkpoints")
    try:
        tokenizer = load_tokenizer(str(newest / "model") if newest else read_recipe(folder).model.id)
    except ConfigError as error:
        console.print(Text(f"tokens are shown as numbers: {error}", style="yellow"))
        return None
    return cast(Tokenizer, tokenizer)
