"""A recipe's graders, and the model of `[judge]` that some of them ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnstile.agents.renderer_messages import MessagesRenderer
from turnstile.agents.writer import model_writer
from turnstile.config import Kind, Recipe
from turnstile.errors import ConfigError
from turnstile.rewards.graders import Grader
from turnstile.rewards.judges.ask import Asker
from turnstile.types import Sampling, Task
from turnstile.wiring.agent import Agent, make_agent
from turnstile.wiring.hints import make_hint
from turnstile.wiring.kinds import bind, takes
from turnstile.wiring.servers import make_servers

POLICY = ("engine", "renderer", "tokenizer")
"""Parameters of graders that ask the policy itself."""
GIVEN = ("asker", "chars", *POLICY)
VERDICTS = "verdicts.jsonl"
"""The file in a run's folder that holds the judges' answers."""


def check_graders(recipe: Recipe) -> None:
    """Raise ConfigError if a grader is unavailable, lacks a judge's model, or needs a policy in this process."""
    for kind in recipe.graders:
        maker = bind("grader", kind, given=GIVEN)
        if takes(maker, "engine") and not recipe.engine.in_process:
            raise ConfigError(
                f"grader kind {kind.kind!r} asks the policy how likely given tokens are, which engine.kind = "
                f"{recipe.engine.kind!r} cannot tell: play with engine.kind = 'transformers', or leave it out"
            )
        if takes(maker, "asker") and not (recipe.judge.model or recipe.judge.urls):
            raise ConfigError(
                f"grader kind {kind.kind!r} asks a model: name it under [judge], with a url, or as a model to load"
            )


def check_asked(recipe: Recipe, *, train: Sequence[Task] = (), heldout: Sequence[Task] = ()) -> None:
    """Raise ConfigError, naming the task, if a task lacks data that a grader or the hint needs. Loads no model."""
    given = {**dict.fromkeys(("asker", *POLICY)), "chars": recipe.judge.chars}
    for kind in recipe.graders:
        maker = bind("grader", kind, given=GIVEN)
        if hasattr(getattr(maker, "func", maker), "check"):
            grader = _make_grader(kind, maker, given)
            for task in (*train, *heldout):
                grader.check(task)
    if (check := getattr(make_hint(recipe), "check", None)) is not None:
        for task in train:
            check(task)


def make_graders(recipe: Recipe, folder: Path | None, agent: Agent | None) -> dict[str, Grader]:
    """Return the graders in their order, keyed by "PLACE:KIND".

    Graders that ask a model share one, whose answers are kept in `folder`. `agent` is the policy if it is a model in
    this process, otherwise None.
    """
    check_graders(recipe)
    makers = [bind("grader", kind, given=GIVEN) for kind in recipe.graders]
    given: dict[str, Any] = dict.fromkeys(POLICY)
    if agent is not None:
        given = {"renderer": agent.scaffold.renderer, "tokenizer": agent.tokenizer}
        if any(takes(maker, "engine") for maker in makers):
            given["engine"] = agent.engine
    if any(takes(maker, "asker") for maker in makers):
        given |= {"asker": make_asker(recipe, folder), "chars": recipe.judge.chars}
    found: dict[str, Grader] = {}
    for place, (kind, maker) in enumerate(zip(recipe.graders, makers, strict=True)):
        found[f"{place}:{kind.kind}"] = _make_grader(kind, maker, given)
    return found


def _make_grader(kind: Kind, maker: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    try:
        return maker(**{name: it for name, it in given.items() if takes(maker, name)})
    except TypeError as error:
        raise ConfigError(f"grader kind {kind.kind!r}: {error}") from None


def make_asker(recipe: Recipe, folder: Path | None) -> Asker:
    """Return the asker of the model in `[judge]`, which is on a server or loaded here."""
    judge = recipe.judge
    sampling = Sampling(temperature=judge.temperature, max_tokens=judge.max_tokens)
    close = None
    if judge.urls:
        knobs = {"mode": "text", "model": judge.model, "key": judge.key, "concurrent": judge.concurrent}
        engine = make_servers("openai", judge.urls, {**knobs, "timeout": judge.timeout, "retries": judge.retries})
        write, close = model_writer(engine, MessagesRenderer(), sampling), engine.disconnect
    else:
        chat = {"renderer": {"kind": "chat"}, "parser": {"kind": "hermes"}}
        agent = make_agent(Recipe.model_validate({"model": {"id": judge.model}, "agent": chat}))
        write = model_writer(agent.engine, agent.scaffold.renderer, sampling)
    return Asker(
        write,
        identity=f"{judge.model or judge.url} temperature={judge.temperature:g} max_tokens={judge.max_tokens}",
        kept=folder / VERDICTS if folder is not None else None,
        concurrent=judge.concurrent,
        constrained=judge.constrained,
        close=close,
    )
