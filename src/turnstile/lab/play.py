"""Conversion of a world's paths to the groups, trajectories and scores that estimators receive in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from turnstile.lab.attribution import contributions
from turnstile.lab.world import F64, I64, World, accumulate, expected_returns
from turnstile.types import F32, I32, Completion, Group, Message, Sampling, Score, Stop, Task, Trajectory, Turn

_SAMPLING = Sampling()
_WORDS = 100  # first token id of the observations, which are never sampled
Parent = tuple[int, int, int] | None
GroupScores = list[list[Score]]
_Array = TypeVar("_Array", I32, F32)


class Player:
    """Makes the tasks, trajectories, groups and scores of one world under one policy `pi` f64[D].

    Each path's trajectory is made once and then reused.
    """

    def __init__(self, world: World, pi: F64, scores: Sequence[Score] | None = None) -> None:
        """Prepare the world's tasks; `scores` [P] defaults to each path's own outcome and step rewards."""
        self.world, self.pi = world, pi
        self._logs = np.log(np.maximum(pi, 1e-300)).astype(np.float32)
        self._entropies = world.entropies(pi).astype(np.float32)
        self._words = {name: _WORDS + place for place, name in enumerate(_views(world))}
        self._scores = list(scores) if scores is not None else [plain_score(world, p) for p in range(len(world.paths))]
        self._trajectories: dict[int, Trajectory] = {}
        self._exact: list[tuple[list[F32], list[F32]]] = []
        self._contributed: list[F32] = []
        process = world.process
        self.tasks = [Task(id=f"{process.name}-{n}", env=process.name) for n in range(len(process.starts))]

    def trajectory(self, path: int) -> Trajectory:
        """Return the trajectory of a path, as attempt 0 with an empty group id."""
        if path not in self._trajectories:
            self._trajectories[path] = self._make(path)
        return self._trajectories[path]

    def group(self, name: str, paths: Sequence[int], parents: Sequence[Parent] = ()) -> Group:
        """Return a group with these paths as attempts 0, 1, ...; all are of one task.

        `parents` gives, for each attempt, the point at which it branched from another one, or None.
        """
        task = self.tasks[self.world.task[paths[0]]]
        return Group(
            id=name,
            task=task,
            trajectories=tuple(
                replace(self.trajectory(path), group=name, attempt=i, parent=parents[i] if parents else None)
                for i, path in enumerate(paths)
            ),
        )

    def scores(self, paths: Sequence[int]) -> list[Score]:
        return [self._scores[path] for path in paths]

    def exact(self, path: int) -> tuple[list[F32], list[F32]]:
        """Return an exact critic's values before and after each sampled token of a path, both as [turn] -> f32[n].

        A value is the expected return to go of the agent whose turn it is.
        """
        if not self._exact:
            world = self.world
            probabilities = world.probabilities(self.pi)
            both = [self._by_turn(expected_returns(world, probabilities, at)) for at in (world.before, world.after)]
            self._exact = list(zip(*both, strict=True))
        return self._exact[path]

    def turn_contributions(self, path: int) -> F32:
        """Return how much each turn of a path contributes to the outcome, f32[K], according to `contributions`."""
        if not self._contributed:
            found = contributions(self.world, self.world.probabilities(self.pi))
            self._contributed = [_frozen(own.astype(np.float32)) for own in found]
        return self._contributed[path]

    def _by_turn(self, flat: F64) -> list[list[F32]]:
        """Return the values f64[tokens of all paths] as [path][turn] -> f32[n]."""
        tokens = iter(flat.astype(np.float32))
        return [
            [_frozen(np.array([next(tokens) for _ in step.tokens], dtype=np.float32)) for step in found.steps]
            for found in self.world.paths
        ]

    def _make(self, path: int) -> Trajectory:
        process, found = self.world.process, self.world.paths[path]
        views = [process.view(step.state) for step in found.steps]
        turns = []
        for t, step in enumerate(found.steps):
            logits = np.array(step.logits)
            following = views[t + 1] if t + 1 < len(views) else "the end"
            turns.append(
                Turn(
                    context_ids=_frozen(np.array([self._words[views[t]]], dtype=np.int32)),
                    completion=Completion(
                        token_ids=_frozen(np.array(step.tokens, dtype=np.int32)),
                        logprobs=_frozen(self._logs[logits]),
                        versions=_frozen(np.zeros(len(step.tokens), dtype=np.int32)),
                        sampling=_SAMPLING,
                        finish="stop",
                        seconds=0.0,
                        entropies=_frozen(self._entropies[logits]),
                    ),
                    message=Message(role="assistant", content=" ".join(map(str, step.tokens))),
                    observation=(Message(role="user", content=following),),
                    rewards={"step": step.reward},
                    signals={
                        "tag": process.tag(step.state, step.action),
                        "subgoal": process.subgoal(step.state),
                        "potential": process.potential(found.steps[t + 1].state) if t + 1 < len(views) else 0.0,
                    },
                    state_key=process.key(step.state),
                    agent=step.seat,
                )
            )
        return Trajectory(
            task_id=self.tasks[self.world.task[path]].id,
            group="",
            attempt=0,
            turns=tuple(turns),
            stop=Stop.DONE,
            signals={"outcome": sum(found.outcome.values())},
        )


def plain_score(world: World, path: int) -> Score:
    """Return the score of a path from its own outcome and step rewards, without weights or gates."""
    found = world.paths[path]
    turn = _frozen(np.array([step.reward for step in found.steps], dtype=np.float32))
    outcome = dict(found.outcome)
    return Score(outcome=outcome, turn=turn, total=sum(outcome.values()) + float(turn.sum(dtype=np.float64)))


def _frozen(array: _Array) -> _Array:
    array.setflags(write=False)
    return array


def _views(world: World) -> list[str]:
    return list(dict.fromkeys(world.process.view(step.state) for path in world.paths for step in path.steps))


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """N sampled steps of B groups with G attempts each.

    Tasks alternate among the groups of a step; callers choose B so that every task is represented.
    """

    player: Player
    at: F64  # [D] the policy whose log-probabilities are differentiated: the player's own or a later one
    paths: I64  # [N, B, G]
    steps: list[list[Group]]  # [N][B]
    scores: list[GroupScores]  # [N][B][G]
    owner: I64  # [tokens] the step of each token
    tokens: I64  # [tokens] the index of each token among the tokens of all paths

    @property
    def logits(self) -> I64:
        """The index of each token's logit, i64[tokens]."""
        return self.player.world.logits[self.tokens]

    def aux(self, n: int) -> dict[str, Any]:
        """Return the predictions that exact auxiliary models would make for step n.

        [trajectory][turn] -> f32[n]: `values`, and `implicit`, the change of value that each token causes. [trajectory]
        -> f32[K]: `q` and `v` of each turn, and `progress`, its contribution to the outcome.
        """
        paths = self.paths[n].ravel().tolist()
        exact = [self.player.exact(path) for path in paths]
        return {
            "values": [before for before, _ in exact],
            "implicit": [[b - a for a, b in zip(*turns, strict=True)] for turns in exact],
            "q": [np.array([own[-1] for own in after], dtype=np.float32) for _, after in exact],
            "v": [np.array([own[0] for own in before], dtype=np.float32) for before, _ in exact],
            "progress": [self.player.turn_contributions(path) for path in paths],
        }

    def gradients(self, advantages: F64) -> F64:
        """Return each step's gradient, f64[N, D]: sum of A * gradient of the log-probability, averaged over attempts.

        `advantages` holds all tokens in the order of steps, groups, attempts, turns and tokens.
        """
        world, (n, b, g) = self.player.world, self.paths.shape
        return accumulate(world, self.at, self.owner, self.logits, advantages / (b * g), n)


