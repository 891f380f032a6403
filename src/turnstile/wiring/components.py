"""From a recipe to the parts of a run. This is the only room that knows all the others."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from turnstile.agents.base import Renderer, Scaffold
from turnstile.agents.renderer_messages import MessagesRenderer
from turnstile.config import Kind, Recipe, TermConfig
from turnstile.credit.base import Estimator, targets_of
from turnstile.engines.base import Engine
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.envs.base import Env
from turnstile.envs.threads import Threads
from turnstile.errors import ConfigError, TaskError
from turnstile.lookup import resolve
from turnstile.losses.base import TokenLoss, needs_of
from turnstile.losses.multipliers import PROXIMAL, weighted
from turnstile.models.adapt import choose_trainable
from turnstile.models.allocator import keep_freed_memory
from turnstile.models.load import check_model, load_model, load_tokenizer
from turnstile.rewards.base import Term, Threshold
from turnstile.rewards.build import Scorer, make_term
from turnstile.rewards.graders import Grader
from turnstile.rewards.on_stop import StopRules
from turnstile.rollout.deadlines import Deadlines
from turnstile.rollout.episode import AWAY, Limits
from turnstile.rollout.failures import Failures
from turnstile.rollout.group import Player
from turnstile.tasks.base import load_tasks
from turnstile.tracking.base import Tracker
from turnstile.tracking.board import StatusBoard
from turnstile.tracking.fanout import Trackers
from turnstile.trainer.critic import AuxiliaryModel
from turnstile.trainer.learner import Learner, Objective, Plan
from turnstile.trainer.reference import LogprobProvider, Past, Proximal, Reference, Teacher
from turnstile.types import Sampling, Task
from turnstile.wiring.hints import make_hint
from turnstile.wiring.kinds import bind, bind_part, make_part, takes
from turnstile.wiring.sandboxes import make_sandboxes
from turnstile.wiring.servers import check_servers


class Shared(Protocol):
    """What all episodes of a run use: sandboxes, a grader."""

    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """What episodes happen in, and who looks at them: the environment's maker, what all its episodes share, the
    graders by name, and the board that shows where the episodes are."""

    make_env: Callable[[], Env]
    shared: tuple[Shared, ...] = ()  # in the order they were made
    graders: Mapping[str, Grader] = field(default_factory=dict)
    board: StatusBoard = field(default_factory=StatusBoard)

    async def close(self) -> None:
        for part in reversed((*self.shared, *self.graders.values())):
            await part.close()


def make_world(
    recipe: Recipe,
    env: Callable[..., Env] | None = None,
    graders: Mapping[str, Grader] | None = None,
    board: StatusBoard | None = None,
) -> World:
    """The environment of a recipe, or `env` in its place, with the `graders`, which it closes. An environment that
    names a parameter `sandboxes`, `grader` or `problems` is given the run's; one whose methods are plain functions is
    called in threads."""
    world = _make_world(recipe, env)
    return replace(world, graders=graders or {}, board=board or world.board)


def _make_world(recipe: Recipe, env: Callable[..., Env] | None) -> World:
    threads = Threads(recipe.episode.concurrent)  # none is made before it is needed
    maker = functools.partial(env, **recipe.env.knobs) if env is not None else bind("env", recipe.env, given=SHARED)
    if not any(takes(maker, name) for name in SHARED):
        return World(make_env=threads.around(maker), shared=(threads,))
    grades = takes(maker, "grader") or takes(maker, "problems")
    sandboxes = make_sandboxes(recipe.sandbox, run=recipe.name, grading=grades)
    shared: dict[str, Any] = {"sandboxes": sandboxes}
    if grades:
        from turnstile.swe.grading.grader import CodeGrader  # what repository tasks need is loaded for them alone
        from turnstile.swe.problems.problems import Problems

        shared["grader"] = CodeGrader(sandboxes)
        shared["problems"] = Problems(shared["grader"])
    given = {name: value for name, value in shared.items() if takes(maker, name)}
    make_env = threads.around(functools.partial(maker, **given))
    return World(make_env=make_env, shared=(*shared.values(), threads))


SHARED = ("sandboxes", "grader", "problems")


def check_kinds(recipe: Recipe, env: Callable[..., Env] | None = None) -> None:
    """Raises ConfigError for any name or knob of a recipe that is wrong, before anything is made or loaded."""
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


def make_scorer(recipe: Recipe, reward: Callable[..., Any] | None = None) -> Scorer:
    """The rewards of a recipe; `reward`, a plain function, replaces its terms by one."""
    if reward is not None:
        terms = [make_term("reward", reward, level=1)]
    else:
        terms = [_make_term(term, f"rewards.terms[{place}]") for place, term in enumerate(recipe.rewards.terms)]
    compose = bind("compose", Kind(kind=recipe.rewards.compose))
    return Scorer(terms=tuple(terms), compose=compose, ends=StopRules.read(recipe.on_stop.model_dump()))


def _make_term(term: TermConfig, where: str) -> Term:
    gate = Threshold(value=term.gate.value, compare=term.gate.compare) if term.gate else None
    scope = term.scope or None
    try:
        return make_term(term.name, term.kind, term.knobs, level=term.level, weight=term.weight, gate=gate, scope=scope)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Agent:
    """The network and everything that speaks for it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    scaffold: Scaffold
    make_engine: Callable[[], TransformersEngine]
    context: int

    @functools.cached_property
    def engine(self) -> TransformersEngine:
        """Made at first use: a model that servers sample from may be of a family that this engine does not take.

        Raises ConfigError for those.
        """
        return self.make_engine()


