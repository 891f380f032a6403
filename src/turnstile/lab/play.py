"""Paths of a world as the groups, trajectories and scores that estimators receive in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from turnstile.lab.attribution import contributions
from turnstile.lab.world import F64, I64, World, accumulate, expected_returns
from turnstile.types import F32, I32, Completion, Group, Message, Sampling, Score, Stop, Task, Trajectory, Turn

_SAMPLING = Sampling()
_WORDS = 100  # token ids from here on are the observations', which are never sampled
Parent = tuple[int, int, int] | None
GroupScores = list[list[Score]]
_Array = TypeVar("_Array", I32, F32)


class Player:
    """A factory of the objects of one world under one policy `pi` f64[D]; those of a path are made once."""

    def __init__(self, world: World, pi: F64, scores: Sequence[Score] | None = None) -> None:
        """Make the factory; `scores` [P] are the scores of the paths, by default their own outcome and step rewards."""
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
        """Return the trajectory of a path, as attempt 0 of no group."""
        if path not in self._trajectories:
            self._trajectories[path] = self._make(path)
        return self._trajectories[path]

    def group(self, name: str, paths: Sequence[int], parents: Sequence[Parent] = ()) -> Group:
        """Return a group with these paths as attempts 0, 1, ..., all of one task; `parents` says which branched."""
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
        """Return an exact critic's values before and after each sampled token of a path, [turn] -> f32[n].

        The value is the expected return of the turn's agent from that turn on.
        """
        if not self._exact:
            world = self.world
            probabilities = world.probabilities(self.pi)
            both = [self._by_turn(expected_returns(world, probabilities, at)) for at in (world.before, world.after)]
            self._exact = list(zip(*both, strict=True))
        return self._exact[path]

    def turn_contributions(self, path: int) -> F32:
        """Return what each turn of a path adds to the outcome, f32[K], by the least squares of `contributions`."""
        if not self._contributed:
            found = contributions(self.world, self.world.probabilities(self.pi))
            self._contributed = [_frozen(own.astype(np.float32)) for own in found]
        return self._contributed[path]

    def _by_turn(self, flat: F64) -> list[list[F32]]:
        """Return f64[tokens of all paths] as [path][turn] -> f32[n]."""
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
    """Return a path's own outcome and step rewards, added up."""
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
    """Sampled steps: N steps of B groups of G attempts.

    Tasks alternate, so N and B are chosen such that every step holds each task equally often.
    """

    player: Player
    at: F64  # [D] the policy whose log-probabilities are differentiated: the player's own, or a later one
    paths: I64  # [N, B, G]
    steps: list[list[Group]]  # [N][B]
    scores: list[GroupScores]  # [N][B][G]
    owner: I64  # [tokens] the step of each token
    tokens: I64  # [tokens] its place among the tokens of all paths

    @property
    def logits(self) -> I64:
        """[tokens]: the index of each token's logit."""
        return self.player.world.logits[self.tokens]

    def aux(self, n: int) -> dict[str, Any]:
        """Return what exact auxiliary models would add to step n.

        [trajectory][turn] -> f32[n]: `values`, and `implicit`, by which each token changes them. [trajectory] ->
        f32[K]: `q` and `v` of turns, and `progress`, their contributions to the outcome.
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
        """Return each step's update, f64[N, D]: sum of A * gradient of the log-probability, over the step's attempts.

        The advantages are of all tokens in the order of steps, groups, attempts, turns and tokens.
        """
        world, (n, b, g) = self.player.world, self.paths.shape
        return accumulate(world, self.at, self.owner, self.logits, advantages / (b * g), n)


def deal(
    player: Player, paths: I64, *, at: F64 | None = None, parents: Sequence[Sequence[Sequence[Parent]]] = ()
) -> Drawn:
    """Return the objects of these paths, [N, B, G]; `parents` [N][B][G] if attempts branched from each other."""
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
    """Sample paths [n, groups, size] from `probabilities` f64[P]; group k of every step is of task k mod tasks."""
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
    """Sample paths [n, groups, size] and their parents, where the later half of a group branches from the earlier.

    Attempt i of the later half equals attempt i - size/2 up to a random turn, and is sampled by itself from there; if
    its parent ended before that turn, it is sampled among all paths that did. So each attempt alone is distributed as
    one that is sampled from the start.
    """
    roots = draw_paths(world, probabilities, rng, n, groups, size - size // 2)
    longest = max(len(path.steps) for path in world.paths)
    cuts = rng.integers(1, max(2, longest), size=(n, groups, size // 2))
    alike = _alike(world, longest)
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


def _alike(world: World, longest: int) -> list[list[I64]]:
    """Return, by turn and path, the paths of its task with the same history up to that turn.

    For a path that has ended by then, these are all paths that have.
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
