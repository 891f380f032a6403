"""A recipe's examiners, and the model that those which judge ask."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnstile.agents.renderer_messages import MessagesRenderer
from turnstile.agents.writer import writer
from turnstile.build.kinds import bind, takes
from turnstile.build.parts import make_agent
from turnstile.build.servers import make_servers
from turnstile.config import Recipe
from turnstile.errors import ConfigError
from turnstile.rewards.examine import Examiner
from turnstile.rewards.judges.ask import Asker
from turnstile.types import Sampling

GIVEN = ("asker", "chars")
VERDICTS = "verdicts.jsonl"
"""The file of a run folder with what judges answered."""


def check_examiners(recipe: Recipe) -> None:
    """Raises ConfigError for an examiner that cannot be had, and for a judge without a model."""
    for kind in recipe.examiners:
        if takes(bind("examiner", kind, given=GIVEN), "asker") and not (recipe.judge.model or recipe.judge.urls):
            raise ConfigError(
                f"examiner kind {kind.kind!r} asks a model: name it under [judge], with a url, or as a model to load"
            )


def make_examiners(recipe: Recipe, folder: Path | None) -> dict[str, Examiner]:
    """The examiners in their order, by kind and place; those that ask share one model, whose answers are kept in
    `folder`."""
    check_examiners(recipe)
    makers = [bind("examiner", kind, given=GIVEN) for kind in recipe.examiners]
    given: Mapping[str, Any] = {}
    if any(takes(maker, "asker") for maker in makers):
        given = {"asker": make_asker(recipe, folder), "chars": recipe.judge.chars}
    found: dict[str, Examiner] = {}
    for place, (kind, maker) in enumerate(zip(recipe.examiners, makers, strict=True)):
        try:
            found[f"{place}:{kind.kind}"] = maker(**{name: it for name, it in given.items() if takes(maker, name)})
        except TypeError as error:
            raise ConfigError(f"examiner kind {kind.kind!r}: {error}") from None
    return found


def make_asker(recipe: Recipe, folder: Path | None) -> Asker:
    """The model of `[judge]`: behind a server, or loaded."""
    judge = recipe.judge
    sampling = Sampling(temperature=judge.temperature, max_tokens=judge.max_tokens)
    close = None
    if judge.urls:
        knobs = {"mode": "text", "model": judge.model, "key": judge.key, "concurrent": judge.concurrent}
        engine = make_servers("openai", judge.urls, {**knobs, "timeout": judge.timeout, "retries": judge.retries})
        write, close = writer(engine, MessagesRenderer(), sampling), engine.disconnect
    else:
        chat = {"renderer": {"kind": "chat"}, "parser": {"kind": "hermes"}}
        agent = make_agent(Recipe.model_validate({"model": {"id": judge.model}, "agent": chat}))
        write = writer(agent.engine, agent.scaffold.renderer, sampling)
    return Asker(
        write,
        identity=f"{judge.model or judge.url} temperature={judge.temperature:g} max_tokens={judge.max_tokens}",
        kept=folder / VERDICTS if folder is not None else None,
        concurrent=judge.concurrent,
        tries=judge.tries,
        constrained=judge.constrained,
        close=close,
    )
