"""The functions of other frameworks that `conform.py` looks at: each with the little it takes to call it on
padded arrays, what is the same here, and which invariants no function of its kind can keep.

Nothing of a framework is copied: its module is imported as it was installed. Two kinds of stand-ins make that possible
without a GPU's packages: packages whose `__init__` imports what these functions do not use are entered without running
it (`bare`), and a module that is imported but not used by them is an empty one (`absent`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from turnstile.credit.invariants import DoesNotApply

WHOLE_STEP = "statistics of the whole step"
LENGTHS = "discounted returns of unequal length"
CRITIC = "the baseline is a critic's word"
NO_BASELINE = "there is no baseline"
BEST = "only the best attempt of a group gets an advantage"
CHOSEN = "tokens are chosen over the batch"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One function of a peer. `ours`: the kind that is the same algorithm, "" where there is none; `weights`: how the
    peer's scalar weighs tokens. `differs`: why its values are others all the same, and `under` (keys of `UNDER`): under
    which conditions they are not."""

    name: str
    function: Callable[..., Any]
    exempt: Mapping[int, str] = field(default_factory=dict)
    ours: str = ""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    weights: str = "token"
    differs: str = ""
    under: tuple[str, ...] = ()


UNDER = {
    "one_turn": "on attempts of one turn",
    "outcome_only": "without step rewards",
    "one_advantage": "with one advantage a row",
    "on_policy": "where the policy stands",
    "value": "in value",
    "factor": "up to a common factor",
}
"""The conditions under which values are compared once more, in words."""


def bare(*packages: str) -> None:
    """Enters packages without running their `__init__`."""
    for name in packages:
        top, *below = name.split(".")
        spec = importlib.util.find_spec(top)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)
        package = ModuleType(name)
        package.__path__ = [str(Path(spec.submodule_search_locations[0], *below))]
        sys.modules[name] = package


def absent(name: str, **attributes: Any) -> None:
    """An empty module in the place of one that is imported and not used."""
    module = ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module


UNBIASED = "divides by the unbiased standard deviation over tokens; ours uses the population standard deviation"
STEPS = "adds all step rewards of an attempt at its end"
EVENLY = "spreads a row's gradient evenly over its tokens; ours uses each token's own advantage"


