"""Enumeration of a process: every path, its probability under a policy, and the exact gradient of the return.

The policy is a softmax over the next token at every *node*: a view together with the tokens of the turn so far. Its
parameters f64[D] are the logits of all nodes; those of one node are adjacent. The derivative of a token's
log-probability with respect to its node's logits is 1 at the token's own logit, minus the probabilities, so no
automatic differentiation is needed. P is the number of paths, K the largest number of turns in a path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from turnstile.errors import ConfigError
from turnstile.lab.process import Process, State

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
MOST_PATHS = 20_000
Weigh = Literal["value", "to_go", "outcome"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One turn: state, action, the action's tokens and their logit indices, step reward and acting seat."""

    state: State
    action: int
    tokens: tuple[int, ...]
    logits: tuple[int, ...]  # the index in [D] of each token's logit
    reward: float
    seat: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Path:
    """One possible episode. `chance` is the product of its transition probabilities, without the policy's."""

    steps: tuple[Step, ...]
    chance: float
    outcome: Mapping[str, float]

    def value(self, seat: str) -> float:
        """Return the total that the tokens of `seat` are credited with: its outcome plus its own step rewards."""
        return self.outcome.get(seat, 0.0) + sum(step.reward for step in self.steps if step.seat == seat)

    def to_go(self, t: int) -> float:
        """Return the return to go of the agent that acts in turn t, including the reward of this turn."""
        seat = self.steps[t].seat
        ahead = sum(step.reward for step in self.steps[t:] if step.seat == seat)
        return self.outcome.get(seat, 0.0) + ahead


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """All paths of a process, grouped by task, with index arrays for vectorised formulas."""

    process: Process
    paths: tuple[Path, ...]
    task: I64  # [P] index of each path's start
    node: I64  # [D] index of each logit's node
    names: tuple[str, ...]  # [D] "view | tokens"
    logits: I64  # [tokens of all paths] index of each token's logit
    path_of: I64  # [tokens of all paths]
    turn_of: I64  # [tokens of all paths]
    before: I64  # [tokens of all paths] the situation before each token: a state and the turn's tokens so far
    after: I64  # [tokens of all paths] the situation after each token: the same state, and one token more
    first: I64  # [P] index of each path's first token
    seats: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """The number of parameters D."""
        return len(self.node)

    @property
    def nodes(self) -> int:
        return int(self.node[-1]) + 1

    def policy(self, theta: F64) -> F64:
        """Return the probability of every token at its node, f64[D]."""
        starts = np.flatnonzero(np.diff(self.node, prepend=-1))
        shifted = np.exp(theta - np.maximum.reduceat(theta, starts)[self.node])
        return shifted / np.add.reduceat(shifted, starts)[self.node]

    def entropies(self, pi: F64) -> F64:
        """Return the entropy of each logit's node in nats, f64[D]."""
        logs = np.log(np.maximum(pi, 1e-300))
        return -sums(self.node, pi * logs, self.nodes)[self.node]

    def probabilities(self, pi: F64) -> F64:
        """Return the probability of each path given its task, f64[P]."""
        chance = np.array([path.chance for path in self.paths])
        logs = np.add.reduceat(np.log(np.maximum(pi, 1e-300))[self.logits], self.first)
        return chance * np.exp(logs)

    def mix_probabilities(self, pi: F64, other: F64, seat: str) -> F64:
        """Return the probability of each path given its task, f64[P], with `seat` playing `pi` and the rest `other`."""
        own = np.array([path.steps[t].seat == seat for path in self.paths for t in range(len(path.steps))])
        turns = np.array([len(path.steps) for path in self.paths])
        place = np.append(0, np.cumsum(turns)[:-1])[self.path_of] + self.turn_of
        chosen = np.where(own[place], pi[self.logits], other[self.logits])
        chance = np.array([path.chance for path in self.paths])
        return chance * np.exp(np.add.reduceat(np.log(np.maximum(chosen, 1e-300)), self.first))

    def scores(self, pi: F64, weights: F64) -> F64:
        """Return the sum over each path's tokens of weight * gradient of the log-probability, f64[P, D].

        `weights` is f64[P, K], one weight per turn, or f64[tokens of all paths].
        """
        each = weights[self.path_of, self.turn_of] if weights.ndim == 2 else weights
        return accumulate(self, pi, self.path_of, self.logits, each, len(self.paths))

    def turn_weights(self, kind: Weigh) -> F64:
        """Return f64[P, K]: the return (`value`), return to go (`to_go`) or outcome (`outcome`) of each turn's agent.

        Entries after the end of a path are 0.
        """
        result = np.zeros((len(self.paths), max(len(path.steps) for path in self.paths)))
        for p, path in enumerate(self.paths):
            for t, step in enumerate(path.steps):
                outcome = path.outcome.get(step.seat, 0.0)
                result[p, t] = {"value": path.value(step.seat), "to_go": path.to_go(t), "outcome": outcome}[kind]
        return result


def accumulate(world: World, pi: F64, owner: I64, logits: I64, weights: F64, owners: int) -> F64:
    """Return the sum over each owner's tokens of weight * (one-hot of the logit - probabilities), f64[owners, D].

    The probabilities are those of the token's node.
    """
    d, m = world.parameters, world.nodes
    own = sums(owner * d + logits, weights, owners * d).reshape(owners, d)
    at = sums(owner * m + world.node[logits], weights, owners * m).reshape(owners, m)
    result: F64 = own - at[:, world.node] * pi
    return result


