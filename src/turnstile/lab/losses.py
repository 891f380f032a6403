"""Gradients of token losses on sampled batches of the lab's worlds, which `loss_study` compares with exact ones.

The gradient is that of a whole training step: groups, leave-one-out advantages, rows, weights, a forest, the loss, and
a softmax policy whose parameters are its logits. With `drift`, the policy differs from the one that sampled, as it does
in the later mini-batches of a step, or when the sampler's logits differ from the trainer's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.batching.forest import pack_prefix_trees
from turnstile.batching.rows import rows_of
from turnstile.credit.rloo import rloo
from turnstile.lab.controls import Controls, controls
from turnstile.lab.measure import label
from turnstile.lab.play import Drawn, Player, deal, draw_paths
from turnstile.lab.study import Setting
from turnstile.lab.world import F64, Truth, World, list_world, some_policy, sums, truth
from turnstile.lookup import KINDS, resolve
from turnstile.losses.base import Metrics, TokenLoss
from turnstile.losses.check import DECLARED, check_loss
from turnstile.types import F32, Row

_BUDGET = 1 << 20  # tokens; large enough that a step fits into one forest
PAST = 0.8
Weights = Callable[[Sequence[Row]], list[F32]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSubject:
    """A loss with its knobs bound. `broken` maps the number of each invariant that it breaks to a counterexample."""

    name: str
    loss: Callable[..., tuple[Tensor, Metrics]]  # (logprobs f32[N], batch)
    knobs: Mapping[str, Any] = field(default_factory=dict)
    broken: Mapping[int, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return label(self.name, self.knobs)


def loss_subject(kind: str, knobs: Mapping[str, Any] | None = None) -> LossSubject:
    """Return the loss of this kind with its knobs bound. Raises ConfigError if the kind is unknown."""
    loss: TokenLoss = resolve("loss", kind)
    given = dict(knobs or {})
    bound = functools.partial(loss, **given)
    return LossSubject(name=kind, loss=bound, knobs=given, broken=check_loss(bound))


def declared_losses(kind: str) -> list[LossSubject]:
    """Return one subject for each set of knobs that the kind declares, or one with its defaults if it declares none."""
    knobs = [each.knobs for each in DECLARED if each.kind == kind]
    return [loss_subject(kind, each) for each in knobs or [{}]]


def every_loss() -> list[LossSubject]:
    """Return every kind of the table with each set of knobs that it declares, or with its defaults."""
    return [each for kind in KINDS["loss"] for each in declared_losses(kind)]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossBench:
    """Batches of one world that are sampled under one policy and differentiated at another."""

    world: World
    theta: F64  # [D] the logits at which the gradient is taken
    true: Truth  # under the policy of `theta`
    before: Truth  # under the sampling policy
    drift: float
    policies: Mapping[str, F64]  # name of an extra with log-probabilities -> the policy that gives them, f64[D]
    past: float  # the mean entropy of earlier steps, in nats: `PAST` times the sampling policy's
    drawn: Drawn
    controls: Controls
    batches: list[Batch]
    logits: list[Tensor]  # i64[N] of each batch

    @property
    def visits(self) -> F64:
        """The number of tokens that the sampling policy samples at each node per episode, f64[nodes]."""
        return visits(self.world, self.before.probabilities)


def visits(world: World, probabilities: F64) -> F64:
    """Return how many tokens are sampled at each node per episode, f64[nodes]; tasks have equal weight."""
    share = probabilities[world.path_of] / len(world.process.starts)
    return sums(world.node[world.logits], share, world.nodes)


def loss_bench(
    setting: Setting,
    *,
    drift: float = 0.0,
    weights: Weights | None = None,
    proximal: Literal["sampler", "trainer"] = "sampler",
) -> LossBench:
    """Return a bench whose steps have two groups each, or one group per task if there are more tasks.

    `drift` is the standard deviation by which logits have moved since sampling, or by which those of sampler and
    trainer differ. `proximal` says which of the two is the policy before the step. `weights` returns the loss weights
    of tokens, [rows] -> f32[L] each; by default each is 1 / the number of attempts, as in the exact gradient.
    """
    world = list_world(setting.process)
    played = some_policy(world, seed=setting.seed)
    rng = np.random.default_rng([setting.seed, setting.size, 11])
    moved = np.random.default_rng([setting.seed, 17]).normal(size=len(played))  # the same for groups of every size
    theta = played + drift * moved
    before, true = (truth(world, world.policy(each)) for each in (played, theta))
    per_step = max(2, len(world.process.starts))
    paths = draw_paths(world, before.probabilities, rng, max(2, setting.groups // per_step), per_step, setting.size)
    drawn = deal(Player(world, world.policy(played)), paths, at=world.policy(theta))
    share = weights or (lambda rows: [row.loss_mask.astype(np.float32) / paths[0].size for row in rows])
    ends = np.cumsum(np.bincount(drawn.owner))
    logits = [torch.from_numpy(each) for each in np.split(drawn.logits, ends[:-1])]
    batches = [_batch(drawn, n, share) for n in range(len(paths))]
    policies = {
        "ref_logprobs": np.zeros_like(theta),  # the uniform policy
        "proximal_logprobs": played if proximal == "sampler" else theta,
        "teacher_logprobs": theta + true.gradient / np.linalg.norm(true.gradient),  # a better policy
        "feedback_logprobs": some_policy(world, seed=setting.seed + 1),  # an unrelated policy
    }
    pis = {name: world.policy(each) for name, each in policies.items()}
    logs = {name: torch.from_numpy(np.log(pi)).float() for name, pi in pis.items()}
    spoken, pi = visits(world, before.probabilities), world.policy(played)
    past = PAST * float(spoken @ sums(world.node, -pi * np.log(pi), world.nodes) / spoken.sum())
    return LossBench(
        world=world,
        theta=theta,
        true=true,
        before=before,
        drift=drift,
        policies=pis,
        past=past,
        drawn=drawn,
        controls=controls(drawn, before),
        batches=[
            replace(
                batch,
                extras={name: values[at] for name, values in logs.items()}
                | {"entropy_past": torch.full(at.shape, past, dtype=torch.float32)},
            )
            for batch, at in zip(batches, logits, strict=True)
        ],
        logits=logits,
    )


def _batch(drawn: Drawn, n: int, weights: Weights) -> Batch:
    """Return step n as the trainer would pack it."""
    advantages = rloo(drawn.steps[n], drawn.scores[n])
    trajectories = [trajectory for group in drawn.steps[n] for trajectory in group.trajectories]
    rows = [row for one, turns in zip(trajectories, advantages, strict=True) for row in rows_of(one, turns)]
    (batch,) = pack_prefix_trees(rows, weights(rows), budget=_BUDGET)
    return batch


def gradients(subject: LossSubject, bench: LossBench, *, scale: float = 1.0) -> F64:
    """Return minus the gradient of each step's sum(weights * loss), f64[steps, D]. `scale` scales the advantages."""
    result = np.zeros((len(bench.batches), len(bench.theta)))
    node = torch.from_numpy(bench.world.node)
    for n, (batch, logits) in enumerate(zip(bench.batches, bench.logits, strict=True)):
        theta = torch.from_numpy(bench.theta).clone().requires_grad_()
        logs = log_policy(theta, node)
        entropy = -torch.zeros(bench.world.nodes, dtype=logs.dtype).index_add(0, node, logs.exp() * logs)[node]
        given = replace(
            batch,
            advantages=batch.advantages * scale,
            extras={**batch.extras, "entropy": entropy[logits].float()},
        )
        loss, _ = subject.loss(logs[logits].float(), given)
        (loss * batch.weights).sum().backward()
        assert theta.grad is not None
        result[n] = -theta.grad.numpy()
    return result


def log_policy(theta: Tensor, node: Tensor) -> Tensor:
    """Return the log-probability of every token at its node, f64[D]."""
    return theta - torch.logsumexp(_by_node(theta, node), dim=1)[node]


def _by_node(theta: Tensor, node: Tensor) -> Tensor:
    """Return the logits by node, [nodes, size of the largest node], padded with minus infinity."""
    place = torch.arange(len(node)) - torch.searchsorted(node, node)
    table = torch.full((int(node[-1]) + 1, int(place.max()) + 1), -torch.inf, dtype=theta.dtype)
    return table.index_put((node, place), theta)