def verl() -> list[Case]:
    core: Any = importlib.import_module("verl.trainer.ppo.core_algos")
    config: Any = importlib.import_module("verl.workers.config").ActorConfig
    actor = config(strategy="fsdp", use_dynamic_bsz=True, rollout_n=1)
    gmpo = config(strategy="fsdp", use_dynamic_bsz=True, rollout_n=1, clip_ratio_low=0.4, clip_ratio_high=0.4)

    def policy(name: str, config: Any = actor, **knobs: Any) -> Callable[..., Any]:
        return functools.partial(core.get_policy_loss_fn(name), config=config, rollout_is_weights=None, **knobs)

    bound = functools.partial
    whiten = {3: WHOLE_STEP}
    algo = SimpleNamespace(gamma=1.0), SimpleNamespace(gamma=0.99)
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    ppo = {**clip, "dual_clip": 3.0}
    length = "divides by the length of the arrays"
    return [
        Case(name="compute_grpo_outcome_advantage", function=core.compute_grpo_outcome_advantage, ours="grpo"),
        Case(
            name="compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False",
            function=bound(core.compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False),
            ours="grpo", knobs={"scale": "none"},
        ),
        Case(
            name="compute_grpo_vectorized_outcome_advantage",
            function=core.compute_grpo_vectorized_outcome_advantage, ours="grpo",
        ),
        Case(
            name="compute_grpo_passk_outcome_advantage",
            function=bound(core.compute_grpo_passk_outcome_advantage, config={"norm_adv_by_std_in_grpo": True}),
            exempt={6: BEST},
        ),
        Case(name="compute_rloo_outcome_advantage", function=core.compute_rloo_outcome_advantage, ours="rloo"),
        Case(
            name="compute_rloo_vectorized_outcome_advantage",
            function=core.compute_rloo_vectorized_outcome_advantage, ours="rloo",
        ),
        Case(name="compute_opo_outcome_advantage", function=core.compute_opo_outcome_advantage),
        Case(name="compute_gpg_outcome_advantage", function=core.compute_gpg_outcome_advantage),
        Case(
            name="compute_reinforce_plus_plus_outcome_advantage",
            function=bound(core.compute_reinforce_plus_plus_outcome_advantage, config=algo[0]),
            exempt=whiten, ours="reinforce_pp", differs=UNBIASED, under=("factor",),
        ),
        Case(
            name="compute_reinforce_plus_plus_outcome_advantage, gamma=0.99",
            function=bound(core.compute_reinforce_plus_plus_outcome_advantage, config=algo[1]),
            exempt={**whiten, 7: LENGTHS}, ours="reinforce_pp", knobs={"gamma": 0.99}, differs=UNBIASED,
            under=("factor",),
        ),
        Case(
            name="compute_reinforce_plus_plus_baseline_outcome_advantage",
            function=core.compute_reinforce_plus_plus_baseline_outcome_advantage,
            exempt=whiten, ours="reinforce_pp", knobs={"baseline": "group"},
            differs="gives every token the whole reward minus the group's mean, while ours gives the return from that "
            "token on; also " + UNBIASED, under=("outcome_only", "factor"),
        ),
        Case(
            name="compute_gae_advantage_return, gamma=0.99, lam=0.95",
            function=bound(core.compute_gae_advantage_return, gamma=0.99, lam=0.95),
            exempt={**whiten, 7: CRITIC}, ours="gae", knobs={"gamma": 0.99, "lam": 0.95, "scale": "std"},
            differs=UNBIASED, under=("factor",),
        ),
        Case(name="vanilla (PPO), token-mean", function=policy("vanilla"), ours="ppo", knobs=ppo),
        Case(
            name="vanilla (PPO), seq-mean-token-mean", function=policy("vanilla", loss_agg_mode="seq-mean-token-mean"),
            ours="ppo", knobs=ppo, weights="row",
        ),
        Case(
            name="vanilla (PPO), seq-mean-token-sum-norm",
            function=policy("vanilla", loss_agg_mode="seq-mean-token-sum-norm"),
            ours="ppo", knobs=ppo, weights="constant", differs=length, under=("factor",),
        ),
        Case(name="gspo", function=policy("gspo"), ours="gspo", knobs=clip, weights="row"),
        Case(
            name="geo_mean (GMPO)", function=policy("geo_mean", gmpo), ours="gmpo", weights="row",
            differs="uses the mean advantage of a row; ours uses each token's own advantage", under=("one_advantage",),
        ),
        Case(name="cispo", function=policy("cispo"), ours="cispo", knobs=clip),
        Case(name="sapo", function=policy("sapo")),
        Case(name="gpg", function=policy("gpg")),
        Case(name="dppo_tv", function=policy("dppo_tv")),
        Case(name="dppo_kl", function=policy("dppo_kl")),
        Case(
            name="kl_cov", function=policy("kl_cov"), exempt={3: CHOSEN}, ours="kl_cov",
            knobs={"share": 2e-4, "coef": 0.1},
        ),
        Case(
            name="compute_value_loss, cliprange_value=0.2",
            function=bound(core.compute_value_loss, cliprange_value=0.2), ours="value", knobs={"clip": 0.2},
        ),
        Case(
            name="kl_penalty, k1", function=bound(core.kl_penalty, kl_penalty="k1"), ours="kl",
            knobs={"estimator": "k1"}, weights="sum",
            differs="uses the gradient of k1 itself, which is noise with mean 0", under=("value",),
        ),
        Case(
            name="kl_penalty, k2", function=bound(core.kl_penalty, kl_penalty="k2"), ours="kl",
            knobs={"estimator": "k2"}, weights="sum",
            differs="is not weighted by the ratio to the sampling policy, unlike the gradient of the divergence",
            under=("on_policy",),
        ),
        Case(
            name="kl_penalty, k3", function=bound(core.kl_penalty, kl_penalty="k3"), ours="kl",
            knobs={"estimator": "k3"}, weights="sum",
            differs="uses the gradient of k3 itself, which belongs to the reverse divergence", under=("value",),
        ),
    ]  # fmt: skip


