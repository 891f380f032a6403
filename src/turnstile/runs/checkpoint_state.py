"""The state of a run that checkpoints store, and how it is saved, committed in the ledger, pruned and restored."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from turnstile.config import Recipe
from turnstile.credit.base import Estimator
from turnstile.envs.base import Env, rates_of
from turnstile.errors import ConfigError, LedgerError
from turnstile.evaluation.metrics import EpisodeResult, with_verdict
from turnstile.lookup import nearest, resolve
from turnstile.records.ledger import FILE
from turnstile.rollout.replay_buffer import ReplayBuffer
from turnstile.rollout.run_records import RunRecords
from turnstile.runs.run_folder import FINAL, drop_results, read_results
from turnstile.runs.session import RunContext
from turnstile.tasks.base import TaskSampler
from turnstile.tracking.alarms import Alarm, standard_alarms
from turnstile.trainer import checkpoint, rng
from turnstile.trainer.critic import AuxiliaryModel
from turnstile.trainer.learner import Learner
from turnstile.trainer.loop import LoopState
from turnstile.wiring.learning import make_learned

HELDOUT = "heldout/"
"""Prefix in `train.keep_best` that selects by the mean of held-out evaluations instead of a step's metric."""


def open_run_records(run: Path) -> RunRecords:
    """Open the records of a run. Raises LedgerError if it has a checkpoint but no ledger."""
    found = checkpoint.newest_folder(run / "checkpoints")
    if found is not None and not (run / FILE).is_file():
        raise LedgerError(
            f"{run} has {found.name} but no {FILE}, so nobody knows what was trained on; "
            "put it back, or start the run anew with --fresh"
        )
    return RunRecords(run)