def make_scaffold(recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None) -> Scaffold:
    """The agent's halves. A renderer that names a parameter `parser` is given the agent's; without a tokenizer it is
    `messages`."""
    parser = bind("parser", recipe.agent.parser)()
    if tokenizer is None:
        return Scaffold(MessagesRenderer(parser=parser), parser)
    maker = bind("renderer", recipe.agent.renderer, given=("tokenizer", "parser"))
    return Scaffold(maker(tokenizer, parser=parser) if takes(maker, "parser") else maker(tokenizer), parser)


def check_models(recipe: Recipe) -> None:
    """Raises ConfigError for a model that cannot be had, before anything is made; a hub is waited for a few seconds."""
    for where, name in (("model.id", recipe.model.id), ("train.teacher", recipe.train.teacher)):
        if name:
            check_model(name, where)


def make_agent(recipe: Recipe, model: str | None = None) -> Agent:
    """Loads the recipe's model, or the one named `model`, with its engine and scaffold."""
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
    """The tokens that the model ends a turn with."""
    found: set[int] = set()
    generation = model.generation_config.eos_token_id if model.generation_config else None
    for value in (tokenizer.eos_token_id, model.config.get_text_config().eos_token_id, generation):
        found.update([value] if isinstance(value, int) else value or [])
    return found


def make_sampling(recipe: Recipe) -> Sampling:
    """How turns are sampled, as `[sampling]` says it; stop strings and seeds come with each request."""
    return Sampling(**recipe.sampling.model_dump())


def make_player(recipe: Recipe, world: World, scaffold: Scaffold, engine: Engine, context: int) -> Player:
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
            away=max(AWAY, 2 * recipe.engine.reconnect_timeout),
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
"""The stream of random numbers of every evaluation: of whatever model, episodes are compared draw by draw."""


def for_evaluation(recipe: Recipe, player: Player) -> Player:
    """The same player at the temperature of `[eval]`, and without deadlines that depend on what was played before."""
    temperature = player.sampling.temperature if recipe.eval.temperature is None else recipe.eval.temperature
    return replace(player, deadlines=None, sampling=replace(player.sampling, temperature=temperature))