def skyrl() -> list[Case]:
    bare("skyrl.backends")
    core: Any = importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")
    settings: Any = importlib.import_module("skyrl.train.config").AlgorithmConfig
    bound = functools.partial
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    whiten = {3: WHOLE_STEP}

    def policy(function: Any, **changes: Any) -> Callable[..., Any]:
        return bound(function, config=settings(**changes), rollout_logprobs=None)

    columns = "iterates over columns, including observed tokens"
    return [
        Case(name="compute_grpo_outcome_advantage", function=core.compute_grpo_outcome_advantage, ours="grpo"),
        Case(
            name="compute_grpo_outcome_advantage, grpo_norm_by_std=False",
            function=bound(core.compute_grpo_outcome_advantage, grpo_norm_by_std=False),
            ours="grpo", knobs={"scale": "none"},
        ),
        Case(name="compute_rloo_outcome_advantage", function=core.compute_rloo_outcome_advantage, ours="rloo"),
        Case(name="compute_maxrl_advantage", function=core.compute_maxrl_advantage),
        Case(
            name="compute_reinforce_plus_plus_outcome_advantage, gamma=1.0",
            function=bound(core.compute_reinforce_plus_plus_outcome_advantage, gamma=1.0), exempt=whiten,
            ours="reinforce_pp",
            differs="ends each return at the end of its turn, so later turns do not count for earlier ones",
            under=("one_turn", "factor"),
        ),
        Case(
            name="compute_gae_advantage_return, gamma=0.99, lambd=0.95",
            function=bound(core.compute_gae_advantage_return, gamma=0.99, lambd=0.95),
            exempt={**whiten, 7: CRITIC}, ours="gae", knobs={"gamma": 0.99, "lam": 0.95, "scale": "std"},
            differs=columns, under=("one_turn", "factor"),
        ),
        Case(name="ppo_policy_loss", function=policy(core.ppo_policy_loss), ours="ppo", knobs=clip, weights="sum"),
        Case(
            name="ppo_policy_loss, dual_clip", function=policy(core.ppo_policy_loss, policy_loss_type="dual_clip"),
            ours="ppo", knobs={**clip, "dual_clip": 3.0}, weights="sum",
        ),
        Case(
            name="gspo_policy_loss",
            function=policy(core.gspo_policy_loss, policy_loss_type="gspo", loss_reduction="sequence_mean"),
            ours="gspo", knobs=clip, weights="sum",
        ),
        Case(
            name="compute_policy_loss_cispo", function=policy(core.compute_policy_loss_cispo, policy_loss_type="cispo"),
            ours="cispo", weights="sum", knobs=_cispo(settings()),
        ),
        Case(
            name="sapo_policy_loss",
            function=policy(core.sapo_policy_loss, policy_loss_type="sapo", loss_reduction="sequence_mean"),
        ),
        Case(
            name="compute_policy_loss_kl_cov", exempt={3: CHOSEN}, ours="kl_cov", weights="sum",
            knobs={"share": settings().kl_cov.kl_cov_frac, "coef": settings().kl_cov.ppo_kl_coef},
            function=policy(core.compute_policy_loss_kl_cov, policy_loss_type="kl_cov"),
        ),
        Case(
            name="ppo_critic_loss", function=bound(core.ppo_critic_loss, config=settings()), ours="value",
            knobs={"clip": 0.2}, weights="row",
        ),
    ]  # fmt: skip


def _cispo(settings: Any) -> dict[str, float]:
    return {"clip_low": settings.cispo.cispo_eps_clip_low, "clip_high": settings.cispo.cispo_eps_clip_high}


