"""The books of a run: its ledger and its journal, kept together while training steps are played and trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from turnstile.records.journal import Journal, Key
from turnstile.records.ledger import Disposition, Ledger, State
from turnstile.rollout.episode import Attempt
from turnstile.rollout.group import EpisodeCallback, Job
from turnstile.types import Group, Score, Stop, Trajectory, Turn


class RunRecords:
    """Knows of every attempt of training what became of it."""

    def __init__(self, run: Path) -> None:
        self.ledger = Ledger(run)
        self.journal = Journal(run)

    def callback(self, step: int) -> StepRecords:
        """What books the episodes of a step as they are played."""
        return StepRecords(self, step)

    def finalize(
        self,
        step: int,
        groups: Sequence[Group],
        scores: Sequence[Sequence[Score]],
        passes: Sequence[Sequence[Key]],
    ) -> None:
        """Books what a step made of its groups. `passes` names the attempts trained on in each pass over its rows."""
        used = {key for keys in passes for key in keys}
        dispositions = [
            disposition
            for group, own in zip(groups, scores, strict=True)
            for disposition in _dispositions(group, own, used)
        ]
        self.ledger.finalize(step, dispositions, passes)

    def commit(self, step: int, digest: str, oldest: int) -> None:
        """The checkpoint of `step` stands. Nobody goes back behind that of `oldest`, so that its journal may go."""
        self.ledger.commit(step, digest)
        self.journal.drop_until(oldest)

    def close(self) -> None:
        self.ledger.close()


class StepRecords(EpisodeCallback):
    """Books the episodes of one training step. Those that had finished before the run was stopped are not played."""

    def __init__(self, records: RunRecords, step: int) -> None:
        self._records = records
        self._step = step
        self.restored = 0
        """Episodes that had finished before."""

    def on_issue(self, jobs: Sequence[Job]) -> Mapping[Key, Trajectory]:
        wanted = {(attempt.group, attempt.number): task.id for task, attempt in jobs}
        finished = {
            key: trajectory
            for key, trajectory in self._records.journal.finished(self._step).items()
            if key in wanted and trajectory.stop is not Stop.ERROR  # which is played again
        }
        self._records.ledger.issue(self._step, wanted.items(), finished)
        self.restored = len(finished)
        return finished

    def on_start(self, attempt: Attempt) -> None:
        self._records.ledger.begin((attempt.group, attempt.number))

    def on_turn(self, attempt: Attempt, number: int, turn: Turn) -> None:
        self._records.journal.turn(self._step, (attempt.group, attempt.number), number, turn)

    def on_end(self, trajectory: Trajectory, *, will_retry: bool) -> None:
        self._records.journal.end(self._step, trajectory)  # first: what the ledger has finished can be had
        self._records.ledger.end(trajectory, will_retry=will_retry)


def _dispositions(group: Group, scores: Sequence[Score], used: set[Key]) -> Iterable[Disposition]:
    """Why an attempt was not trained on: its end (`[on_stop]` of the recipe), or its group told nothing."""
    flat = all(trajectory.key not in used for trajectory in group.trajectories)
    for trajectory, score in zip(group.trajectories, scores, strict=True):
        outcome = None if score.outcome is None else float(sum(score.outcome.values()))
        state, why = State.GATED_OUT, "nothing in it to train"
        if trajectory.stop is Stop.ERROR:
            state, why = State.GIVEN_UP, trajectory.error or ""
        elif trajectory.key in used:
            state, why = State.ADMITTED, ""
        elif not score.in_gradient:
            why = f"its end: {trajectory.stop.value}"
        elif flat:
            why = "its group's advantages are all zero"
        yield Disposition(key=trajectory.key, state=state, why=why, outcome=outcome)
