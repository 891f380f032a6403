"""Readable episodes, before and after side by side: actions, observations, rewards, gates and advantages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from turnstile.evaluation.markup import render
from turnstile.evaluation.table import number
from turnstile.rewards.resolver import resolve_turn
from turnstile.types import F32, Message, Score, Stop, Task, Trajectory, Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """One episode to show.

    `advantages` are [turn] f32[n] if it was trained on. `prompt` is what the agent saw first (default: the task's
    prompt).
    """

    task: Task
    trajectory: Trajectory
    score: Score
    advantages: Sequence[F32] | None = None
    prompt: str = ""


class Chip(NamedTuple):
    """A small label and its CSS class."""

    text: str
    tone: str = ""


class ShownTurn(NamedTuple):
    """The agent's action, the environment's answer, and labels for what the turn earned."""

    action: str
    answer: str
    chips: Sequence[Chip]


class Side(NamedTuple):
    """One episode in the comparison of a task. `lost` and `broke` are sentences, or empty."""

    name: str
    verdict: Chip
    facts: Sequence[Chip]
    lost: str
    broke: str
    turns: Sequence[ShownTurn]


class ShownTask(NamedTuple):
    """A task and its episodes."""

    task: Task
    prompt: str
    labels: Sequence[Chip]
    sides: Sequence[Side]


def episodes(before: Sequence[Shown], after: Sequence[Shown], names: tuple[str, str]) -> Markup:
    """Render a collapsible section for each task, first those that both sides have. Only the first is open."""
    sides: list[dict[str, Shown]] = [{}, {}]
    for side, shown in zip(sides, (before, after), strict=True):
        for episode in shown:
            side.setdefault(episode.task.id, episode)
    tasks = sorted(sides[0] | sides[1], key=lambda task: sum(task in side for side in sides), reverse=True)
    return render("episodes.html", tasks=[_task([side.get(task) for side in sides], names) for task in tasks])


def _task(pair: Sequence[Shown | None], names: tuple[str, str]) -> ShownTask:
    there = [(shown, name) for shown, name in zip(pair, names, strict=True) if shown is not None]
    first = there[0][0]
    return ShownTask(
        task=first.task,
        prompt=first.prompt or first.task.prompt,
        labels=[Chip(str(first.task.data[key])) for key in ("kind", "package") if first.task.data.get(key)],
        sides=[_side(shown, name) for shown, name in there],
    )


def _verdict(shown: Shown) -> Chip:
    """Return a label with the last rate that the attempt reached, green only if it is the environment's last rate."""
    if shown.score.outcome is None:
        return Chip("infrastructure error", "down")
    rates = shown.trajectory.rates
    reached = [name for name, holds in rates.items() if holds]
    if not reached:
        return Chip(f"no {next(iter(rates))}", "down") if rates else Chip(Stop(shown.trajectory.stop).value)
    return Chip(reached[-1], "up" if reached[-1] == list(rates)[-1] else "unclear")


def _side(shown: Shown, name: str) -> Side:
    trajectory, score = shown.trajectory, shown.score
    outcome = "no verdict" if score.outcome is None else number(score.outcome_of(), signed=True, digits=2)
    total = [] if score.outcome is None else [Chip(f"total {number(score.total, signed=True, digits=2)}")]
    gates = [
        Chip(f"gate {gate} {'open' if is_open else 'closed'}", "up" if is_open else "shut")
        for gate, is_open in score.gates.items()
    ]
    ended = Chip(f"{len(trajectory.turns)} turns, ended: {Stop(trajectory.stop).value}")
    withheld = sum(float(values.sum()) for values in score.withheld.values())
    return Side(
        name=name,
        verdict=_verdict(shown),
        facts=[Chip(f"outcome {outcome}"), *total, ended, *gates],
        lost=f"Closed gates withheld {number(withheld, digits=2)} of step rewards." if withheld else "",
        broke=f"Broke: {trajectory.error}" if trajectory.error else "",
        turns=[_turn(shown, place, turn) for place, turn in enumerate(trajectory.turns)],
    )


def _turn(shown: Shown, place: int, turn: Turn) -> ShownTurn:
    resolved = resolve_turn(shown.score, place)
    chips = [Chip(f"{number(one.granted, signed=True, digits=2)} {one.term}", "up") for one in resolved if one.granted]
    for one in resolved:
        if one.withheld:
            by = f" by {' and '.join(one.by)}" if one.by else ""
            chips.append(Chip(f"withheld {number(one.withheld, signed=True, digits=2)} {one.term}{by}", "shut"))
    if shown.advantages is not None and len(shown.advantages[place]):
        advantage = float(np.mean(shown.advantages[place]))
        tone = "up" if advantage > 0 else "down" if advantage < 0 else ""
        chips.append(Chip(f"advantage {number(advantage, signed=True, digits=2)}", tone))
    answer = "\n".join(filter(None, map(_message_text, turn.observation)))
    return ShownTurn(action=_message_text(turn.message), answer=answer, chips=chips)


def _message_text(message: Message) -> str:
    """Return a message as plain text, consisting of its reasoning, its content and its tool calls."""
    calls = [f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})" for call in message.tool_calls]
    return "\n".join(part for part in (message.reasoning, message.content.strip("\n"), *calls) if part)
