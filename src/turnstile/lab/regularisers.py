"""Measurement of losses that ignore advantages against the exact gradients of the quantities that they regularise.

Each regularises a number at every node, such as a divergence from a reference. There are two objectives. The first is
the sum over the nodes visited while sampling, which is all that a token loss can see. The second (`whole`) is the
expectation over episodes of the differentiated policy, in which a token also accounts for the states that it leads to.
The value loss has its own objective: the squared distance of each node's value from the exact one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnstile.errors import ConfigError
from turnstile.lab.controls import Adjusted
from turnstile.lab.judge import Figures, judge
from turnstile.lab.losses import LossBench, LossSubject, gradients, log_policy, visits
from turnstile.lab.world import F64, sums

OFF = 0.5
"""The standard deviation of the error in a critic's values before the step."""
Numbers = Callable[[Tensor, LossBench, Mapping[str, Any]], Tensor]
"""(log-probabilities f64[D], bench, the loss's knobs) -> one number for each node, f64[nodes]."""


def _by_node(bench: LossBench, values: Tensor) -> Tensor:
    return torch.zeros(bench.world.nodes, dtype=values.dtype).index_add(0, torch.from_numpy(bench.world.node), values)


def _divergence_from(name: str) -> Numbers:
    """Return a function that computes KL(policy || the policy `name`) at each node, f64[nodes]."""

    def numbers(logs: Tensor, bench: LossBench, knobs: Mapping[str, Any]) -> Tensor:
        return _by_node(bench, logs.exp() * (logs - torch.from_numpy(bench.policies[name]).log()))

    return numbers


def _forward_divergence(logs: Tensor, bench: LossBench, knobs: Mapping[str, Any]) -> Tensor:
    reference = torch.from_numpy(bench.policies["ref_logprobs"])
    return _by_node(bench, reference * (reference.log() - logs))


def _distance_from_band(logs: Tensor, bench: LossBench, knobs: Mapping[str, Any]) -> Tensor:
    entropy = -_by_node(bench, logs.exp() * logs)
    low, high = (float(knobs.get(name, default)) * bench.past for name, default in (("low", 0.8), ("high", 1.2)))
    return torch.maximum((low - entropy).relu(), (entropy - high).relu())


REGULARISERS: Mapping[str, Numbers] = {
    "kl": _divergence_from("ref_logprobs"),
    "entropy": lambda logs, bench, _: _by_node(bench, logs.exp() * logs),
    "entropy_band": _distance_from_band,
    "forward_kl": _forward_divergence,
    "distill": _divergence_from("teacher_logprobs"),
    "self_distill": _divergence_from("feedback_logprobs"),
}
"""Kind of loss -> the quantity that it regularises, with the sign of a loss."""
VALUE = "value"


def measure_regulariser(subject: LossSubject, bench: LossBench, *, whole: bool = False) -> Figures:
    """Return the figures of a loss of `REGULARISERS` on `bench`, against the gradient of the sum over visited nodes.

    With `whole`, they are against that of the expectation over whole episodes. Raises ConfigError if the exact gradient
    vanishes.
    """
    theta = torch.from_numpy(bench.theta).clone().requires_grad_()
    numbers = REGULARISERS[subject.name](log_policy(theta, torch.from_numpy(bench.world.node)), bench, subject.knobs)
    node_visits = visits(bench.world, bench.true.probabilities) if whole else bench.visits
    (-(torch.from_numpy(node_visits) * numbers).sum()).backward()
    assert theta.grad is not None
    exact: F64 = theta.grad.numpy()
    if whole:
        exact = exact - _through_states(bench, numbers.detach().numpy())
    found = gradients(subject, bench)
    return _judge_gradient(bench, found, bench.controls.mean(found), exact)


def _through_states(bench: LossBench, numbers: F64) -> F64:
    """Return the part of the gradient of E[sum of `numbers`] that is due to the states that tokens lead to, f64[D].

    `numbers` is f64[nodes].
    """
    world, p = bench.world, bench.true.probabilities
    each = numbers[world.node[world.logits]]
    totals = sums(world.path_of, each, len(world.paths))
    ahead = totals[world.path_of] - (np.cumsum(each) - (np.cumsum(totals) - totals)[world.path_of])  # after the token
    scores = world.scores(bench.drawn.at, ahead)
    result: F64 = p @ scores / len(world.process.starts)
    return result


def measure_value(subject: LossSubject, bench: LossBench) -> Figures:
    """Return the figures of the value loss, for a tabular critic (one value per node) that learns from returns to go.

    Before the step, its values differ from the exact ones by noise of standard deviation `OFF`; since then further
    noise has moved them, whose standard deviation is the bench's drift. The exact gradient is that of half the squared
    distance to the exact value of each visited node.
    """
    world, before = bench.world, bench.before
    at = world.node[world.logits]
    weight = before.probabilities[world.path_of] / len(world.process.starts)
    mass = sums(at, weight, world.nodes)
    rng = np.random.default_rng([world.nodes, 13])
    old = sums(at, weight * before.baseline, world.nodes) / mass + OFF * rng.normal(size=world.nodes)
    now = old + bench.drift * rng.normal(size=world.nodes)
    returns = world.turn_weights("to_go")[world.path_of, world.turn_of]
    found = np.zeros((len(bench.batches), world.nodes))
    for n, batch in enumerate(bench.batches):
        tokens = bench.drawn.tokens[bench.drawn.owner == n]
        values = torch.from_numpy(now).float().requires_grad_()
        extras = {"values": torch.from_numpy(old[at[tokens]]), "returns": torch.from_numpy(returns[tokens])}
        given = replace(batch, extras={name: each.float() for name, each in extras.items()})
        loss, _ = subject.loss(values[torch.from_numpy(at[tokens])], given)
        (loss * batch.weights).sum().backward()
        assert values.grad is not None
        found[n] = -values.grad.numpy()
    exact = sums(at, weight * (before.baseline - now[at]), world.nodes)
    mean = Adjusted(mean=found.mean(axis=0), covariance=np.cov(found.T) / len(found))
    return _judge_gradient(bench, found, mean, exact)


def _judge_gradient(bench: LossBench, found: F64, mean: Adjusted, exact: F64) -> Figures:
    if np.linalg.norm(exact) < 1e-9:
        raise ConfigError("its objective has no gradient here")
    noise = float(found.var(axis=0, ddof=1).sum()) * bench.drawn.paths[0].size
    true = replace(bench.true, gradient=exact, outcome_gradient=np.zeros_like(exact))
    return judge(mean, noise, true, exact=False)
