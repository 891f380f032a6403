"""Resolution of names in a recipe to Python objects, by one table per room or as `package.module:attribute`.

`resolve("credit", "grpo")` returns a function of this project, `resolve("credit", "mine.credit:my_estimator")` one of
your own. Nothing has to be registered.
"""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from turnstile.errors import ConfigError

KINDS: dict[str, dict[str, str]] = {
    "env": {
        "swe": "turnstile.swe.envs.swe:SweEnv",
        "swe_shell": "turnstile.swe.envs.shell:ShellEnv",
        "guess": "turnstile.envs.guess:GuessEnv",
    },
    "sandbox": {
        "local": "turnstile.sandboxes.local:LocalSandboxes",
        "bubblewrap": "turnstile.sandboxes.bubblewrap:BubblewrapSandboxes",
        "container": "turnstile.sandboxes.containers.provider:ContainerSandboxes",
        "remote": "turnstile.sandboxes.http.remote:RemoteSandboxes",
    },
    "engine": {
        "transformers": "turnstile.engines.local.transformers:TransformersEngine",
        "openai": "turnstile.engines.remote.openai:OpenAIEngine",
        "scripted": "turnstile.engines.scripted:ScriptedEngine",
    },
    "renderer": {
        "lines": "turnstile.agents.renderer:LinesRenderer",
        "chat": "turnstile.agents.renderer:ChatRenderer",
    },
    "parser": {
        "lines": "turnstile.agents.parsing.lines:LineParser",
        "hermes": "turnstile.agents.parsing.hermes:HermesParser",
    },
    "reward": {
        "outcome_class": "turnstile.swe.rewards:outcome_class",
        "signal": "turnstile.rewards.signal:signal",
        "turn_signal": "turnstile.rewards.signal:of_turns",
        "env": "turnstile.rewards.signal:env_reward",
        "valid_format": "turnstile.rewards.steps:valid_format",
        "command_succeeded": "turnstile.rewards.steps:command_succeeded",
        "looked_at_failing_code": "turnstile.swe.rewards:looked_at_failing_code",
        "ran_tests": "turnstile.swe.rewards:ran_tests",
        "modified_code": "turnstile.swe.rewards:modified_code",
        "tests_passed": "turnstile.swe.rewards:share_of_tests",
        "weighted_tests": "turnstile.swe.rewards:weighted_tests",
        "multiplicative": "turnstile.rewards.penalties:multiplicative",
        "tool_bonus": "turnstile.rewards.penalties:tool_bonus",
        "exact": "turnstile.rewards.answers:exact",
        "regex": "turnstile.rewards.answers:regex",
        "format": "turnstile.rewards.answers:well_formed",
        "overlong": "turnstile.rewards.length:overlong",
        "long_trajectory": "turnstile.rewards.length:long_trajectory",
        "efficiency": "turnstile.rewards.length:efficiency",
        "potential": "turnstile.rewards.shaping:potential",
        "bounded": "turnstile.rewards.shaping:bounded",
        "centred": "turnstile.rewards.shaping:centred",
        "information_gain": "turnstile.rewards.shaping:information_gain",
        "self_correction": "turnstile.rewards.shaping:self_correction",
        "tags": "turnstile.rewards.events:tags",
        "novelty": "turnstile.rewards.events:novelty",
        "reward_machine": "turnstile.rewards.events:reward_machine",
        "judge": "turnstile.rewards.judged:judge",
        "pairwise_judge": "turnstile.rewards.judged:pairwise_judge",
        "rubric": "turnstile.rewards.judged:rubric",
        "checklist": "turnstile.rewards.judged:checklist",
    },
    "grader": {
        "clock": "turnstile.rewards.graders:Clock",
        "test_rates": "turnstile.swe.rewards:TestRates",
        "answer_probabilities": "turnstile.rewards.probabilities:AnswerProbabilities",
        "judge": "turnstile.rewards.judges.graders:Judge",
        "pairwise_judge": "turnstile.rewards.judges.graders:PairwiseJudge",
        "rubric": "turnstile.rewards.judges.graders:Rubric",
        "checklist": "turnstile.rewards.judges.graders:Checklist",
    },
    "hint": {
        "rubric": "turnstile.rollout.hints:RubricHint",
    },
    "demonstrator": {
        "swe": "turnstile.swe.oracle:demonstrate",
        "swe_shell": "turnstile.swe.shell_oracle:demonstrate",
        "guess": "turnstile.envs.guess:demonstrate",
    },
    "policy": {
        "swe_oracle": "turnstile.swe.oracle:oracle",
        "swe_random": "turnstile.swe.oracle:random_agent",
        "swe_shell_oracle": "turnstile.swe.shell_oracle:oracle",
        "swe_shell_random": "turnstile.swe.shell_oracle:random_agent",
        "guess_oracle": "turnstile.envs.guess:oracle",
        "guess_random": "turnstile.envs.guess:random_agent",
    },
    "log_parser": {
        "pytest": "turnstile.swe.formats.logs:pytest_log",
        "unittest": "turnstile.swe.formats.logs:unittest_log",
        "r2e-gym": "turnstile.swe.formats.r2egym:log",
    },
    "compose": {
        "gated": "turnstile.rewards.compose:gated",
        "direct": "turnstile.rewards.compose:direct",
    },
    "credit": {
        "grpo": "turnstile.credit.grpo:grpo",
        "rloo": "turnstile.credit.rloo:rloo",
        "turn_return": "turnstile.credit.turn_return:turn_return",
        "reinforce": "turnstile.credit.reinforce:reinforce",
        "reinforce_pp": "turnstile.credit.reinforce_pp:reinforce_pp",
        "gigpo": "turnstile.credit.gigpo:gigpo",
        "random_step_group": "turnstile.credit.random_step_group:random_step_group",
        "salt": "turnstile.credit.salt:salt",
        "empg": "turnstile.credit.empg:empg",
        "entropy_aware": "turnstile.credit.entropy_aware:entropy_aware",
        "igpo": "turnstile.credit.igpo:igpo",
        "rlvmr": "turnstile.credit.rlvmr:rlvmr",
        "broadcast": "turnstile.credit.broadcast:broadcast",
        "branch": "turnstile.credit.branch:branch",
        "tree": "turnstile.credit.tree:tree",
        "segments": "turnstile.credit.segments:segments",
        "role_baseline": "turnstile.credit.role_baseline:role_baseline",
        "per_agent": "turnstile.credit.per_agent:per_agent",
        "threshold": "turnstile.credit.threshold:threshold",
        "gae": "turnstile.credit.gae:gae",
        "turn_gae": "turnstile.credit.gae:turn_gae",
        "bilevel_gae": "turnstile.credit.gae:bilevel_gae",
        "recalibrated": "turnstile.credit.recalibrated:recalibrated",
        "normalised_process": "turnstile.credit.normalised_process:normalised_process",
        "subgoal": "turnstile.credit.subgoal:subgoal",
        "vine": "turnstile.credit.vine:vine",
        "aem": "turnstile.credit.aem:aem",
        "implicit_step": "turnstile.credit.implicit_step:implicit_step",
        "utterance_critic": "turnstile.credit.utterance_critic:utterance_critic",
        "progress_attribution": "turnstile.credit.progress_attribution:progress_attribution",
    },
    "loss": {
        "ppo": "turnstile.losses.ppo:ppo",
        "reinforce": "turnstile.losses.reinforce:reinforce",
        "sft": "turnstile.losses.sft:sft",
        "kl": "turnstile.losses.kl:kl",
        "decoupled_ppo": "turnstile.losses.decoupled_ppo:decoupled_ppo",
        "gspo": "turnstile.losses.gspo:gspo",
        "gmpo": "turnstile.losses.gmpo:gmpo",
        "cispo": "turnstile.losses.cispo:cispo",
        "clip_cov": "turnstile.losses.covariance:clip_cov",
        "kl_cov": "turnstile.losses.covariance:kl_cov",
        "entropy": "turnstile.losses.entropy:entropy",
        "entropy_band": "turnstile.losses.entropy_band:entropy_band",
        "entropy_balanced_clip": "turnstile.losses.entropy_balanced_clip:entropy_balanced_clip",
        "forward_kl": "turnstile.losses.forward_kl:forward_kl",
        "distill": "turnstile.losses.distill:distill",
        "self_distill": "turnstile.losses.distill:self_distill",
        "value": "turnstile.losses.value:value",
        "dpo": "turnstile.losses.dpo:dpo",
        "refuel": "turnstile.losses.refuel:refuel",
        "pacs": "turnstile.losses.pacs:pacs",
    },
    "loss_multiplier": {
        "tis": "turnstile.losses.correction:tis",
        "mis": "turnstile.losses.correction:mis",
        "icepop": "turnstile.losses.correction:icepop",
        "high_entropy_only": "turnstile.losses.selection:high_entropy_only",
    },
    "loss_aggregation": {
        "token": "turnstile.batching.weights:token",
        "turn": "turnstile.batching.weights:turn",
        "trajectory": "turnstile.batching.weights:trajectory",
        "constant": "turnstile.batching.weights:constant",
    },
    "schedule": {
        "constant": "turnstile.trainer.optim:constant",
        "linear": "turnstile.trainer.optim:linear",
        "cosine": "turnstile.trainer.optim:cosine",
    },
    "tracker": {
        "jsonl": "turnstile.tracking.jsonl:JsonlTracker",
        "console": "turnstile.tracking.console:ConsoleTracker",
        "tensorboard": "turnstile.tracking.tensorboard:TensorboardTracker",
    },
}
"""room -> kind -> "module:attribute"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """An additional object that a kind requires.

    `path` names its class as `module:Class`. The class's keyword arguments are the keys of the table `section` in the
    kind's section of a recipe.
    """

    section: str
    path: str


def part_of(function: Callable[..., Any]) -> Part | None:
    """Return the part that a function declares (`credit.base.learned`, `losses.base.needs`), or None.

    The function's knobs may be bound.
    """
    return getattr(unbound(function), "part", None)


def unbound(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function without the knobs bound to it."""
    return function.func if isinstance(function, functools.partial) else function


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint that names the nearest known word, or all known words if none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def resolve(room: str, kind: str) -> Any:
    """Return the object that `kind` names in `room`: a table entry, or any `package.module:attribute`.

    Raises ConfigError if the name is unknown, or if the module cannot be imported or lacks the attribute.
    """
    table = KINDS[room]
    path = table.get(kind, kind)
    if ":" not in path:
        hint = "or write your own as package.module:name"
        raise ConfigError(f"unknown {room} kind {kind!r}; {nearest(kind, table)} ({hint})")
    return load(path, f"{room} kind {kind!r}", known=kind in table)


def load(path: str, where: str, *, known: bool = False) -> Any:
    """Return the object that `module:attribute` names.

    Raises ConfigError, whose message begins with `where`, if the path is malformed or the module or attribute does not
    exist. For `known` paths, which belong to this project, an import error inside the module propagates.
    """
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"{where}: {path!r} is not of the form package.module:name")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if known or (error.name is not None and not module_name.startswith(error.name)):
            raise  # a broken import inside that module is its own error
        raise ConfigError(
            f"{where}: there is no module {module_name!r} on the import path; "
            "start in the folder that holds it, or name that folder in PYTHONPATH"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [name for name in vars(module) if not name.startswith("_")]
        hint = nearest(attribute, public)
        raise ConfigError(f"{where}: {module_name} has no {attribute!r}; {hint}") from None