def deal(
    player: Player, paths: I64, *, at: F64 | None = None, parents: Sequence[Sequence[Sequence[Parent]]] = ()
) -> Drawn:
    """Return the steps made of `paths` [N, B, G]; `parents` [N][B][G] says where attempts branched, if any did.

    `at` f64[D] is the policy whose log-probabilities are differentiated, by default the player's own.
    """
    world, (n, b, g) = player.world, paths.shape
    steps = [
        [player.group(f"g{s}-{k}", paths[s, k].tolist(), parents[s][k] if parents else ()) for k in range(b)]
        for s in range(n)
    ]
    ends = np.append(world.first[1:], len(world.logits))
    flat = paths.ravel()
    lengths = ends[flat] - world.first[flat]
    begins = np.repeat(world.first[flat] - np.append(0, np.cumsum(lengths)[:-1]), lengths)
    return Drawn(
        player=player,
        at=player.pi if at is None else at,
        paths=paths,
        steps=steps,
        scores=[[player.scores(paths[s, k].tolist()) for k in range(b)] for s in range(n)],
        owner=np.repeat(np.arange(n), lengths.reshape(n, b * g).sum(axis=1)),
        tokens=begins + np.arange(int(lengths.sum())),
    )


def draw_paths(world: World, probabilities: F64, rng: np.random.Generator, n: int, groups: int, size: int) -> I64:
    """Return sampled paths [n, groups, size]; group k of every step is of task k modulo the number of tasks.

    `probabilities` f64[P] are those of each path given its task.
    """
    tasks = len(world.process.starts)
    result = np.zeros((n, groups, size), dtype=np.int64)
    for k in range(groups):
        own = np.flatnonzero(world.task == k % tasks)
        share = probabilities[own] / probabilities[own].sum()
        result[:, k] = own[np.minimum(np.searchsorted(np.cumsum(share), rng.random((n, size))), len(own) - 1)]
    return result


