"""Names in a recipe to Python objects: one table a room, no registration, any `package.module:attribute`.

`resolve("credit", "grpo")` gives a function of this project, `resolve("credit", "mine.credit:my_estimator")` one of
your own.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

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
        "accept": "turnstile.credit.accept:accept",
        "signed": "turnstile.credit.signed:signed",
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


def nearest(word: str, known: Iterable[str]) -> str:
    """A clause that names the nearest known word, or lists them all when none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def resolve(room: str, kind: str) -> Any:
    """The object that `kind` names in `room`: a table entry, or any `package.module:attribute`.

    Raises ConfigError when the name is unknown, the module cannot be imported or lacks the attribute.
    """
    table = KINDS[room]
    path = table.get(kind, kind)
    if ":" not in path:
        hint = "or write your own as package.module:name"
        raise ConfigError(f"unknown {room} kind {kind!r}; {nearest(kind, table)} ({hint})")
    return load(path, f"{room} kind {kind!r}", known=kind in table)


def load(path: str, where: str, *, known: bool = False) -> Any:
    """The object that `module:attribute` names; `known` paths are our own, whose broken imports are our faults.

    Raises ConfigError, which begins with `where`, when it is no such path, or module or attribute are not there.
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


PLAIN: dict[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("a string", (str,)),
}


def check_types(where: str, function: Callable[..., Any], knobs: Mapping[str, Any]) -> None:
    """Raises ConfigError for a knob whose value is not of the type that `function` annotates, where that is plain, a
    Literal, or made of these."""
    hints = _hints(function)
    for knob, value in knobs.items():
        if wanted := misfit(hints.get(knob), value):
            raise ConfigError(f"{where}: {knob} = {value!r} is not {wanted}")


def _hints(function: Any) -> dict[str, Any]:
    """The types of a function's parameters; none where they name what is there for a type checker alone."""
    try:
        return get_type_hints(vars(function).get("__init__", function) if isinstance(function, type) else function)
    except (NameError, TypeError):
        return {}


def misfit(hint: Any, value: object) -> str | None:
    """What a plain type, a Literal, or a table, a list or a union of these would have a value be, where the value is
    not; None for every other type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is type(None):
        return None if value is None else "nothing"
    if origin is Literal:
        return _no_choice(arguments, value)
    if origin in (Union, UnionType):
        found = [misfit(part, value) for part in arguments]
        return None if None in found else " or ".join(one for one in found if one and one != "nothing")
    if origin in (Mapping, dict):
        return _no_table(arguments[-1], value)
    if origin is tuple and Ellipsis not in arguments:
        return _no_tuple(arguments, value)
    if origin in (Sequence, list, tuple):
        return _no_list(arguments[0], value)
    if hint not in PLAIN:
        return None
    wanted, types = PLAIN[hint]
    fits = isinstance(value, types) and (hint is bool or not isinstance(value, bool))
    return None if fits else wanted


def _no_choice(choices: Sequence[Any], value: object) -> str | None:
    if value in choices:
        return None
    known = [choice for choice in choices if isinstance(choice, str)]
    if isinstance(value, str) and known:
        return f"known; {nearest(value, known)}"
    return "one of " + ", ".join(map(repr, choices))


def _no_table(item: Any, value: object) -> str | None:
    if not isinstance(value, Mapping):
        return "a table, { name = ... }"
    wrong = [found for one in value.values() if (found := misfit(item, one))]
    return f"a table in which each is {wrong[0]}" if wrong else None


def _no_tuple(items: Sequence[Any], value: object) -> str | None:
    if not isinstance(value, list | tuple) or len(value) != len(items):
        return f"a list of {len(items)}"
    wrong = [found for item, one in zip(items, value, strict=True) if (found := misfit(item, one))]
    return f"a list of {len(items)} with {wrong[0]} in its place" if wrong else None


def _no_list(item: Any, value: object) -> str | None:
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        return "a list"
    wrong = [found for one in value if (found := misfit(item, one))]
    return f"a list in which each is {wrong[0]}" if wrong else None
