"""Token losses on the lab's worlds: the gradient of a loss on real batches, held against the exact one.

What is differentiated is the whole way of a training step: groups, leave-one-out advantages, rows, weights, a forest,
the loss, and behind it a softmax policy with the logits as its parameters. With `drift` the policy has moved since it
played, as in the later mini-batches of a step, and the truth is the gradient where it stands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.batching.forest import plant
from turnstile.batching.rows import rows_of
from turnstile.credit.rloo import rloo
from turnstile.errors import ConfigError
from turnstile.evaluation.lab.controls import Controls, controls
from turnstile.evaluation.lab.judge import Figures, judge
from turnstile.evaluation.lab.measure import label
from turnstile.evaluation.lab.play import Drawn, Player, deal, draw_paths
from turnstile.evaluation.lab.study import Line, Setting, line
from turnstile.evaluation.lab.world import F64, Truth, World, list_world, some_policy, truth
from turnstile.lookup import KINDS, resolve
from turnstile.losses.base import TokenLoss
from turnstile.losses.check import DECLARED, check_loss
from turnstile.types import F32, Row

_BUDGET = 1 << 20  # everything in one forest
DRIFTS = (0.0, 0.03, 0.1)
Weights = Callable[[Sequence[Row]], list[F32]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSubject:
    """A loss with its knobs. `broken`: the invariants it breaks, number -> what was seen."""

    name: str
    loss: TokenLoss
    knobs: Mapping[str, Any] = field(default_factory=dict)
    broken: Mapping[int, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return label(self.name, self.knobs)


def loss_subject(kind: str, knobs: Mapping[str, Any] | None = None) -> LossSubject:
    """The loss that `kind` names. Raises ConfigError for an unknown one."""
    loss: TokenLoss = resolve("loss", kind)
    given = dict(knobs or {})
    return LossSubject(name=kind, loss=loss, knobs=given, broken=check_loss(loss, given))


def declared_losses(kind: str) -> list[LossSubject]:
    """`kind` with each set of knobs that it declares; as it is by default where it declares none."""
    knobs = [each.knobs for each in DECLARED if each.kind == kind]
    return [loss_subject(kind, each) for each in knobs or [{}]]


def every_loss() -> list[LossSubject]:
    """Every kind of the table with each set of knobs that it declares."""
    return [each for kind in KINDS["loss"] for each in declared_losses(kind)]


@dataclass(frozen=True, kw_only=True, slots=True)
class LossBench:
    """Batches of one world, played under one policy and differentiated at another."""

    world: World
    theta: F64  # [D] where the gradient is taken
    true: Truth  # there
    drawn: Drawn
    controls: Controls
    batches: list[Batch]
    logits: list[Tensor]  # i64[N] of each batch


def loss_bench(setting: Setting, *, drift: float = 0.0, weights: Weights | None = None) -> LossBench:
    """Steps of two groups (or one of each task). `drift`: the root mean square by which each logit has moved since.

    `weights` fixes the tokens' shares of a step, [rows] -> f32[L] each; by default every token counts one over the
    attempts, which is what the exact gradient does.
    """
    world = list_world(setting.process)
    played = some_policy(world, seed=setting.seed)
    rng = np.random.default_rng([setting.seed, setting.size, 11])
    theta = played + drift * rng.normal(size=len(played))
    before, true = (truth(world, world.policy(each)) for each in (played, theta))
    per_step = max(2, len(world.process.starts))
    paths = draw_paths(world, before.probabilities, rng, max(2, setting.groups // per_step), per_step, setting.size)
    drawn = deal(Player(world, world.policy(played)), paths, at=world.policy(theta))
    share = weights or (lambda rows: [row.loss_mask.astype(np.float32) / paths[0].size for row in rows])
    ends = np.cumsum(np.bincount(drawn.owner))
    logits = [torch.from_numpy(each) for each in np.split(drawn.logits, ends[:-1])]
    batches = [_batch(drawn, n, share) for n in range(len(paths))]
    policies = {
        "ref_logprobs": np.zeros_like(theta),  # a reference that has no preference
        "proximal_logprobs": played,
        "teacher_logprobs": theta + true.gradient / np.linalg.norm(true.gradient),  # one that does better
    }
    logs = {name: torch.from_numpy(np.log(world.policy(each))).float() for name, each in policies.items()}
    return LossBench(
        world=world,
        theta=theta,
        true=true,
        drawn=drawn,
        controls=controls(drawn, before),
        batches=[
            replace(batch, extras={name: values[at] for name, values in logs.items()})
            for batch, at in zip(batches, logits, strict=True)
        ],
        logits=logits,
    )


def _batch(drawn: Drawn, n: int, weights: Weights) -> Batch:
    """One step as the trainer would plant it."""
    advantages, _ = rloo(drawn.steps[n], drawn.scores[n], {}, {})
    trajectories = [trajectory for group in drawn.steps[n] for trajectory in group.trajectories]
    rows = [row for one, turns in zip(trajectories, advantages, strict=True) for row in rows_of(one, turns)]
    (batch,) = plant(rows, weights(rows), budget=_BUDGET)
    return batch


def gradients(subject: LossSubject, bench: LossBench, *, scale: float = 1.0) -> F64:
    """Minus the gradient of each step's sum(weights * loss), f64[steps, D]; `scale` multiplies the advantages."""
    result = np.zeros((len(bench.batches), len(bench.theta)))
    node = torch.from_numpy(bench.world.node)
    for n, (batch, logits) in enumerate(zip(bench.batches, bench.logits, strict=True)):
        theta = torch.from_numpy(bench.theta).clone().requires_grad_()
        logs = theta - torch.logsumexp(_by_node(theta, node), dim=1)[node]
        entropy = -torch.zeros(bench.world.nodes, dtype=logs.dtype).index_add(0, node, logs.exp() * logs)[node]
        given = replace(
            batch,
            advantages=batch.advantages * scale,
            extras={**batch.extras, "entropy": entropy[logits].float()},
        )
        loss, _ = subject.loss(logs[logits].float(), given, **subject.knobs)
        (loss * batch.weights).sum().backward()
        assert theta.grad is not None
        result[n] = -theta.grad.numpy()
    return result


