"""Episodes as a person reads them, before beside after: actions, observations, rewards, gates and advantages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turnstile.evaluation.markup import chip, paragraph, text
from turnstile.evaluation.table import number
from turnstile.rewards.resolver import resolve_turn
from turnstile.types import F32, Message, Score, Stop, Task, Trajectory, Turn

PROMPT_LIMIT, ACTION_LIMIT, OBSERVATION_LIMIT = 1500, 1500, 900


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """One episode to show. `advantages` [turn] f32[n], where it was trained on; `prompt` is what the agent saw
    first (default: the task's own)."""

    task: Task
    trajectory: Trajectory
    score: Score
    advantages: Sequence[F32] | None = None
    prompt: str = ""


def episodes(before: Sequence[Shown], after: Sequence[Shown], names: tuple[str, str]) -> str:
    """A fold for each task, first those that both sides have, the first of them open."""
    sides: list[dict[str, Shown]] = [{}, {}]
    for side, shown in zip(sides, (before, after), strict=True):
        for episode in shown:
            side.setdefault(episode.task.id, episode)
    tasks = sorted(sides[0] | sides[1], key=lambda task: sum(task in side for side in sides), reverse=True)
    return "\n".join(
        _task([side.get(task) for side in sides], names, is_open=not place) for place, task in enumerate(tasks)
    )


def _task(pair: Sequence[Shown | None], names: tuple[str, str], *, is_open: bool) -> str:
    first = next(shown for shown in pair if shown is not None)
    task = first.task
    labels = [chip(str(task.data[key])) for key in ("kind", "package") if task.data.get(key)]
    verdicts = [_verdict(shown) for shown in pair if shown is not None]
    prompt = first.prompt or task.prompt
    asked = f"<pre class='prompt'>{text(prompt, PROMPT_LIMIT)}</pre>" if prompt else ""
    columns = "\n".join(_episode(shown, name) for shown, name in zip(pair, names, strict=True) if shown is not None)
    return (
        f"<details class='task'{' open' if is_open else ''}><summary><code>{text(task.id)}</code> {''.join(labels)} "
        f"<span class='verdicts'>{'<span class=arrow>&rarr;</span>'.join(verdicts)}</span></summary>\n"
        f"{asked}\n<div class='sides'>\n{columns}\n</div></details>"
    )


def _verdict(shown: Shown) -> str:
    """The last rate that it reached, green only for the last one that there is."""
    if shown.score.outcome is None:
        return chip("infrastructure error", "down")
    rates = shown.trajectory.rates
    reached = [name for name, holds in rates.items() if holds]
    if not reached:
        return chip(f"no {next(iter(rates))}", "down") if rates else ""
    return chip(reached[-1], "up" if reached[-1] == list(rates)[-1] else "unclear")


def _episode(shown: Shown, name: str) -> str:
    trajectory, score = shown.trajectory, shown.score
    outcome = "no verdict" if score.outcome is None else number(score.outcome_of(), signed=True, digits=2)
    facts = [
        f"<b>{text(name)}</b>",
        chip(f"outcome {outcome}"),
        chip(f"total {number(score.total, signed=True, digits=2)}") if score.outcome is not None else "",
        chip(f"{len(trajectory.turns)} turns, ended: {Stop(trajectory.stop).value}"),
        *(
            chip(f"gate {gate} {'open' if is_open else 'closed'}", "up" if is_open else "shut")
            for gate, is_open in score.gates.items()
        ),
    ]
    withheld = sum(float(values.sum()) for values in score.withheld.values())
    lost = f"Closed gates withheld {number(withheld, digits=2)} of step rewards." if withheld else ""
    turns = "\n".join(_turn(shown, place, turn) for place, turn in enumerate(trajectory.turns))
    broke = paragraph(f"Broke: {trajectory.error}", "note") if trajectory.error else ""
    head = f"<p class='facts'>{' '.join(facts)}</p>{paragraph(lost, 'note')}{broke}"
    return f"<div class='episode'>{head}\n<ol>\n{turns}\n</ol></div>"


def _turn(shown: Shown, place: int, turn: Turn) -> str:
    resolved = resolve_turn(shown.score, place)
    chips = [
        *(_term(one.granted, one.term, "up") for one in resolved if one.granted),
        *(
            _term(one.withheld, " by ".join([one.term, *filter(None, [" and ".join(one.by)])]), "shut", "withheld ")
            for one in resolved
            if one.withheld
        ),
    ]
    if shown.advantages is not None and len(shown.advantages[place]):
        advantage = float(np.mean(shown.advantages[place]))
        chips.append(
            chip(
                f"advantage {number(advantage, signed=True, digits=2)}",
                "up" if advantage > 0 else "down" if advantage < 0 else "",
            )
        )
    answer = "\n".join(part for part in map(_said, turn.observation) if part)
    observed = f"<pre class='observation'>{text(answer, OBSERVATION_LIMIT)}</pre>" if answer else ""
    earned = f"<p class='chips'>{' '.join(chips)}</p>" if chips else ""
    return (
        f"<li><pre class='action'>{text(_said(turn.message) or '(nothing)', ACTION_LIMIT)}</pre>{observed}{earned}</li>"
    )


def _term(value: float, name: str, css: str, verb: str = "") -> str:
    return chip(f"{verb}{number(value, signed=True, digits=2)} {name}", css)


def _said(message: Message) -> str:
    """A message as plain text: its reasoning, its content, its tool calls."""
    calls = [f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False)})" for call in message.tool_calls]
    return "\n".join(part for part in (message.reasoning, message.content.strip("\n"), *calls) if part)
