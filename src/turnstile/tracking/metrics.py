"""Every metric that a step can log: its unit and meaning.

A `*` stands for a part of the name that a recipe decides, such as a reward term. `make docs` writes docs/metrics.md
from this table, and a test checks whole runs against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

METRICS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Episodes": {
        "count/trajectories": ("episodes", "played in this step"),
        "count/errors": ("episodes", "without a verdict, since infrastructure failed; they are in no other figure"),
        "count/judge_killed": ("episodes", "of these, those whose grader was killed by SIGKILL"),
        "turns": ("turns", "mean per episode"),
        "stop/*": ("share", "of all episodes, by the reason why they stopped"),
        "rate/*": ("share", "of graded episodes that reached the level in the name, such as completion or resolution"),
        "credit/states_shared": ("share", "of turns whose state another turn of the group shares"),
        "groups/total": ("groups", "in this step, those from the replay buffer included"),
        "groups/zero_advantage": ("groups", "in which all advantages are zero, so that nothing is learned from them"),
        "staleness/mean": (
            "steps",
            "mean age of the weights that sampled a token",
        ),
        "staleness/max": ("steps", "largest age of the weights that sampled a token"),
    },
    "Rewards": {
        "reward/outcome": ("reward", "mean outcome"),
        "reward/total": ("reward", "mean outcome plus the step rewards that counted"),
        "reward/step_granted": ("reward", "mean sum of step rewards that counted"),
        "reward/step_withheld": ("reward", "mean sum of step rewards that gates, or [on_stop], withheld"),
        "reward/granted/*": ("reward", "mean sum of one term's step rewards that counted"),
        "reward/withheld/*": ("reward", "mean sum of one term's step rewards that were withheld"),
        "reward/withheld_by/*": ("reward", "what one gate withheld, alone or with others"),
        "gate/*": ("share", "of episodes in which the gate of a term was open"),
    },
    "Loss and policy": {
        "loss/total": ("loss", "the loss that was minimised, regularisers included"),
        "loss/ratio": ("ratio", "probability now / probability when sampled, mean over trained tokens"),
        "loss/kl_behaviour": ("nats", "KL between the sampling policy and the current one (k3), mean over tokens"),
        "loss/clipped": ("share", "of trained tokens at which the loss is clipped"),
        "loss/kl_ref": ("nats", "KL to the reference policy"),
        "loss/kl_teacher": ("nats", "KL to the teacher"),
        "loss/kl_feedback": ("nats", "KL to the policy with feedback in its prompt"),
        "loss/kl_forward": ("nats", "forward KL on stored samples"),
        "loss/kl_mismatch": (
            "nats",
            "KL between the sampler's policy and the trainer's before the step",
        ),
        "loss/correction": ("ratio", "mean importance weight of an off-policy correction"),
        "loss/corrected": ("share", "of tokens whose importance weight was truncated or masked"),
        "loss/learns": ("share", "of tokens that a token selection lets learn"),
        "loss/outside": ("share", "of tokens whose entropy lies outside the band"),
        "loss/entropy": ("nats", "entropy that a regulariser works on"),
        "loss/covariance": ("-", "covariance of log-probability and advantage, which Clip-Cov and KL-Cov use"),
        "loss/held": ("share", "of tokens that KL-Cov holds back"),
        "loss/accuracy": ("share", "of pairs, or outcomes, that the loss predicts correctly"),
        "loss/margin": ("nats", "mean margin between the better and the worse of a pair"),
        "loss/score": ("-", "mean score that PACS gives an attempt"),
        "loss/residual": ("-", "mean absolute residual of REFUEL's regression"),
        "loss/nll": ("nats", "negative log-likelihood"),
        "loss/value": ("reward", "mean value"),
        "loss/value_error": ("reward^2", "mean squared error of values"),
        "loss/*": ("-", "a metric of a loss of your own"),
        "policy/entropy": ("nats", "mean entropy of the policy at trained tokens"),
        "policy/logprob_gap": (
            "nats",
            "mean |sampler's - trainer's log-probability| of a token in the first pass",
        ),
        "optim/grad_norm": ("-", "norm of the gradient before clipping; of several optimiser steps the largest"),
        "optim/lr": ("-", "learning rate"),
        "optim/skipped": ("steps", "optimiser steps skipped since their gradient was not finite"),
        "rehearsal/*": ("-", "metrics of the loss on stored samples"),
    },
    "Auxiliary models": {
        "critic/loss": ("reward^2", "mean squared error of the value head, before its update"),
        "critic/value": ("reward", "mean value"),
        "critic/explained": ("share", "of the targets' variance that the values explain"),
        "implicit/loss": ("nats", "loss of the implicit process reward per attempt"),
        "implicit/accuracy": ("share", "of outcomes, or pairs, that it predicts correctly"),
        "implicit/reward": ("reward", "mean learned reward of a turn"),
        "implicit/skipped": ("steps", "of its optimiser, skipped since a gradient was not finite"),
        "progress/loss": ("reward^2", "mean squared error of progress attribution"),
        "progress/explained": ("share", "of the outcomes' variance that contributions explain"),
        "progress/contribution": ("reward", "mean contribution of a turn"),
        "progress/spread": ("reward", "standard deviation of contributions"),
        "utterance/q": ("reward", "mean Q of trained turns"),
        "utterance/v": ("reward", "mean V of trained turns"),
        "utterance/q_loss": ("reward^2", "mean squared error of Q, before its update"),
        "utterance/v_loss": ("reward^2", "mean squared error of V, before its update"),
        "utterance/explained": ("share", "of the returns' variance that Q explains"),
        "replay_buffer/kept": ("attempts", "in the replay buffer"),
        "replay_buffer/again": ("attempts", "taken from it in this step"),
        "replay_buffer/age": ("steps", "mean age of those"),
    },
    "Tokens": {
        "tokens/sampled": ("tokens", "sampled in this step"),
        "tokens/requested": ("tokens", "of all prompts and answers, as if nothing were cached"),
        "tokens/computed": ("tokens", "that the engine's network computed"),
        "tokens/saved": ("tokens", "requested and not computed, thanks to shared prefixes and caches"),
        "tokens/recomputed": ("tokens", "computed again since their cache was evicted"),
        "tokens/tree": ("tokens", "distinct tokens of the episodes' prefix trees: the least that can be computed"),
        "tokens/speculated": ("tokens", "drafted by n-gram speculation"),
        "tokens/speculated_accepted": ("tokens", "of these, accepted"),
        "tokens/per_second": ("tokens/s", "sampled per second in which the engine was busy"),
        "tokens/rows": ("tokens", "of all rows of the update, shared prefixes counted each time"),
        "tokens/unique": ("tokens", "of the prefix trees of the update"),
        "tokens/trained": ("tokens", "that carry loss"),
        "tokens/activations_cached": ("tokens", "whose frozen-layer output came from the activation cache"),
        "update/saved": ("share", "of the update's operations that frozen layers and caches save"),
        "engine/evicted": ("sessions", "whose cached keys and values were dropped for lack of memory"),
    },
    "Seconds": {
        "seconds/step": ("s", "the whole step"),
        "seconds/rollout": ("s", "waiting for episodes"),
        "seconds/generate": ("s", "in which the engine was busy"),
        "seconds/idle": ("s", "of the rollout in which the engine waited for environments"),
        "seconds/environment": ("s", "in environments, added up over episodes that run side by side"),
        "seconds/update": ("s", "in forward and backward passes and optimiser steps"),
        "seconds/publish": ("s", "publishing new weights to the engine"),
        "time": ("s", "since 1970, when the step was logged"),
    },
}
"""title -> name -> (unit, meaning)"""


def meaning_of(name: str) -> tuple[str, str] | None:
    """Return the unit and the meaning of a metric, or None if it is unknown. Exact names precede patterns."""
    flat = {known: description for section in METRICS.values() for known, description in section.items()}
    if name in flat:
        return flat[name]
    return next((description for known, description in flat.items() if "*" in known and fnmatchcase(name, known)), None)
