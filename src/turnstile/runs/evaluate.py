"""`turnstile eval`: held-out episodes of a model, of a run's last weights, or of a policy that is not a model."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from turnstile.config import Kind, Recipe
from turnstile.errors import ConfigError
from turnstile.evaluation.metrics import EpisodeResult, from_group
from turnstile.lookup import nearest
from turnstile.models.load import load_tokenizer
from turnstile.records.record import Recorder, label_of
from turnstile.runs.run_folder import read_results
from turnstile.runs.scripted import MODEL, check_policies, play_policy
from turnstile.runs.session import counter
from turnstile.swe.formats.predictions import write_predictions
from turnstile.tracking.base import Tracker
from turnstile.tracking.board import StatusBoard
from turnstile.trainer import checkpoint
from turnstile.types import Group, Task
from turnstile.wiring.agent import EVALUATION, Agent, for_evaluation, make_agent, make_player, make_scaffold
from turnstile.wiring.graders import check_asked, check_graders, make_graders
from turnstile.wiring.servers import Remote, is_text, make_remote
from turnstile.wiring.tasks import read_tasks
from turnstile.wiring.world import make_scorer, make_trackers, make_world


def evaluate(
    recipe: Recipe,
    *,
    run: Path | None = None,
    model: str | None = None,
    policy: str = MODEL,
    samples: int | None = None,
    limit: int | None = None,
    predictions: str | Path | None = None,
    plain: bool = False,
) -> dict[str, list[EpisodeResult]]:
    """Play the recipe's held-out tasks and return the results by name.

    `policy` is "model" or a name in the recipe's `eval.policies`. The model is `model`, else the last checkpoint of
    `run`, else the recipe's own. If the recipe's engine is a server, its model plays, under the name `engine.model`.

    Episodes are recorded in `run`, if given, under the name in the results, and replace those of an earlier call. If
    the run itself made an evaluation of that name, `.again` is added to the name. At most `limit` tasks are played,
    `samples` times each (default: as the recipe says); a policy plays each task once. The random numbers are those of
    the run's own evaluations: they depend on the recipe's seed, the task and the sample, not on what is evaluated.

    If `predictions` names a file, patches are written to it in SWE-bench's format. With `plain` the console prints only
    lines.
    """
    if policy != MODEL and (model is not None or samples not in (None, 1)):
        raise ConfigError(f"policy {policy!r} is no model and plays each task once; leave out the model and samples")
    return asyncio.run(_evaluate(recipe, run, model, policy, samples or recipe.eval.samples, limit, predictions, plain))


async def _evaluate(
    recipe: Recipe,
    run: Path | None,
    model: str | None,
    policy: str,
    samples: int,
    limit: int | None,
    predictions: str | Path | None,
    plain: bool,
) -> dict[str, list[EpisodeResult]]:
    check_policies(recipe)
    check_graders(recipe)
    tasks = read_tasks(recipe, "heldout", limit or recipe.eval.tasks)
    check_asked(recipe, heldout=tasks)
    scorer = make_scorer(recipe)
    name, network, step = _subject(recipe, run, model, policy)
    taken = {label_of(evaluation) for evaluation in read_results(run)} if run is not None else set()
    while label_of(name) in taken:
        name += ".again"
    async with AsyncExitStack() as stack:
        folder = run or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turnstile-eval-")))
        board = StatusBoard()
        console = tuple(kind for kind in recipe.trackers if kind.kind == "console") or (Kind(kind="console"),)
        title = run or Path(recipe.name)
        tracker = make_trackers(recipe.model_copy(update={"trackers": console}), title, board=board, plain=plain)
        stack.callback(tracker.close)
        if policy == MODEL:
            groups = await _with_model(stack, recipe, name, network, tasks, samples, tracker, board, folder)
        else:
            groups = await _with_policy(stack, recipe, policy, network, tasks, tracker, board, folder)
        scores = scorer(groups)
        if run is not None:
            recorder = Recorder(run)
            recorder.drop(step, "eval", label_of(name))
            for group, own in zip(groups, scores, strict=True):
                recorder.write(step, "eval", group, own, label=label_of(name))
            recorder.sync()
    if predictions is not None:
        write_predictions(predictions, name, groups)
    return {name: [result for group, own in zip(groups, scores, strict=True) for result in from_group(group, own)]}


async def _with_model(
    stack: AsyncExitStack,
    recipe: Recipe,
    name: str,
    network: str,
    tasks: Sequence[Task],
    samples: int,
    tracker: Tracker,
    board: StatusBoard,
    folder: Path,
) -> list[Group]:
    speaker: Agent | Remote
    if recipe.engine.in_process:
        speaker = agent = make_agent(recipe, network)
    else:
        agent = None
        scaffold = make_scaffold(recipe, None if is_text(recipe) else load_tokenizer(network))
        speaker = await make_remote(recipe, scaffold)
        stack.push_async_callback(speaker.close)
    world = make_world(recipe, graders=make_graders(recipe, folder, agent), board=board)
    stack.push_async_callback(world.close)
    player = for_evaluation(recipe, make_player(recipe, world, speaker.scaffold, speaker.engine, speaker.context))
    done = counter(tracker, f"evaluating {name}", len(tasks) * samples)
    return await player.groups(tasks, samples, label=f"eval/{name}", seed=recipe.seed, stream=EVALUATION, done=done)


async def _with_policy(
    stack: AsyncExitStack,
    recipe: Recipe,
    policy: str,
    network: str,
    tasks: Sequence[Task],
    tracker: Tracker,
    board: StatusBoard,
    folder: Path,
) -> list[Group]:
    policies = recipe.eval.policies
    if policy not in policies:
        hint = nearest(policy, policies) if policies else "it names none"
        raise ConfigError(f"eval.policies of this recipe has no {policy!r}; {hint}")
    world = make_world(recipe, graders=make_graders(recipe, folder, None), board=board)
    stack.push_async_callback(world.close)
    scaffold = make_scaffold(recipe, load_tokenizer(network))
    done = counter(tracker, f"evaluating {policy}", len(tasks))
    return await play_policy(recipe, world, scaffold, policies[policy], tasks, done)


def _subject(recipe: Recipe, run: Path | None, model: str | None, policy: str) -> tuple[str, str, int]:
    """Return the name, model and training step to evaluate. For a policy, only the model's tokenizer is used."""
    if not recipe.engine.in_process and policy == MODEL:
        if model is not None:
            raise ConfigError(f"--model names a model to load; that of a server is named with engine.model={model}")
        return str(recipe.engine.knobs.get("model") or "server"), recipe.model.id, 0
    if model is not None:
        return model, model, 0
    if run is None:
        return (recipe.model.id if policy == MODEL else policy), recipe.model.id, 0
    found, complaints = checkpoint.latest(run / "checkpoints")
    if policy != MODEL:
        return policy, str(found.model) if found else recipe.model.id, 0
    if found is None:
        why = complaints[0] if complaints else "it was stopped before the first one"
        raise ConfigError(f"{run} has no checkpoint to evaluate ({why}); name a model with --model")
    return found.path.name, str(found.model), found.step