def trainable(recipe: Recipe, agent: Agent) -> list[nn.Parameter]:
    """What of the network learns; adapters are put in where they do."""
    model = recipe.model
    return choose_trainable(
        agent.model, model.train, top_layers=model.top_layers, lora_rank=model.lora_rank, lora_alpha=model.lora_alpha
    )


def make_learner(recipe: Recipe, agent: Agent) -> Learner:
    """The learner of RL."""
    train = recipe.train
    plan = Plan(
        lr=train.lr,
        schedule=bind("schedule", Kind(kind=train.schedule)),
        warmup=train.warmup,
        total=train.steps * train.epochs * train.minibatches,
        betas=train.betas,
        weight_decay=train.weight_decay,
        clip=train.clip,
        budget=train.max_tokens_per_microbatch,
        checkpointing=train.checkpointing,
    )
    return Learner(agent.model, trainable(recipe, agent), plan)


def make_objective(recipe: Recipe) -> Objective:
    """The loss with its factors, its token weights and the regularisers of RL."""
    regularizers: list[tuple[float, TokenLoss]] = []
    for kind in recipe.regularizers:
        coefficient, bare = kind.split("coef")
        if not isinstance(coefficient, int | float):
            raise ConfigError(f"regularizers: {kind.kind!r} needs coef, a number")
        regularizers.append((float(coefficient), bind("loss", bare, given=("logprobs", "batch"))))
    loss = bind("loss", recipe.loss, given=("logprobs", "batch"))
    multipliers = [bind("loss_multiplier", kind, given=("batch",)) for kind in recipe.loss_multipliers]
    corrected = any(PROXIMAL in needs_of(part).extras for part in (loss, *multipliers))
    older = recipe.rollout.max_staleness or recipe.replay_buffer.size  # what was played ahead, or is trained on again
    elsewhere = not recipe.engine.in_process  # another program's kernels and rounding gave the log-probabilities
    if (older or elsewhere) and not corrected:
        multipliers.append(bind("loss_multiplier", Kind(kind="tis"), given=("batch",)))
    objective = Objective(
        loss=weighted(loss, multipliers),
        weigh=bind("loss_aggregation", recipe.loss_aggregation, given=("rows",)),
        regularizers=tuple(regularizers),
        sampling=make_sampling(recipe),
    )
    given = {*ANNOTATORS, *_declared_providers(recipe)}
    if unknown := [name for name in objective.needs.extras if name not in given]:
        raise ConfigError(f"nothing in a recipe gives the array {unknown[0]!r} that its losses need")
    return objective


ANNOTATORS: Mapping[str, Callable[[Recipe, Learner, Path, int], LogprobProvider]] = {
    "ref_logprobs": lambda recipe, learner, folder, step: _reference(recipe, learner, folder, step),
    "proximal_logprobs": lambda _, learner, *__: Proximal(learner),
    "teacher_logprobs": lambda recipe, learner, *_: _teacher(recipe, learner),
    "entropy_past": lambda _, learner, *__: Past(learner),
}
"""Array that losses may need -> what gives it, from the recipe, the learner, the run's folder and the last step. What a
loss needs besides it has a provider for, which it declares (`losses.base.needs`)."""


def _reference(recipe: Recipe, learner: Learner, folder: Path, step: int) -> Reference:
    return Reference(learner, folder, step=step, every=recipe.train.reference_every, keep=recipe.train.keep)


def _teacher(recipe: Recipe, learner: Learner) -> Teacher:
    return Teacher(load_model(recipe.train.teacher, device=recipe.model.device, dtype=recipe.model.dtype), learner)