def openrlhf() -> list[Case]:
    bare("openrlhf.models", "openrlhf.trainer", "openrlhf.trainer.ray", "openrlhf.trainer.ppo_utils", "openrlhf.utils")
    absent("deepspeed")
    absent("openrlhf.trainer.ray.launcher", RayActorGroup=object)
    losses: Any = importlib.import_module("openrlhf.models.loss")
    maker: Any = importlib.import_module("openrlhf.trainer.ppo_utils.experience_maker")
    cls = next(c for c in vars(maker).values() if hasattr(c, "get_advantages_and_returns"))
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    whiten = {3: WHOLE_STEP}

    def policy(**knobs: Any) -> Callable[..., Any]:
        module = losses.PolicyLoss(**knobs)

        def loss(log_probs: Any, old_log_probs: Any, advantages: Any, action_mask: Any) -> Any:
            return module(log_probs, old_log_probs, advantages, action_mask)

        return loss

    def critic(values: Any, old_values: Any, returns: Any, action_mask: Any) -> Any:
        return losses.ValueLoss(clip_eps=0.2)(values, old_values, returns, action_mask)

    def gae(token_level_rewards: Any, values: Any, response_mask: Any) -> Any:
        return cls.get_advantages_and_returns(None, values, token_level_rewards, response_mask, 0.99, 0.95)

    def to_go(token_level_rewards: Any, response_mask: Any) -> Any:
        return cls.get_cumulative_returns(None, token_level_rewards, response_mask, 0.99)

    steps = functools.partial(_openrlhf_experience, cls)
    columns = "iterates over columns, so it also discounts at observed tokens, whose value is 0"
    return [
        Case(
            name="get_advantages_and_returns (GAE), gamma=0.99, lambd=0.95", function=gae, exempt={7: CRITIC},
            ours="gae", knobs={"gamma": 0.99, "lam": 0.95}, differs=columns,
            under=("one_turn",),
        ),
        Case(
            name="get_cumulative_returns, gamma=0.99", function=to_go, exempt={7: NO_BASELINE},
        ),
        Case(
            name="compute_advantages_and_returns, rloo", function=functools.partial(steps, estimator="rloo"),
            ours="rloo",
        ),
        Case(
            name="compute_advantages_and_returns, group_norm",
            function=functools.partial(steps, estimator="group_norm"), ours="grpo", knobs={"eps": 1e-9},
        ),
        Case(
            name="compute_advantages_and_returns, dr_grpo", function=functools.partial(steps, estimator="dr_grpo"),
            ours="grpo", knobs={"scale": "none"},
        ),
        Case(
            name="compute_advantages_and_returns, reinforce_baseline",
            function=functools.partial(steps, estimator="reinforce_baseline"), exempt=whiten,
            ours="reinforce_pp", knobs={"baseline": "group"}, differs=STEPS,
            under=("outcome_only",),
        ),
        Case(
            name="compute_advantages_and_returns, reinforce",
            function=functools.partial(steps, estimator="reinforce"), exempt=whiten, ours="reinforce_pp",
            differs=STEPS, under=("outcome_only",),
        ),
        Case(name="PolicyLoss (PPO)", function=policy(), ours="ppo", knobs=clip),
        Case(
            name="PolicyLoss (PPO), by sample", function=policy(token_level_loss=False), ours="ppo", knobs=clip,
            weights="row",
        ),
        Case(
            name="PolicyLoss (PPO), dual_clip=3.0", function=policy(dual_clip=3.0), ours="ppo",
            knobs={**clip, "dual_clip": 3.0},
        ),
        Case(
            name="PolicyLoss (GSPO)", function=policy(policy_loss_type="gspo"), ours="gspo", knobs=clip, weights="row",
            differs=EVENLY, under=("one_advantage",),
        ),
        Case(name="ValueLoss, clip_eps=0.2", function=critic, ours="value", knobs={"clip": 0.2}),
    ]  # fmt: skip


def _openrlhf_experience(cls: Any, token_level_rewards: Any, response_mask: Any, index: Any, *, estimator: str) -> Any:
    """The trainer's way from one reward an attempt to advantages; groups lie one behind the other, of one size."""
    sizes = {(index == one).sum() for one in index}
    if len(sizes) != 1:
        raise DoesNotApply("groups must be of one size, so an attempt that failed cannot be left out or added")
    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=int(sizes.pop())),
        algo=SimpleNamespace(advantage=SimpleNamespace(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=False)),
        reward=SimpleNamespace(clip_range=None, overlong_buffer_len=None, stop_properly_penalty_coef=None),
    )
    order = sorted(range(len(index)), key=lambda row: index[row])
    experience = SimpleNamespace(
        rewards=token_level_rewards.sum(1)[order], index=list(range(len(index))), info={}, values=None,
        action_mask=response_mask[order], kl=torch.zeros_like(token_level_rewards),
    )  # fmt: skip
    owner = SimpleNamespace(
        strategy=SimpleNamespace(args=args), advantage_estimator=estimator, kl_ctl=SimpleNamespace(value=0.0)
    )
    owner.get_cumulative_returns = functools.partial(cls.get_cumulative_returns, owner)
    maker: Any = sys.modules[cls.__module__]
    maker.apply_length_penalties = lambda experiences, args: None  # the penalties of a recipe, off
    (done,) = cls.compute_advantages_and_returns(owner, [experience])
    back = [order.index(row) for row in range(len(index))]
    return done.advantages[back], done.returns[back]


