"""The records of a run: its ledger and its journal, updated together as steps are played and trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from turnstile.records.journal import Journal, Key
from turnstile.records.ledger import Disposition, Ledger, State
from turnstile.rollout.episode import Attempt
from turnstile.rollout.group import EpisodeCallback, Job
from turnstile.types import Group, Score, Stop, Trajectory, Turn


class RunRecords:
    """Records the state of every training attempt in the ledger and its turns in the journal."""

    def __init__(self, run: Path) -> None:
        self.ledger = Ledger(run)
        self.journal = Journal(run)

    def callback(self, step: int) -> StepRecords:
        """Return the callback that records the episodes of a step as they are played."""
        return StepRecords(self, step)

    def finalize(
        self,
        step: int,
        groups: Sequence[Group],
        scores: Sequence[Sequence[Score]],
        passes: Sequence[Sequence[Key]],
    ) -> None:
        """Record the final state of each attempt in a step's groups.

        `passes` gives the keys of the attempts that were trained on in each pass over the step's rows.
        """
        used = {key for keys in passes for key in keys}
        pairs = zip(groups, scores, strict=True)
        self.ledger.finalize(step, [each for pair in pairs for each in _dispositions(*pair, used)], passes)

    def commit(self, step: int, digest: str, oldest: int) -> None:
        """Commit the checkpoint of `step`, and drop the journal up to and including step `oldest`.

        No run resumes before the checkpoint of `oldest`, so that part of the journal is no longer needed.
        """
        self.ledger.commit(step, digest)
        self.journal.drop_until(oldest)

    def close(self) -> None:
        """Close the ledger."""
        self.ledger.close()


class StepRecords(EpisodeCallback):
    """Records the episodes of one training step, and restores those that finished before an interruption."""

    def __init__(self, records: RunRecords, step: int) -> None:
        self._records = records
        self._step = step
        self.restored = 0
        """Number of episodes restored from the journal."""

    def on_issue(self, jobs: Sequence[Job]) -> Mapping[Key, Trajectory]:
        tasks = {(attempt.group, attempt.number): task.id for task, attempt in jobs}
        finished = {
            key: trajectory
            for key, trajectory in self._records.journal.finished_attempts(self._step).items()
            if key in tasks and trajectory.stop is not Stop.ERROR  # failed attempts are played again
        }
        self._records.ledger.issue(self._step, tasks.items(), finished)
        self.restored = len(finished)
        return finished

    def on_start(self, attempt: Attempt) -> None:
        self._records.ledger.begin((attempt.group, attempt.number))

    def on_turn(self, attempt: Attempt, number: int, turn: Turn) -> None:
        self._records.journal.turn(self._step, (attempt.group, attempt.number), number, turn)

    def on_end(self, trajectory: Trajectory, *, will_retry: bool) -> None:
        # Journal before ledger: an attempt that the ledger calls finished must be readable after a crash.
        self._records.journal.end(self._step, trajectory)
        self._records.ledger.end(trajectory, will_retry=will_retry)


def _dispositions(group: Group, scores: Sequence[Score], used: set[Key]) -> Iterable[Disposition]:
    """Yield each attempt's final state, with the reason if it was not trained on.

    For an attempt that did not fail, the reason is how the episode ended (`[on_stop]` of the recipe), that all
    advantages of its group are zero, or that it has nothing to train.
    """
    zero_advantage = all(trajectory.key not in used for trajectory in group.trajectories)
    for trajectory, score in zip(group.trajectories, scores, strict=True):
        outcome = None if score.outcome is None else float(sum(score.outcome.values()))
        state, reason = State.GATED_OUT, "nothing in it to train"
        if trajectory.stop is Stop.ERROR:
            state, reason = State.GIVEN_UP, trajectory.error or ""
        elif trajectory.key in used:
            state, reason = State.ADMITTED, ""
        elif not score.in_gradient:
            reason = f"its end: {trajectory.stop.value}"
        elif zero_advantage:
            reason = "its group's advantages are all zero"
        yield Disposition(key=trajectory.key, state=state, why=reason, outcome=outcome)