def _declared_providers(recipe: Recipe) -> dict[str, functools.partial[LogprobProvider]]:
    """Array -> its provider with its knobs, of those that the losses of a recipe declare. Raises ConfigError for two
    that differ."""
    kinds = [("loss", kind) for kind in (recipe.loss, *recipe.regularizers)]
    kinds += [("loss_multiplier", kind) for kind in recipe.loss_multipliers]
    found: dict[str, functools.partial[LogprobProvider]] = {}
    for room, kind in kinds:
        if (bound := bind_part(room, kind)) is None:
            continue
        for name in set(needs_of(resolve(room, kind.kind)).extras) - set(ANNOTATORS):
            first = found.setdefault(name, bound)
            if (first.func, first.keywords) != (bound.func, bound.keywords):
                raise ConfigError(f"two losses want the array {name!r} in different ways; give them the same knobs")
    return found


def make_logprob_providers(
    recipe: Recipe, objective: Objective, learner: Learner, folder: Path, *, renderer: Renderer, step: int = 0
) -> tuple[LogprobProvider, ...]:
    """What gives the rows of a step the arrays that the losses of a recipe need. `step` is the last that was done."""
    declared = _declared_providers(recipe)
    return tuple(
        ANNOTATORS[name](recipe, learner, folder, step)
        if name in ANNOTATORS
        else make_part(declared[name], learner=learner, renderer=renderer, sampling=objective.sampling)
        for name in objective.needs.extras
    )


def make_learned(recipe: Recipe, estimator: Estimator, learner: Learner) -> AuxiliaryModel | None:
    """What learns beside the policy because the recipe's credit needs it."""
    if (bound := bind_part("credit", recipe.credit)) is None:
        return None
    part: AuxiliaryModel = make_part(
        bound, learner=learner, targets=targets_of(estimator), sampling=make_sampling(recipe)
    )
    return part


def make_trackers(recipe: Recipe, run: Path, *, board: StatusBoard | None = None, plain: bool = False) -> Tracker:
    """What a run's numbers go to. A tracker that names a parameter `board` is given the run's; with `plain` those that
    can be plain are."""
    return Trackers([_make_tracker(kind, run, board or StatusBoard(), plain=plain) for kind in recipe.trackers])


def _make_tracker(kind: Kind, run: Path, board: StatusBoard, *, plain: bool) -> Tracker:
    maker = bind("tracker", kind, given=("run", "board"))
    given: dict[str, Any] = {"board": board} if takes(maker, "board") else {}
    if plain and takes(maker, "plain"):
        given["plain"] = True
    tracker: Tracker = maker(run, **given)
    return tracker


def read_tasks(recipe: Recipe, which: str, limit: int = 0) -> list[Task]:
    """The train or held-out tasks of a recipe after `tasks.where`; raises TaskError when none is left.

    With a limit, that many drawn over the whole file: always the same ones, whatever the seed of the run, so
    that runs can be compared task by task.
    """
    path = recipe.tasks.train if which == "train" else recipe.tasks.heldout
    if not path:
        raise ConfigError(f"tasks.{which} is not set; name a JSON-lines file (turnstile tasks make writes one)")
    tasks = [task for task in load_tasks(path) if _wanted(task, recipe.tasks.where)]
    if not tasks:
        raise TaskError(f"{path}: no task is left after tasks.where = {recipe.tasks.where}")
    return random.Random("tasks").sample(tasks, limit) if 0 < limit < len(tasks) else tasks


def _wanted(task: Task, where: Mapping[str, Any]) -> bool:
    """A number asks for at most that much, a list for one of its values, anything else for just itself."""
    for key, wanted in where.items():
        value = task.data.get(key)
        if isinstance(wanted, int | float) and not isinstance(wanted, bool):
            if not isinstance(value, int | float) or value > wanted:
                return False
        elif isinstance(wanted, Iterable) and not isinstance(wanted, str):
            if value not in wanted:
                return False
        elif value != wanted:
            return False
    return True


def overlap(train: Sequence[Task], heldout: Sequence[Task]) -> list[str]:
    """Ids of tasks that are in both."""
    return sorted({task.id for task in train} & {task.id for task in heldout})
