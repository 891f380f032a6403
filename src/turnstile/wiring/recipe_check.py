"""Checks of a recipe that load nothing: they take a moment and do not import torch.

`turnstile config --check` reports their result, and `turnstile train` begins with them. Everything else, in particular
kinds of the user's own, is checked at start, before a run's folder is made (`runs/train.py`).
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from turnstile.config import Kind, Recipe
from turnstile.errors import ConfigError
from turnstile.knobs import check_kind, check_value
from turnstile.lookup import KINDS, nearest
from turnstile.tracking.metrics import METRICS, meaning_of
from turnstile.wiring.group_size import check_company

ALONE = ("swe", "swe_shell", "guess")
"""Built-in environments in which no turn has a tag or a subgoal."""
UNFED = {
    "branch": "attempts that branch, and a rollout makes none yet: play them yourself, with Trajectory.parent set",
    "tree": "attempts that branch, and a rollout makes none yet: play them yourself, with Trajectory.parent set",
    "vine": "attempts that branch, and a rollout makes none yet: play them yourself, with Trajectory.parent set",
    "per_agent": "episodes in which several agents speak, and a rollout plays none yet: give it turns with Turn.agent",
    "role_baseline": (
        "episodes in which several agents speak, and a rollout plays none yet: give it turns with Turn.agent"
    ),
    "rlvmr": "an environment whose turns have the signal 'tag' (Step.signals)",
    "subgoal": "an environment whose turns have the signal 'subgoal' (Step.signals)",
}
"""Credit kinds that need more than the rollout of built-in environments provides, and what they need."""
SERVERS = "openai"
HELDOUT = "heldout/"
"""The prefix in `train.keep_best` of the metrics of held-out evaluations."""
UNPLAYED = ("branch", "tree", "vine", "per_agent", "role_baseline")
"""Those of them that no environment can provide for, since the rollout plays no such episodes."""
GRADED = {
    "judge": "judge",
    "pairwise_judge": "pairwise_judge",
    "rubric": "rubric",
    "checklist": "checklist",
    "tool_bonus": "clock",
    "weighted_tests": "test_rates",
    "information_gain": "answer_probabilities",
}
"""Rewards that read a grader's results, with the kind of that grader."""
TERM = ("name", "scope", "level", "weight", "gate")
"""Keys that every reward term has."""


def check_recipe(recipe: Recipe, *, env: bool = False) -> list[str]:
    """Raise ConfigError for the first error that can be found without loading anything.

    Returns a line for each part that is only checked at start. `env` says whether the caller provides the environment.
    """
    lines = []
    for room, where, kind in _kinds(recipe):
        if room == "env" and env:
            continue
        own = kind.knobs
        if where.startswith("regularizers"):
            _take_coefficient(where, own)
        elif where == "rehearsal.loss" and (coefficient := own.pop("coef", None)) is not None:
            check_value(f"{where}.coef", {"type": "float", "above": 0}, coefficient)
        found = check_kind(room, f"{where}.kind", kind.kind, own, also=TERM if room == "reward" else ())
        lines += [found] if found else []
    parts = (_model_errors, _sampling_errors, _rollout_errors, _reward_errors, _path_errors)
    wrongs = itertools.chain(
        *(part(recipe) for part in parts), _other_errors(recipe, env), _training_errors(recipe, env)
    )
    for wrong in wrongs:
        raise ConfigError(wrong)
    check_company(recipe)
    return lines


def _kinds(recipe: Recipe) -> Iterator[tuple[str, str, Kind]]:
    """Yield (room, key in the recipe, kind) for every kind that a recipe names."""
    yield from (("env", "env", recipe.env), ("sandbox", "sandbox", recipe.sandbox))
    yield from (("renderer", "agent.renderer", recipe.agent.renderer), ("parser", "agent.parser", recipe.agent.parser))
    if recipe.engine.kind == SERVERS or ":" in recipe.engine.kind:
        yield "engine", "engine", Kind.model_validate({"kind": recipe.engine.kind, **_server_knobs(recipe)})
    for room, where, kinds in (
        ("reward", "rewards.terms", recipe.rewards.terms),
        ("grader", "graders", recipe.graders),
        ("loss_multiplier", "loss_multipliers", recipe.loss_multipliers),
        ("loss", "regularizers", recipe.regularizers),
        ("tracker", "trackers", recipe.trackers),
    ):
        yield from ((room, f"{where}[{place}]", kind) for place, kind in enumerate(kinds))
    if recipe.hint is not None:
        yield "hint", "hint", recipe.hint
    yield from (
        ("credit", "credit", recipe.credit),
        ("loss", "loss", recipe.loss),
        ("loss_aggregation", "loss_aggregation", recipe.loss_aggregation),
    )
    if recipe.sft.demos:
        yield "demonstrator", "sft.demonstrator", recipe.sft.demonstrator
    if recipe.rehearsal.tasks:
        yield "loss", "rehearsal.loss", recipe.rehearsal.loss
    yield from (("policy", f"eval.policies.{name}", kind) for name, kind in recipe.eval.policies.items())