def sums(index: I64, weights: F64, size: int) -> F64:
    """Return the sum of the weights for each value of `index`, which is below `size`: f64[size]."""
    return np.bincount(index, weights=weights, minlength=size).astype(np.float64, copy=False)


def list_world(process: Process) -> World:
    """Enumerate a process. Raises ConfigError if it has more than 20,000 paths."""
    nodes: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}  # (view, tokens so far) -> token -> logit
    _fill_nodes(process, nodes)
    paths: list[Path] = []
    task: list[int] = []
    for place, start in enumerate(process.starts):
        for path in _paths(process, nodes, start, (), 1.0):
            paths.append(path)
            task.append(place)
            if len(paths) > MOST_PATHS:
                raise ConfigError(f"process {process.name!r} with {dict(process.knobs)} has over {MOST_PATHS} paths")
    situations: dict[tuple[State, tuple[int, ...]], int] = {}
    rows = [
        (p, t, logit, _situation(situations, step, n), _situation(situations, step, n + 1))
        for p, path in enumerate(paths)
        for t, step in enumerate(path.steps)
        for n, logit in enumerate(step.logits)
    ]
    path_of, turn_of, logits, before, after = np.array(rows, dtype=np.int64).T
    return World(
        process=process,
        paths=tuple(paths),
        task=np.array(task, dtype=np.int64),
        node=np.array([place for place, by in enumerate(nodes.values()) for _ in by], dtype=np.int64),
        names=tuple(
            f"{view} | {' '.join(map(str, (*tokens, token)))}" for (view, tokens), by in nodes.items() for token in by
        ),
        logits=logits,
        path_of=path_of,
        turn_of=turn_of,
        before=before,
        after=after,
        first=np.flatnonzero(np.diff(path_of, prepend=-1)),
        seats=tuple(dict.fromkeys(step.seat for path in paths for step in path.steps)),
    )


def _fill_nodes(process: Process, nodes: dict[tuple[str, tuple[int, ...]], dict[int, int]]) -> None:
    """Fill `nodes` with every reachable node, and number its logits consecutively."""
    seen: set[State] = set()
    waiting = list(process.starts)
    menus: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    while waiting:
        state = waiting.pop(0)
        if state in seen:
            continue
        seen.add(state)
        for index, action in enumerate(process.menu(state)):
            for n, token in enumerate(action):
                menus.setdefault((process.view(state), action[:n]), {})[token] = 0
            waiting += [branch.state for branch in process.step(state, index) if branch.state is not None]
    number = 0
    for node, tokens in menus.items():
        nodes[node] = {token: number + place for place, token in enumerate(tokens)}
        number += len(tokens)


def _paths(
    process: Process,
    nodes: Mapping[tuple[str, tuple[int, ...]], Mapping[int, int]],
    state: State,
    so_far: tuple[Step, ...],
    chance: float,
) -> Iterator[Path]:
    for index, action in enumerate(process.menu(state)):
        logits = tuple(nodes[process.view(state), action[:n]][token] for n, token in enumerate(action))
        for branch in process.step(state, index):
            step = Step(
                state=state, action=index, tokens=action, logits=logits, reward=branch.reward, seat=process.seat(state)
            )
            here = chance * branch.chance
            if branch.state is None:
                yield Path(steps=(*so_far, step), chance=here, outcome=dict(branch.outcome or {}))
            else:
                yield from _paths(process, nodes, branch.state, (*so_far, step), here)


def _situation(known: dict[tuple[State, tuple[int, ...]], int], step: Step, count: int) -> int:
    return known.setdefault((step.state, step.tokens[:count]), len(known))


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """Exact quantities of a world under one policy. Tasks have equal weight."""

    value: float  # the expected total, summed over seats
    outcome: float  # the expected outcome, summed over seats
    gradient: F64  # [D] of each seat's own return with respect to its own tokens; with one seat, of `value`
    outcome_gradient: F64  # [D] the same for the outcome alone
    probabilities: F64  # [P] the probability of each path given its task
    baseline: F64  # [tokens of all paths] the expected return to go before each token
    advantage: F64  # [tokens of all paths] by how much each token changes it


def truth(world: World, pi: F64) -> Truth:
    """Return the exact quantities of a world under the policy `pi` f64[D]."""
    p = world.probabilities(pi)
    share = p / len(world.process.starts)
    baseline = expected_returns(world, p, world.before)
    outcome = np.array([sum(path.outcome.values()) for path in world.paths])
    steps = np.array([sum(step.reward for step in path.steps) for path in world.paths])
    return Truth(
        value=float(share @ (outcome + steps)),
        outcome=float(share @ outcome),
        gradient=share @ world.scores(pi, world.turn_weights("value")),
        outcome_gradient=share @ world.scores(pi, world.turn_weights("outcome")),
        probabilities=p,
        baseline=baseline,
        advantage=expected_returns(world, p, world.after) - baseline,
    )


def expected_returns(world: World, probabilities: F64, situation: I64) -> F64:
    """Return the expected return to go of the acting agent in each situation, f64[tokens of all paths].

    `situation` is `world.before` or `world.after`.
    """
    to_go = world.turn_weights("to_go")[world.path_of, world.turn_of]
    weight = probabilities[world.path_of]
    size = int(situation.max()) + 1
    total, mass = sums(situation, weight * to_go, size), sums(situation, weight, size)
    return np.divide(total, mass, out=np.zeros(size), where=mass > 0)[situation]


def some_policy(world: World, *, seed: int = 0, spread: float = 0.5) -> F64:
    """Return the logits f64[D] of a random policy: normal with mean 0 and standard deviation `spread`."""
    return np.random.default_rng([seed, 7]).normal(scale=spread, size=world.parameters)
