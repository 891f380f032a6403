"""The invariants of a training signal, and a checker that any estimator can be put through.

    broken = check_estimator(my_estimator, {"gamma": 0.9})
    assert not broken, broken

`DECLARED` says for each built-in kind which invariants do not hold, and why they cannot.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from turnstile.credit.base import Advantages, Estimator, Scores
from turnstile.types import F32, Completion, Group, Message, Sampling, Score, Stop, Task, Trajectory, Turn

INVARIANTS: Mapping[int, str] = {
    1: "inserting masked tokens between turns changes no action token's advantage, return or loss",
    2: "permuting the trajectories of a group permutes the result, nothing else",
    3: "packing, padding, sharing and splitting change no gradient",
    4: "a masked token and an infrastructure failure get no gradient and no share in a baseline",
    5: "a terminal reward that falls on an observation reaches the last action before it",
    6: "a turn of zero reward is still a turn",
    7: "all-equal rewards give exactly zero",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """A kind with knobs, and the invariants that cannot hold for it: number -> why."""

    kind: str
    knobs: Mapping[str, Any] = field(default_factory=dict)
    exempt: Mapping[int, str] = field(default_factory=dict)


_WHOLE_STEP = "statistics of the whole step: all its groups must be given in one call, as the trainer does"
_LENGTHS = "a discounted return depends on how many turns lie ahead, also where all outcomes are equal"
_NO_BASELINE = "there is no baseline to take off"
_CRITIC = "the baseline is a critic's word, which need not be the mean of the rewards"
_PROCESS = "the process reward is a model's word, which need not agree with the outcomes"
_ALL_CRITIC = "rewards reach it through the critic alone, which has learned of earlier ones"
_KEPT = "what is not kept is not learned from, whichever turn it is"
_OUTCOME_EACH = "the outcome is in the reward of each turn, so attempts of more turns sum more of it"
_SHARED = "what a continuation shares is credited in the attempt that it left"
_BEHIND = "behind the last branching a turn adds nothing to the mean outcome below it"

DECLARED: tuple[Declaration, ...] = (
    Declaration(kind="grpo"),
    Declaration(kind="grpo", knobs={"of": "outcome", "ddof": 0}),
    Declaration(kind="grpo", knobs={"scale": "none"}),
    Declaration(kind="grpo", knobs={"scale": "batch_std"}, exempt={3: _WHOLE_STEP}),
    Declaration(kind="rloo"),
    Declaration(kind="rloo", knobs={"of": "outcome"}),
    Declaration(kind="turn_return"),
    Declaration(kind="turn_return", knobs={"scale": "none"}),
    Declaration(kind="turn_return", knobs={"gamma": 0.9}, exempt={7: _LENGTHS}),
    Declaration(kind="turn_return", knobs={"among": "batch"}, exempt={3: _WHOLE_STEP}),
    Declaration(kind="turn_return", knobs={"among": "mixed", "gamma": 0.9}, exempt={3: _WHOLE_STEP, 7: _LENGTHS}),
    Declaration(kind="reinforce", exempt={3: _WHOLE_STEP}),
    Declaration(kind="reinforce", knobs={"baseline": "none"}, exempt={7: _NO_BASELINE}),
    Declaration(kind="reinforce_pp", exempt={3: _WHOLE_STEP}),
    Declaration(kind="reinforce_pp", knobs={"baseline": "group"}, exempt={3: _WHOLE_STEP}),
    Declaration(kind="reinforce_pp", knobs={"gamma": 0.9}, exempt={3: _WHOLE_STEP, 7: _LENGTHS}),
    Declaration(kind="gigpo", exempt={7: _LENGTHS}),
    Declaration(kind="gigpo", knobs={"gamma": 1.0}),
    Declaration(kind="gigpo", knobs={"gamma": 1.0, "scale": "none"}),
    Declaration(kind="random_step_group", knobs={"size": 4}),
    Declaration(kind="random_step_group", knobs={"size": 4, "compare": "return"}),
    Declaration(kind="salt"),
    Declaration(kind="empg", exempt={3: _WHOLE_STEP, 7: "the second term praises what leads to sure turns"}),
    Declaration(kind="empg", knobs={"zeta": 0.0}, exempt={3: _WHOLE_STEP}),
    Declaration(kind="entropy_aware"),
    Declaration(kind="igpo", exempt={7: "turns without a reward and the outcome are normalised together"}),
    Declaration(kind="rlvmr"),
    Declaration(kind="broadcast"),
    Declaration(kind="broadcast", knobs={"of": "total", "over": "turns"}),
    Declaration(kind="branch"),
    Declaration(kind="tree"),
    Declaration(kind="tree", knobs={"overall": 0.0}, exempt={5: _BEHIND, 6: _BEHIND}),
    Declaration(kind="segments"),
    Declaration(kind="segments", knobs={"process": 1.0, "low": -20.0, "high": 20.0}),
    Declaration(kind="role_baseline", exempt={7: "the moving average has yet to reach the rewards"}),
    Declaration(kind="per_agent"),
    Declaration(kind="per_agent", knobs={"gamma": 0.9}, exempt={7: _LENGTHS}),
    Declaration(kind="accept", exempt={6: _KEPT}),
    Declaration(kind="signed", exempt={7: _NO_BASELINE}),
    *(Declaration(kind=kind, exempt={7: _CRITIC}) for kind in ("gae", "turn_gae", "bilevel_gae")),
    Declaration(kind="gae", knobs={"gamma": 0.9, "lam": 0.5, "scale": "std"}, exempt={3: _WHOLE_STEP, 7: _CRITIC}),
    Declaration(kind="bilevel_gae", knobs={"token_gamma": 0.9, "token_lam": 1.0}, exempt={7: _CRITIC}),
    Declaration(kind="recalibrated", exempt={3: _WHOLE_STEP, 6: _KEPT}),
    Declaration(kind="recalibrated", knobs={"over": "trajectories", "positive": False}, exempt={3: _WHOLE_STEP}),
    Declaration(kind="normalised_process", exempt={7: _OUTCOME_EACH}),
    Declaration(kind="normalised_process", knobs={"gamma": 0.0, "scale": "none"}),
    Declaration(kind="normalised_process", knobs={"calibrate": "product"}),
    Declaration(kind="normalised_process", knobs={"baseline": "none"}, exempt={7: _NO_BASELINE}),
    Declaration(kind="subgoal"),
    Declaration(kind="subgoal", knobs={"among": "name", "gamma": 0.9, "gamma_low": 0.9}, exempt={7: _LENGTHS}),
    Declaration(kind="vine", exempt={6: _SHARED}),
    Declaration(kind="vine", knobs={"train": "roots"}, exempt={6: _SHARED}),
    Declaration(kind="implicit_step", exempt={7: _PROCESS}),
    Declaration(kind="implicit_step", knobs={"omega": 0.5, "gamma": 0.0}, exempt={7: _PROCESS}),
    Declaration(kind="utterance_critic", exempt={5: _ALL_CRITIC, 7: _CRITIC}),
    Declaration(kind="aem"),
    Declaration(kind="aem", knobs={"measure": "surprisal", "among": "batch"}, exempt={3: _WHOLE_STEP}),
)


def check_estimator(
    estimator: Estimator, knobs: Mapping[str, Any] | None = None, *, aux: Mapping[str, Any] | None = None, seed: int = 0
) -> dict[int, str]:
    """The invariants an estimator breaks: number -> what was seen. Empty when all hold.

    Inputs are read-only arrays, so an estimator that writes into them raises. Costs milliseconds.
    """
    rng = np.random.default_rng(seed)
    groups = [sample_group(rng, f"g{g}", lengths) for g, lengths in enumerate(((3, 2, 4, 3), (2, 3, 3, 4)))]
    scores = [[_random_score(rng, trajectory) for trajectory in group.trajectories] for group in groups]

    def run(groups: Sequence[Group], scores: Scores) -> Advantages:
        given = {**sample_aux(groups), **dict(aux or {})}
        advantages, _ = estimator(groups, scores, given, {}, **dict(knobs or {}))
        shapes = [[len(turn.completion.token_ids) for turn in t.turns] for g in groups for t in g.trajectories]
        if [[len(values) for values in turns] for turns in advantages] != shapes:
            raise AssertionError("advantages are not [trajectory][turn] -> f32[n] in the order of the groups")
        return advantages

    checks: dict[int, Callable[[], str | None]] = {
        1: lambda: _observation(run, groups, scores),
        2: lambda: _permutation(run, groups, scores),
        3: lambda: _splitting(run, groups, scores),
        4: lambda: _failure(run, groups, scores),
        5: lambda: _terminal(run, groups, scores),
        6: lambda: _zero_turn(run, groups, scores),
        7: lambda: _all_equal(run, groups, scores),
    }
    return {number: seen for number, check in checks.items() if (seen := check()) is not None}


Run = Callable[[Sequence[Group], Scores], Advantages]


def _observation(run: Run, groups: Sequence[Group], scores: Scores) -> str | None:
    longer = [
        replace(group, trajectories=tuple(with_observations(t, extra=5 + i) for i, t in enumerate(group.trajectories)))
        for group in groups
    ]
    return _differ(run(groups, scores), run(longer, scores), "longer observations changed an advantage")


def _permutation(run: Run, groups: Sequence[Group], scores: Scores) -> str | None:
    order = [2, 0, 3, 1]
    moved_groups = [replace(g, trajectories=tuple(g.trajectories[i] for i in order)) for g in groups]
    moved_scores = [[group_scores[i] for i in order] for group_scores in scores]
    plain = run(groups, scores)
    expected = [plain[4 * g + i] for g in range(len(groups)) for i in order]
    return _differ(expected, run(moved_groups, moved_scores), "the order of a group's trajectories matters")


def _splitting(run: Run, groups: Sequence[Group], scores: Scores) -> str | None:
    apart = [turns for g in range(len(groups)) for turns in run(groups[g : g + 1], scores[g : g + 1])]
    return _differ(run(groups, scores), apart, "groups given one by one get other advantages than together")


def _failure(run: Run, groups: Sequence[Group], scores: Scores) -> str | None:
    broken = replace(groups[0].trajectories[0], attempt=99, stop=Stop.ERROR, signals={})
    nothing = np.zeros(len(broken.turns), dtype=np.float32)
    score = Score(outcome=None, turn=nothing, total=0.0, in_baseline=False, in_gradient=False)
    wider = [replace(groups[0], trajectories=(*groups[0].trajectories, broken)), *groups[1:]]
    result = run(wider, [[*scores[0], score], *scores[1:]])
    its_own = result.pop(len(groups[0].trajectories))
    if any(values.any() for values in its_own):
        return "an infrastructure failure got an advantage"
    if seen := _differ(run(groups, scores), result, "an infrastructure failure changed the others' advantages"):
        return seen
    masked = [[replace(scores[0][0], in_gradient=False), *scores[0][1:]], *scores[1:]]
    result = run(groups, masked)
    if any(values.any() for values in result[0]):
        return "a trajectory out of the gradient got an advantage"
    return _differ(run(groups, scores)[1:], result[1:], "a masked trajectory left the baseline")


def _terminal(run: Run, groups: Sequence[Group], scores: Scores) -> str | None:
    def with_outcome(outcome: float) -> Advantages:
        return run(groups, [[_score(outcome, scores[0][0].turn), *scores[0][1:]], *scores[1:]])

    worst, best = (
        with_outcome(-10.0),
        with_outcome(10.0),
    )  # beyond all others, so that no deviation hides the difference
    if not (best[0][-1] > worst[0][-1]).all():
        return "a better outcome does not raise the advantage of the last action"
    return None


def _zero_turn(run: Run, groups: Sequence[Group], scores: Scores) -> str | None:
    bare = [[_score(_outcome(s), np.zeros_like(s.turn)) for s in group_scores] for group_scores in scores]
    for turns in run(groups, bare):
        if any(not values.any() for values in turns[:2]):  # at later turns few trajectories are left to compare with
            return "a turn without a step reward got no advantage although the outcomes differ"
    return None


def _all_equal(run: Run, groups: Sequence[Group], scores: Scores) -> str | None:
    for size in (3, 4):  # a mean of three tenths is no tenth in floating point
        fewer = [replace(group, trajectories=group.trajectories[:size]) for group in groups]
        equal = [[_score(0.1, np.zeros_like(s.turn)) for s in group_scores[:size]] for group_scores in scores]
        for turns in run(fewer, equal):
            if any(values.any() or np.isnan(values).any() for values in turns):
                return "equal rewards gave an advantage that is not exactly zero"
    return None


def _differ(expected: Advantages, actual: Advantages, what: str) -> str | None:
    same = len(expected) == len(actual) and all(
        len(a) == len(b) and all(np.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(a, b, strict=True))
        for a, b in zip(expected, actual, strict=True)
    )
    return None if same else what


def _outcome(score: Score) -> float:
    return score.outcome_of()


def _score(outcome: float, turn: np.ndarray[Any, np.dtype[np.float32]]) -> Score:
    turn.setflags(write=False)
    return Score(outcome={"agent": outcome}, turn=turn, total=outcome + float(turn.sum(dtype=np.float64)))


def _random_score(rng: np.random.Generator, trajectory: Trajectory) -> Score:
    return _score(float(rng.normal()), rng.normal(size=len(trajectory.turns)).astype(np.float32))


def sample_aux(groups: Sequence[Group]) -> dict[str, Any]:
    """What learned parts might say of these groups, made up."""
    values = sample_values(groups)
    q, v = ([np.array([own[end] for own in turns], dtype=np.float32) for turns in values] for end in (-1, 0))
    return {"values": values, "implicit": values, "q": [1 + own for own in q], "v": v}


def sample_values(groups: Sequence[Group]) -> list[list[F32]]:
    """Made-up values of a critic, [trajectory][turn] -> f32[n], that depend on group, attempt, turn and token alone."""

    def one(group: Group, attempt: int, turn: int, n: int) -> F32:
        values = np.random.default_rng([zlib.crc32(group.id.encode()), attempt, turn]).normal(size=n).astype(np.float32)
        values.setflags(write=False)
        return values

    return [
        [one(g, t.attempt, k, len(turn.completion.token_ids)) for k, turn in enumerate(t.turns)]
        for g in groups
        for t in g.trajectories
    ]


def sample_group(rng: np.random.Generator, name: str, lengths: Sequence[int]) -> Group:
    """A group of trajectories with so many turns each, of one to four random tokens a turn, few states and tags, random
    entropies; the last trajectory branched from the first after its first turn."""
    task = Task(id=f"task-{name}", env="check")
    trajectories = [_sampled(rng, task, name, attempt, turns) for attempt, turns in enumerate(lengths)]
    shared = trajectories[0].turns[:1]
    trajectories[-1] = replace(trajectories[-1], turns=(*shared, *trajectories[-1].turns[1:]), parent=(0, 1, 0))
    return Group(id=name, task=task, trajectories=tuple(trajectories))


def _sampled(rng: np.random.Generator, task: Task, group: str, attempt: int, turns: int) -> Trajectory:
    tokens = [int(n) for n in rng.integers(1, 5, size=turns)]
    plain = sample_trajectory(tokens, task=task.id, group=group, attempt=attempt)

    def told(t: int, turn: Turn) -> Turn:
        entropies = rng.uniform(0.1, 2.0, size=tokens[t]).astype(np.float32)
        logprobs = -entropies[::-1]
        for array in (entropies, logprobs):
            array.setflags(write=False)
        return replace(
            turn,
            completion=replace(turn.completion, entropies=entropies, logprobs=logprobs),
            message=Message(role="assistant", content=f"act {rng.integers(2)}"),
            state_key=f"state {rng.integers(3) if t else 'first'}",
            signals={"tag": "plan" if rng.random() < 0.5 else "act", "subgoal": "find" if t < 2 else "mend"},
        )

    return replace(plain, turns=tuple(told(t, turn) for t, turn in enumerate(plain.turns)))


def sample_trajectory(
    tokens: Sequence[int],
    *,
    task: str = "task",
    group: str = "g",
    attempt: int = 0,
    stop: Stop = Stop.DONE,
    signals: Mapping[str, Any] | None = None,
    turn_signals: Sequence[Mapping[str, Any]] | None = None,
) -> Trajectory:
    """A made-up trajectory whose turn t samples `tokens[t]` tokens after two context tokens; arrays read-only."""

    def turn(t: int, n: int) -> Turn:
        arrays = (
            np.full(2, 7, dtype=np.int32),
            np.arange(10 * t, 10 * t + n, dtype=np.int32),
            np.full(n, -0.5, dtype=np.float32),
            np.zeros(n, dtype=np.int32),
        )
        for array in arrays:
            array.setflags(write=False)
        context, ids, logprobs, versions = arrays
        return Turn(
            context_ids=context,
            completion=Completion(
                token_ids=ids,
                logprobs=logprobs,
                versions=versions,
                sampling=Sampling(),
                finish="stop",
                seconds=0.0,
            ),
            message=Message(role="assistant", content="act"),
            observation=(Message(role="user", content="seen"),),
            signals=dict(turn_signals[t]) if turn_signals else {},
        )

    return Trajectory(
        task_id=task,
        group=group,
        attempt=attempt,
        turns=tuple(turn(t, n) for t, n in enumerate(tokens)),
        stop=stop,
        signals=dict(signals or {}),
    )


def with_observations(trajectory: Trajectory, extra: int) -> Trajectory:
    """The same trajectory with `extra` more masked tokens before every turn and more seen after it."""
    more = Message(role="user", content="more was seen")
    return replace(
        trajectory,
        turns=tuple(
            replace(
                turn,
                context_ids=np.concatenate([turn.context_ids, np.full(extra, 3, dtype=np.int32)]),
                observation=(*turn.observation, more),
            )
            for turn in trajectory.turns
        ),
    )