def _server_knobs(recipe: Recipe) -> dict[str, Any]:
    """Return the knobs of the servers, with only the first address if there are several."""
    knobs = dict(recipe.engine.knobs)
    if isinstance(knobs.get("url"), list | tuple):
        knobs["url"] = next(iter(knobs["url"]), "")
    return knobs


def _take_coefficient(where: str, knobs: dict[str, Any]) -> None:
    """Remove the coefficient of a regulariser from its knobs. Raises ConfigError if it is not a finite number."""
    found = knobs.pop("coef", None)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ConfigError(f"{where}.coef is missing: what the regulariser is multiplied by, a number")
    if not math.isfinite(found):
        raise ConfigError(f"{where}.coef = {found} must be a finite number")


def _model_errors(recipe: Recipe) -> Iterator[str]:
    model = recipe.model
    if model.train == "all" and model.top_layers:
        yield f"model.top_layers = {model.top_layers} goes with model.train = 'top' or 'lora'; with 'all' all learn"
    if model.train == "top" and not model.top_layers:
        yield "model.train = 'top' wants model.top_layers: how many of the last layers learn"
    if model.train == "lora" and importlib.util.find_spec("peft") is None:
        yield "model.train = 'lora' needs an optional dependency; install it with: pip install 'turnstile-rl[lora]'"


def _sampling_errors(recipe: Recipe) -> Iterator[str]:
    sampling = recipe.sampling
    if sampling.temperature == 0:
        yield "sampling.temperature = 0 leaves nothing to learn from; train with one above 0"
    engine = recipe.engine
    if not engine.in_process and engine.kind != SERVERS and ":" not in engine.kind:
        known = engine.kind in KINDS["engine"]
        near = "" if known else f" ({nearest(engine.kind, ('transformers', SERVERS))})"
        yield f"engine.kind = {engine.kind!r} cannot train; take transformers, or openai for servers{near}"
    if engine.kind == SERVERS and engine.knobs.get("mode") == "text":
        yield "engine.mode = 'text' is for evaluation and judges; training needs ids: use 'tokens'"
    if not (sampling.regex or sampling.grammar):
        return
    if sampling.regex and sampling.grammar:
        yield "sampling.regex and sampling.grammar are both set; set only one"
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0:
        yield "sampling.regex and sampling.grammar cannot be combined with top_k, top_p or min_p; turn those off"
    if recipe.engine.in_process and importlib.util.find_spec("llguidance") is None:
        yield (
            "sampling.regex or sampling.grammar needs an optional dependency; install it with: "
            "pip install 'turnstile-rl[grammar]'"
        )
    elif recipe.engine.in_process:
        yield from _grammar_errors(recipe)


def _grammar_errors(recipe: Recipe) -> Iterator[str]:
    """Yield an error if the expression that turns must match cannot be parsed."""
    from llguidance import LLMatcher

    sampling = recipe.sampling
    rule = LLMatcher.grammar_from_regex(sampling.regex) if sampling.regex else sampling.grammar
    failed, messages = LLMatcher.validate_grammar_with_warnings(rule)
    if failed:
        name = "regex" if sampling.regex else "grammar"
        first, *others = messages[0].splitlines()
        why = next(
            (line for line in others if line.startswith("error: ")), first
        )  # the other lines only point to its position
        yield f"sampling.{name} cannot be read: {why.removeprefix('error: ')}"


def _path_errors(recipe: Recipe) -> Iterator[str]:
    """Yield errors about missing files and malformed addresses."""
    for name, path in (
        ("tasks.train", recipe.tasks.train),
        ("tasks.heldout", recipe.tasks.heldout),
        ("sft.conversations", recipe.sft.conversations),
    ):
        if path and not Path(path).exists():
            yield f"{name} = {path!r}: there is no such file; check the path"
    for name, model in (("model.id", recipe.model.id), ("train.teacher", recipe.train.teacher)):
        if Path(model).is_absolute() and not Path(model).is_dir():  # relative paths are absolute by now
            yield f"{name} = {model!r}: there is no such folder; give a folder, or a hub id"
    urls = recipe.engine.knobs.get("url", "") if recipe.engine.kind == SERVERS else ""
    for name, url in (
        *(("engine.url", url) for url in _as_list(urls)),
        *(("judge.url", url) for url in recipe.judge.urls),
    ):
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            yield f"{name} = {url!r} is no address; write it like http://127.0.0.1:8000/v1"
    if recipe.engine.kind == SERVERS and not _as_list(urls):
        yield "engine.kind = 'openai' needs engine.url, like http://127.0.0.1:8000/v1, or a list of them"