def branch_paths(
    world: World, probabilities: F64, rng: np.random.Generator, n: int, groups: int, size: int
) -> tuple[I64, list[list[list[Parent]]]]:
    """Return sampled paths [n, groups, size] and parents; the second half of each group branches from the first.

    Each branched attempt shares its parent's history up to a random turn and is sampled independently from there. If
    the parent ended before that turn, the attempt is sampled from all paths of the task that did. So each attempt on
    its own is distributed as if sampled from the start.
    """
    roots = draw_paths(world, probabilities, rng, n, groups, size - size // 2)
    longest = max(len(path.steps) for path in world.paths)
    cuts = rng.integers(1, max(2, longest), size=(n, groups, size // 2))
    alike = _same_history(world, longest)
    paths = np.concatenate([roots, roots[:, :, : size // 2]], axis=2)
    parents: list[list[list[Parent]]] = [[[None] * size for _ in range(groups)] for _ in range(n)]
    for s, k, i in np.ndindex(*cuts.shape):
        cut, root = int(cuts[s, k, i]), int(roots[s, k, i])
        same = alike[cut][root]
        weight = np.cumsum(probabilities[same])
        at = size - size // 2 + i
        paths[s, k, at] = same[min(int(np.searchsorted(weight, rng.random() * weight[-1])), len(same) - 1)]
        if cut < len(world.paths[root].steps):
            parents[s][k][at] = (i, cut, 0)
    return paths, parents


def _same_history(world: World, longest: int) -> list[list[I64]]:
    """Return, for each turn and path, the paths of its task with the same history up to that turn.

    For a path that has already ended, these are all paths of its task that have ended.
    """
    found = []
    for cut in range(longest):
        keys = [
            (task, path.steps[:cut], path.steps[cut].state) if cut < len(path.steps) else (task,)
            for task, path in zip(world.task.tolist(), world.paths, strict=True)
        ]
        members: dict[object, list[int]] = {}
        for place, key in enumerate(keys):
            members.setdefault(key, []).append(place)
        arrays = {key: np.array(places, dtype=np.int64) for key, places in members.items()}
        found.append([arrays[key] for key in keys])
    return found