class CheckpointState:
    """The state that checkpoints store, with methods to save and restore it."""

    def __init__(self, run: RunContext, learner: Learner, estimator: Estimator) -> None:
        self.run = run
        self.learner = learner
        self.learned: AuxiliaryModel | None = None
        self._estimator = estimator
        self.sampler = TaskSampler(run.train_tasks, seed=run.recipe.seed)
        self.tasks_at: Callable[[], Mapping[str, Any]] = (
            self.sampler.state
        )  # gives the position after the last finished step
        buffer = run.recipe.replay_buffer
        self.buffer = ReplayBuffer(
            run.folder, size=buffer.size, batch=buffer.batch, uses=buffer.uses, seed=run.recipe.seed
        )
        self.alarms: dict[str, Alarm] = standard_alarms()
        self.progress = LoopState()
        self.scores: dict[int, float] = {}  # metric of train.keep_best by step
        self._folder = run.folder / "checkpoints"

    def begin(self) -> None:
        """Make the estimator's auxiliary model, if any. It may start as a copy of the policy at the start of RL."""
        self.learned = make_learned(self.run.recipe, self._estimator, self.learner)

    def save(self, progress: LoopState, metrics: Mapping[str, float]) -> None:
        """Save a checkpoint, commit it in the ledger, and delete checkpoints that are no longer kept.

        A step is done once the ledger names its checkpoint, so its record and metrics are flushed to the disk first.
        """
        self.run.recorder.sync()
        self.run.tracker.sync()
        self._store_score(progress.step, metrics)
        state = {
            "credit": dict(progress.credit),
            "sampler": dict(self.tasks_at()),
            "buffer": self.buffer.state(),
            "alarms": {name: alarm.state() for name, alarm in self.alarms.items()},
            "graders": {name: grader.state() for name, grader in self.run.world.graders.items()},
            "scores": {str(step): score for step, score in self.scores.items()},
            "threads": torch.get_num_threads(),
        }
        auxiliary = None if self.learned is None else self.learned.state()
        tokenizer = self.run.agent.tokenizer
        saved = checkpoint.save(self._folder, progress.step, self.learner, tokenizer, state, auxiliary=auxiliary)
        records, recipe = self.run.records, self.run.recipe
        last = [step for step in sorted({*records.ledger.committed(), saved.step}) if step <= saved.step]
        last = last[-recipe.train.keep :]
        records.commit(saved.step, saved.digest, min(last))
        checkpoint.prune(self._folder, {*last, *self._best_step()})

    def save_if_new(self) -> None:
        """Save the last complete step when a run is stopped, if it is not saved yet."""
        if self.progress.step not in self.run.records.ledger.committed():
            self.save(self.progress, {})

    def _store_score(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store the step's value of the metric that `train.keep_best` names."""
        name = self.run.recipe.train.keep_best
        if name and metrics and not name.startswith(HELDOUT):
            if name not in metrics:
                raise ConfigError(f"train.keep_best = {name!r} is nothing that a step logs; {nearest(name, metrics)}")
            self.scores[step] = metrics[name]

    def _best_step(self) -> list[int]:
        """Return a list with the step of the best checkpoint, the first of equal ones, or an empty list."""
        name = self.run.recipe.train.keep_best
        scores = self.scores
        if name.startswith(HELDOUT):
            scores = _heldout_means(read_results(self.run.folder), name.removeprefix(HELDOUT))
        scores = {step: score for step, score in scores.items() if self._folder.joinpath(f"step-{step:06d}").is_dir()}
        return [max(scores, key=lambda step: (scores[step], -step))] if scores else []

    def restore(self) -> bool:
        """Restore the newest intact checkpoint committed in the ledger, and return whether there was one."""
        records = self.run.records
        found, complaints = checkpoint.latest(self._folder, records.ledger.committed())
        for line in complaints:
            self.run.tracker.say(line, level="warning")
        if found is None:
            records.ledger.resume_at(-1)
            return False
        records.ledger.resume_at(found.step)
        checkpoint.restore(found, self.learner)
        self.run.engine.publish(found.step)
        self.progress = LoopState(step=found.step, credit=found.state["credit"])
        self.scores = {int(step): score for step, score in found.state["scores"].items()}
        if self.run.recipe.engine.deterministic:  # sums depend on the number of threads
            torch.set_num_threads(int(found.state["threads"]))
        self.sampler.restore(found.state["sampler"])
        self.buffer.restore(found.state.get("buffer", {"kept": []}))
        with rng.preserved():  # making it must not draw random numbers; its initial weights are replaced below
            self.begin()
        if self.learned is not None:
            checkpoint.restore_auxiliary(found, self.learned)
        for name, alarm in self.alarms.items():
            if name in found.state["alarms"]:  # an alarm may be newer than the checkpoint
                alarm.restore(found.state["alarms"][name])
        for name, grader in self.run.world.graders.items():
            grader.restore(found.state["graders"][name])
        self.run.tracker.resume_at(found.step)
        self.run.recorder.resume_at(found.step)
        for name in read_results(self.run.folder):
            if _is_later(name, found.step, self.run.recipe.train.steps):
                drop_results(self.run.folder, name)
        self.run.tracker.say(f"going on after step {found.step} of {self.run.recipe.train.steps}")
        return True


def _is_later(evaluation: str, step: int, steps: int) -> bool:
    """Return whether an evaluation used weights from after `step`, to which the run has gone back."""
    numbered = re.fullmatch(r"step-(\d+)", evaluation)
    return step < (int(numbered[1]) if numbered else steps if evaluation == FINAL else 0)


def check_keep_best(recipe: Recipe, env: Callable[..., Env] | None = None) -> None:
    """Raise ConfigError if `train.keep_best` names a held-out mean that evaluations do not have.

    Nothing is checked if the environment is made by a function, since its rates are then unknown.
    """
    name, env = recipe.train.keep_best, env or resolve("env", recipe.env.kind)
    if not name.startswith(HELDOUT) or not isinstance(env, type):
        return
    wanted, known = name.removeprefix(HELDOUT), (*rates_of(env), "outcome", "total")
    if wanted not in known:
        raise ConfigError(f"train.keep_best = {name!r}: evaluations have no {wanted!r}; {nearest(wanted, known)}")


def _heldout_means(results: Mapping[str, Sequence[EpisodeResult]], of: str) -> dict[int, float]:
    """Return the mean of a rate or number in each intermediate evaluation that has it, by step."""
    means = {
        int(name.removeprefix("step-")): float(np.mean([result.value(of) for result in with_verdict(found)]))
        for name, found in results.items()
        if name.startswith("step-") and with_verdict(found)
    }
    return {step: mean for step, mean in means.items() if not np.isnan(mean)}
