"""The model with its tokenizer, scaffold and engine, and the player of its episodes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from turnstile.agents.base import Scaffold
from turnstile.agents.renderer_messages import MessagesRenderer
from turnstile.config import Recipe
from turnstile.engines.base import Engine
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.envs.base import Env
from turnstile.models.allocator import keep_freed_memory
from turnstile.models.load import check_model, load_model, load_tokenizer
from turnstile.rollout.deadlines import Deadlines
from turnstile.rollout.episode import MAX_DOWNTIME, Limits
from turnstile.rollout.failures import Failures
from turnstile.rollout.group import Player
from turnstile.types import Sampling
from turnstile.wiring.hints import make_hint
from turnstile.wiring.kinds import bind, takes
from turnstile.wiring.servers import check_servers
from turnstile.wiring.world import SHARED, World


def check_kinds(recipe: Recipe, env: Callable[..., Env] | None = None) -> None:
    """Raise ConfigError for a wrong kind or knob that concerns playing and tracking, before anything is loaded."""
    if env is None:
        bind("env", recipe.env, given=SHARED)
    bind("sandbox", recipe.sandbox)
    bind("renderer", recipe.agent.renderer, given=("tokenizer", "parser"))
    bind("parser", recipe.agent.parser)
    for kind in recipe.trackers:
        bind("tracker", kind, given=("run", "board"))
    make_hint(recipe)
    if not recipe.engine.in_process:
        check_servers(recipe)


@dataclass(frozen=True, kw_only=True)
class Agent:
    """The network with its tokenizer, scaffold and local engine. `context` is the maximum context length in tokens."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    scaffold: Scaffold
    make_engine: Callable[[], TransformersEngine]
    context: int

    @functools.cached_property
    def engine(self) -> TransformersEngine:
        """The local engine, built on first use.

        Building it raises ConfigError for a model family that this engine does not support, which remote sampling may
        use.
        """
        return self.make_engine()


def make_scaffold(recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None) -> Scaffold:
    """Return the agent's renderer and parser.

    A renderer that has a parameter `parser` is given the agent's parser. Without a tokenizer the renderer is
    `messages`.
    """
    parser = bind("parser", recipe.agent.parser)()
    if tokenizer is None:
        return Scaffold(MessagesRenderer(parser=parser), parser)
    maker = bind("renderer", recipe.agent.renderer, given=("tokenizer", "parser"))
    return Scaffold(maker(tokenizer, parser=parser) if takes(maker, "parser") else maker(tokenizer), parser)


def check_models(recipe: Recipe) -> None:
    """Raise ConfigError if a model is not available. Asking a hub takes a few seconds at most."""
    for where, name in (("model.id", recipe.model.id), ("train.teacher", recipe.train.teacher)):
        if name:
            check_model(name, where)


def make_agent(recipe: Recipe, model: str | None = None) -> Agent:
    """Load the recipe's model, or the one named `model`, and return it with its scaffold and a maker of its engine."""
    if recipe.model.threads:
        torch.set_num_threads(recipe.model.threads)
    name = model or recipe.model.id
    tokenizer = load_tokenizer(name)
    network = load_model(name, device=recipe.model.device, dtype=recipe.model.dtype)
    if network.device.type == "cpu":
        keep_freed_memory()
    scaffold = make_scaffold(recipe, tokenizer)
    window = int(getattr(network.config.get_text_config(), "max_position_embeddings", 0) or 2**20)
    make_engine = functools.partial(
        TransformersEngine,
        network,
        tokenizer,
        deterministic=recipe.engine.deterministic,
        max_batch=recipe.engine.max_batch,
        memory_mb=recipe.engine.memory_mb,
        pack_weights=recipe.engine.pack_weights,
        speculative_tokens=recipe.engine.speculative_tokens,
        stop_ids=sorted(stop_ids(tokenizer, network)),
    )
    return Agent(
        model=network,
        tokenizer=tokenizer,
        scaffold=scaffold,
        make_engine=make_engine,
        context=min(recipe.episode.context or window, window),
    )


def stop_ids(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> set[int]:
    """Return the ids of the tokens that end the model's turns."""
    found: set[int] = set()
    generation = model.generation_config.eos_token_id if model.generation_config else None
    for value in (tokenizer.eos_token_id, model.config.get_text_config().eos_token_id, generation):
        found.update([value] if isinstance(value, int) else value or [])
    return found


def make_sampling(recipe: Recipe) -> Sampling:
    """Return the sampling parameters of `[sampling]`, to which requests add stop strings and seeds."""
    return Sampling(**recipe.sampling.model_dump())


def make_player(recipe: Recipe, world: World, scaffold: Scaffold, engine: Engine, context: int) -> Player:
    """Return the player of the recipe's episodes, which samples from `engine`."""
    episode = recipe.episode
    return Player(
        make_env=world.make_env,
        engine=engine,
        scaffold=scaffold,
        sampling=make_sampling(recipe),
        limits=Limits(
            turns=episode.turns,
            tokens=episode.tokens,
            context=context,
            seconds=episode.seconds,
            measure_seconds=episode.measure_seconds,
            max_downtime=max(MAX_DOWNTIME, 2 * recipe.engine.reconnect_timeout),
            unparsed=episode.unparsed,
        ),
        retries=episode.retries,
        concurrent=episode.concurrent,
        deterministic=recipe.engine.deterministic,
        deadlines=Deadlines(recipe.rollout.straggler_factor) if recipe.rollout.straggler_factor else None,
        graders=tuple(world.graders.values()),
        hint=make_hint(recipe),
        board=world.board,
        failures=Failures(recipe.rollout.max_failures),
    )


EVALUATION = "eval"
"""The random stream of every evaluation, so that the episodes of different models use the same random numbers."""


def for_evaluation(recipe: Recipe, player: Player) -> Player:
    """Return the player with the temperature of `[eval]`, and without deadlines, which depend on earlier episodes."""
    temperature = player.sampling.temperature if recipe.eval.temperature is None else recipe.eval.temperature
    return replace(player, deadlines=None, sampling=replace(player.sampling, temperature=temperature))