def trl() -> list[Case]:
    trainer: Any = importlib.import_module("trl.trainer.grpo_trainer").GRPOTrainer
    leave_one_out: Any = importlib.import_module("trl.trainer.rloo_trainer").RLOOTrainer
    geometric: Any = importlib.import_module("trl.experimental.gmpo.gmpo_trainer").GMPOTrainer
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    loss = functools.partial(_trl_loss, trainer)
    return [
        Case(name="GRPOTrainer, bnpo", function=functools.partial(loss, loss_type="bnpo"), ours="ppo", knobs=clip),
        Case(name="GRPOTrainer, dapo", function=functools.partial(loss, loss_type="dapo"), ours="ppo", knobs=clip),
        Case(
            name="GRPOTrainer, grpo", function=functools.partial(loss, loss_type="grpo"), ours="ppo", knobs=clip,
            weights="row",
        ),
        Case(
            name="GRPOTrainer, dr_grpo", function=functools.partial(loss, loss_type="dr_grpo"), ours="ppo", knobs=clip,
            weights="constant",
        ),
        Case(
            name="GRPOTrainer, grpo, importance_sampling_level=sequence (GSPO)",
            function=functools.partial(loss, loss_type="grpo", level="sequence"), ours="gspo", knobs=clip,
            weights="row", differs=EVENLY, under=("one_advantage",),
        ),
        Case(
            name="GRPOTrainer, cispo", function=functools.partial(loss, loss_type="cispo", epsilon_high=1.2),
            ours="cispo", knobs={"clip_low": 1.0, "clip_high": 0.2},
        ),
        Case(name="GRPOTrainer, sapo", function=functools.partial(loss, loss_type="sapo")),
        Case(name="GRPOTrainer, vespo", function=functools.partial(loss, loss_type="vespo")),
        Case(
            name="GMPOTrainer",
            function=functools.partial(_trl_loss, geometric, epsilon_low=0.4, epsilon_high=0.4, one=True),
            ours="gmpo", weights="row",
            differs="uses the mean advantage of a row; ours uses each token's own advantage", under=("one_advantage",),
        ),
        Case(name="RLOOTrainer", function=functools.partial(_trl_rloo, leave_one_out)),
    ]  # fmt: skip


HORIZON = 64  # tokens of the longest completion, as the loss dr_grpo divides by


def _trl_self(per_token: Any, **settings: Any) -> Any:
    """What a loss of TRL's trainers reads of its trainer, with the log-probabilities that a model would give."""
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (per_token, torch.zeros_like(per_token), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=0.0,
        use_vllm=False, vllm_importance_sampling_correction=False, current_gradient_accumulation_steps=1,
        max_completion_length=HORIZON, _entropy_bonus_enabled=False, model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _metrics=defaultdict(lambda: defaultdict(list)), **settings,
    )  # fmt: skip


def _trl_inputs(response_mask: Any, **more: Any) -> dict[str, Any]:
    rows = len(response_mask)
    prompt = torch.zeros(rows, 1, dtype=torch.int64)
    ids = torch.zeros_like(response_mask, dtype=torch.int64)
    return {
        "prompt_ids": prompt, "prompt_mask": prompt + 1, "completion_ids": ids,
        "num_items_in_batch": response_mask.sum(), **more,
    }  # fmt: skip


def _trl_loss(
    cls: Any, old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, *, loss_type: str = "grpo",
    level: str = "token", epsilon_low: float = 0.2, epsilon_high: float = 0.2, one: bool = False,
) -> Any:  # fmt: skip
    args = SimpleNamespace(
        delta=None, use_bias_correction_kl=False, steps_per_generation=1, sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
    )  # fmt: skip
    owner = _trl_self(
        log_prob, importance_sampling_level=level, loss_type=loss_type, epsilon_low=epsilon_low,
        epsilon_high=epsilon_high, args=args,
    )  # fmt: skip
    owner.get_gamma_weights = cls.get_gamma_weights
    inputs = _trl_inputs(
        response_mask, completion_mask=torch.ones_like(response_mask), tool_mask=response_mask,
        old_per_token_logps=old_log_prob, advantages=_mean(advantages, response_mask) if one else advantages,
    )  # fmt: skip
    return cls._compute_loss(owner, None, inputs)


def _trl_rloo(cls: Any, old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any) -> Any:
    """It takes one advantage a row and no tools, so observed tokens can only be hidden as padding is."""
    owner = _trl_self(log_prob, epsilon_low=0.2, epsilon_high=0.2)
    inputs = _trl_inputs(
        response_mask, completion_mask=response_mask, old_logps=(old_log_prob * response_mask).sum(1),
        advantages=_mean(advantages, response_mask),
    )  # fmt: skip
    return cls._compute_loss(owner, None, inputs)


def _mean(advantages: Any, response_mask: Any) -> Any:
    """The mean advantage of each row, [B]."""
    return (advantages * response_mask).sum(1) / response_mask.sum(1).clamp(min=1)


PEERS: Mapping[str, tuple[str, Callable[[], list[Case]]]] = {
    "verl": ("verl.trainer.ppo.core_algos", verl),
    "TRL": ("trl.trainer", trl),
    "OpenRLHF": ("openrlhf.models.loss and openrlhf.trainer.ppo_utils.experience_maker", openrlhf),
    "SkyRL": ("skyrl.backends.skyrl_train.utils.ppo_utils", skyrl),
}
"""name -> (where its functions are, what makes the list of them)."""