def _by_node(theta: Tensor, node: Tensor) -> Tensor:
    """The logits by node, [nodes, most of one], with minus infinity where there are fewer."""
    place = torch.arange(len(node)) - torch.searchsorted(node, node)
    table = torch.full((int(node[-1]) + 1, int(place.max()) + 1), -torch.inf, dtype=theta.dtype)
    return table.index_put((node, place), theta)


def measure_loss(subject: LossSubject, bench: LossBench) -> Figures:
    """What is to be known of `subject` on `bench`. Raises TurnstileError where it wants what the lab does not have, or
    does not follow the advantages."""
    if not follows_advantage(subject, bench):
        raise ConfigError("a regulariser: its gradient does not depend on the advantages")
    found = gradients(subject, bench)
    noise = float(found.var(axis=0, ddof=1).sum()) * bench.drawn.paths[0].size
    return judge(bench.controls.mean(found), noise, bench.true, exact=False)


def follows_advantage(subject: LossSubject, bench: LossBench) -> bool:
    """Whether the gradient depends on the advantages at all: a regulariser's does not."""
    few = replace(bench, batches=bench.batches[:8], logits=bench.logits[:8])
    return not np.allclose(gradients(subject, few), gradients(subject, few, scale=-2.0), atol=1e-12)


def study_losses(
    subjects: Sequence[LossSubject],
    settings: Sequence[Setting],
    *,
    drifts: Sequence[float] = DRIFTS,
    done: Callable[[Line], None] = lambda found: None,
) -> list[Line]:
    """Every loss that follows the advantages in every setting, where the policy stands and after it has moved."""
    lines = []
    for setting in settings:
        for drift in drifts:
            bench = loss_bench(setting, drift=drift)
            for each in subjects:
                lines.append(line(setting, each, functools.partial(measure_loss, each, bench), drift=drift))
                done(lines[-1])
    return lines
