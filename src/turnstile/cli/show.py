"""Printing one recorded episode, turn by turn or token by token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from turnstile.agents.base import Tokenizer
from turnstile.cli.episodes import Episode
from turnstile.records.record import LOGPROB, REPLAYED, WEIGHT, Entry
from turnstile.rewards.resolver import resolve_turn
from turnstile.types import F32, I32, Stage, Turn

PROMPT_CHARS = 2000
"""The number of characters shown of the end of a prompt."""


def show_episode(console: Console, episode: Episode, tokenizer: Tokenizer | None) -> None:
    """Print an episode's turns with prompts, actions, observations, rewards and credit, then its group."""
    _head(console, episode)
    for k, turn in enumerate(episode.trajectory.turns):
        console.print(Rule(Text(f"turn {k + 1}", style="bold"), align="left", style="dim"))
        if k == 0 or turn.fresh:
            _prompt(console, turn, tokenizer)
        action = _action(turn, tokenizer)
        console.print(Text(action.rstrip("\n") or "(nothing)", style="bold green"))
        for message in turn.observation:
            console.print(Text(message.content.rstrip("\n"), style="" if message.content.strip() else "dim"))
        if turn.stage is not Stage.COMPLETED:
            _line(console, "answer", "none: the episode ended while the environment acted")
        _line(console, "rewards", _rewards(episode, k))
        _line(console, "signals", _values(turn.signals))
        _line(console, "advantage", _spread(_advantages(episode, k)))
        spent = f"{len(turn.completion.token_ids)} sampled, mean logprob {_mean(turn.completion.logprobs):.3f}"
        _line(console, "tokens", f"{len(turn.context_ids)} context, {spent}, finish {turn.completion.finish}")
    _group(console, episode)


def _head(console: Console, episode: Episode) -> None:
    entry, trajectory, score = episode.entry, episode.trajectory, episode.score
    where = f"step {entry.step}, {entry.phase} {entry.label}".strip()
    console.print(Rule(Text(f"{where}: {entry.group.task.id}", style="bold"), align="left"))
    _line(console, "attempt", f"{trajectory.attempt} (of {_size_text(entry)}), group {entry.group.id}")
    _line(console, "stop", f"{trajectory.stop.value} after {len(trajectory.turns)} turns")
    _line(console, "error", trajectory.error or "")
    if score.outcome is None:
        _line(console, "reward", "none: infrastructure failed, so it is trained on by nobody and counted nowhere")
    else:
        _line(
            console,
            "reward",
            f"total {score.total:+.3f} = outcome {_values(score.outcome)} + turns {score.turn.sum():+.3f}",
        )
    _line(
        console,
        "gates",
        ", ".join(f"{name} {'open' if is_open else 'closed'}" for name, is_open in score.gates.items()),
    )
    outside = [name for name in ("baseline", "gradient") if not getattr(score, f"in_{name}")]
    _line(console, "left out of", " and ".join(outside))
    _line(console, "hint", trajectory.hint)
    _line(console, "measured", _values(trajectory.signals))
    _line(console, "seconds", _values(trajectory.times))


def _size_text(entry: Entry) -> str:
    count = str(len(entry.group.trajectories))
    return f"{count} that are trained on again" if entry.label == REPLAYED else count


def _prompt(console: Console, turn: Turn, tokenizer: Tokenizer | None) -> None:
    text = _text(turn.context_ids, tokenizer)
    if len(text) > PROMPT_CHARS:
        console.print(Text(f"... ({len(text) - PROMPT_CHARS:,} characters of the prompt before)", style="dim"))
    console.print(Text(text[-PROMPT_CHARS:].rstrip("\n"), style="cyan"))


def _action(turn: Turn, tokenizer: Tokenizer | None) -> str:
    if tokenizer is not None:
        return _text(turn.completion.token_ids, tokenizer)
    calls = [f"{call.name} {json.dumps(dict(call.arguments))}" for call in turn.message.tool_calls]
    return "\n".join(part for part in (turn.message.content, *calls) if part)


def _rewards(episode: Episode, k: int) -> str:
    """Return the terms that gave or withheld a reward in turn `k`, with the gates, and the resulting reward."""
    resolved = resolve_turn(episode.score, k)
    parts = [f"{one.term} {one.granted:+.3f} granted" for one in resolved if one.granted]
    for one in resolved:
        by = f" by {' and '.join(one.by)}" if one.by else ""  # old records lack the names
        parts += [f"{one.term} {one.withheld:+.3f} withheld{by}"] if one.withheld else []
    composed = f"r_t {episode.score.turn[k]:+.3f}"
    return f"{', '.join(parts)}; {composed}" if parts else composed