def _as_list(urls: object) -> list[str]:
    return [
        url
        for url in ([urls] if isinstance(urls, str) else list(urls) if isinstance(urls, list | tuple) else [])
        if url
    ]


def _reward_errors(recipe: Recipe) -> Iterator[str]:
    terms = recipe.rewards.terms
    if not terms:
        yield "rewards.terms is empty, so nothing is rewarded; name a term"
    names = Counter(term.name or term.kind for term in terms)
    if (twice := names.most_common(1)) and twice[0][1] > 1:
        yield f"rewards.terms: two terms are called {twice[0][0]!r}; give one another name"
    graders = {kind.kind for kind in recipe.graders}
    own = any(":" in kind for kind in graders)
    for term in terms:
        wanted = GRADED.get(term.kind)
        if wanted and wanted not in graders and not own:
            yield f'reward {term.kind!r} reads what the grader {wanted!r} writes; add [[graders]] kind = "{wanted}"'


def _other_errors(recipe: Recipe, env: bool) -> Iterator[str]:
    kinds = Counter(kind.kind for kind in recipe.trackers)
    if (twice := kinds.most_common(1)) and twice[0][1] > 1:
        yield f"trackers: {twice[0][0]!r} is named twice"
    if env or recipe.env.kind not in ALONE:
        return
    shown = recipe.sft.demonstrator.kind
    if recipe.sft.demos and shown in KINDS["demonstrator"] and shown != recipe.env.kind:
        yield f"sft.demonstrator.kind = {shown!r} plays another environment; take {recipe.env.kind!r}"
    for name, policy in recipe.eval.policies.items():
        if policy.kind in KINDS["policy"] and policy.kind.rpartition("_")[0] != recipe.env.kind:
            yield (
                f"eval.policies.{name}.kind = {policy.kind!r} plays another environment; take "
                f"'{recipe.env.kind}_{policy.kind.rpartition('_')[2]}'"
            )


def _rollout_errors(recipe: Recipe) -> Iterator[str]:
    factor = recipe.rollout.straggler_factor
    if 0 < factor <= 1:
        yield (
            f"rollout.straggler_factor = {factor} stops episodes sooner than others of their task took; "
            "take more than 1, or 0 for never"
        )
    if factor and recipe.engine.deterministic:
        yield "rollout.straggler_factor goes by the clock, so with it no run repeats; drop it or engine.deterministic"
    if recipe.rollout.max_staleness and recipe.engine.deterministic:
        yield (
            f"rollout.max_staleness = {recipe.rollout.max_staleness} has new weights come in mid-turn, "
            "so with it no run repeats; drop it or engine.deterministic"
        )


def _training_errors(recipe: Recipe, env: bool) -> Iterator[str]:
    train, kind = recipe.train, recipe.credit.kind
    if recipe.replay_buffer.size and kind in KINDS["credit"] and kind != "recalibrated":
        yield (
            f"replay_buffer.size = {recipe.replay_buffer.size} wants credit.kind = 'recalibrated', which judges "
            f"earlier attempts by what the policy reaches now; {kind!r} does not"
        )
    if train.reference_every and not 0 < train.checkpoint_every <= train.reference_every:
        yield (
            f"train.reference_every = {train.reference_every} needs a checkpoint at least as often, but "
            f"train.checkpoint_every = {train.checkpoint_every}"
        )
    losses = [recipe.loss.kind, *(regularizer.kind for regularizer in recipe.regularizers)]
    if "value" in losses:
        yield (
            "the loss `value` is a critic's, and no policy's: take a credit that learns one, like gae, and set "
            "credit.critic.clip"
        )
    if "distill" in losses and not train.teacher:
        yield "a loss of this recipe learns from a teacher; name its model in train.teacher"
    best = train.keep_best
    if best and not best.startswith(HELDOUT) and meaning_of(best) is None:
        names = [name for section in METRICS.values() for name in section if "*" not in name]
        yield f"train.keep_best = {best!r} is no metric; {nearest(best, names)} (docs/metrics.md lists them)"
    ours = not env and recipe.env.kind in ALONE
    if kind in UNFED and (ours or kind in UNPLAYED):
        yield f"credit.kind = {kind!r} needs {UNFED[kind]}; here it would be no other than grpo or rloo"