def _group(console: Console, episode: Episode) -> None:
    """Print the attempts whose rewards determined this episode's advantages."""
    table = Table("attempt", "stop", box=None, pad_edge=False, title="the group", title_justify="left")
    for name in ("turns", "outcome", "total", "withheld", "advantage"):
        table.add_column(name, justify="right")
    for place, trajectory in enumerate(episode.entry.group.trajectories):
        other = Episode(episode.entry, place)
        judged = other.score.outcome is not None
        withheld = sum(float(values.sum()) for values in other.score.withheld.values())
        credit = [a for k in range(len(trajectory.turns)) for a in _advantages(other, k)]
        table.add_row(
            f"{trajectory.attempt}{' <' if place == episode.place else ''}",
            trajectory.stop.value,
            str(len(trajectory.turns)),
            f"{sum((other.score.outcome or {}).values()):+.2f}" if judged else "-",
            f"{other.total:+.3f}" if judged else "-",
            f"{withheld:+.3f}",
            _spread(np.array(credit, np.float32)) or "-",
        )
    console.print(Rule(style="dim"))
    console.print(table)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLine:
    """One token of a row, with what was recorded about it.

    `old` is its log-probability when sampled, and `new` the trainer's log-probability before the update. These,
    `weight` and `advantage` are None if the token was not sampled or not trained, or if they were not recorded.
    """

    row: int
    turn: int  # -1 for prompt and observation tokens
    token: int
    trained: bool  # the loss mask
    old: float | None = None
    new: float | None = None
    weight: float | None = None
    advantage: float | None = None


def token_lines(episode: Episode) -> Iterator[TokenLine]:
    """Yield every token of the episode's rows in order. A turn with a rewritten context begins a new row."""
    row = 0
    for k, turn in enumerate(episode.trajectory.turns):
        row += int(turn.fresh and k > 0)
        for token in turn.context_ids:
            yield TokenLine(row=row, turn=-1, token=int(token), trained=False)
        advantages, arrays = _advantages(episode, k), episode.entry.trained
        seen = {name: arrays[name][episode.place][k] for name in (LOGPROB, WEIGHT) if name in arrays}
        in_update = WEIGHT in seen and bool(seen[WEIGHT].any())
        for i, token in enumerate(turn.completion.token_ids):
            yield TokenLine(
                row=row,
                turn=k,
                token=int(token),
                trained=turn.trainable and episode.score.in_gradient and episode.entry.phase != "eval",
                old=float(turn.completion.logprobs[i]),
                new=float(seen[LOGPROB][i]) if in_update and LOGPROB in seen else None,
                weight=float(seen[WEIGHT][i]) if WEIGHT in seen else None,
                advantage=float(advantages[i]) if len(advantages) else None,
            )


def show_tokens(console: Console, episode: Episode, tokenizer: Tokenizer | None) -> None:
    """Print a table of an episode's tokens (`token_lines`)."""
    _head(console, episode)
    lines = list(token_lines(episode))
    table = Table(box=None, pad_edge=False)
    for name in ("i", "row", "turn", "mask", "id", "old logp", "new logp", "weight", "advantage"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("token", overflow="fold")
    for i, line in enumerate(lines):
        numbers = [
            _number(line.old, ".4f"),
            _number(line.new, ".4f"),
            _number(line.weight, ".3g"),
            _number(line.advantage, "+.4f"),
        ]
        text = Text(repr(_text(np.array([line.token], np.int32), tokenizer)) if tokenizer else "")
        turn = "" if line.turn < 0 else str(line.turn + 1)
        style = "" if line.trained else "dim"
        table.add_row(str(i), str(line.row), turn, str(int(line.trained)), str(line.token), *numbers, text, style=style)
    console.print(table)
    sampled = [line for line in lines if line.turn >= 0]
    gaps = [abs(line.new - line.old) for line in sampled if line.new is not None and line.old is not None]
    totals = f"{len(lines)} tokens, {len(sampled)} sampled, {sum(line.trained for line in lines)} in the loss mask"
    console.print(Text(totals + (f"; mean |new - old| {np.mean(gaps):.2g}" if gaps else "")))
    if sampled and all(line.weight == 0 for line in sampled):
        console.print(Text("every weight is 0: its group had no signal, so nothing of it was trained"))


def _advantages(episode: Episode, k: int) -> F32:
    """Return the advantages [n] of the n tokens sampled in turn `k`; empty if no credit was assigned."""
    credit = episode.entry.advantages
    return np.zeros(0, np.float32) if credit is None else credit[episode.place][k]


def _spread(values: F32) -> str:
    if len(values) == 0:
        return ""
    low, high = float(values.min()), float(values.max())
    return f"{low:+.4f}" if low == high else f"{low:+.4f} to {high:+.4f}, mean {float(values.mean()):+.4f}"


def _mean(values: F32) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _text(ids: I32, tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(map(str, ids.tolist()))
    return tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def _values(found: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items()
    )


def _line(console: Console, name: str, text: str) -> None:
    if text:
        console.print(Text(f"{name}: ", style="dim").append(text, style="not dim"))
