"""The books of a run: its ledger and its journal, kept together while training steps are played and trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from turnstile.records.journal import Journal, Key
from turnstile.records.ledger import Fate, Ledger, State
from turnstile.rollout.episode import Attempt
from turnstile.rollout.group import EpisodeCallback, Job
from turnstile.types import Group, Score, Stop, Trajectory, Turn


class RunRecords:
    """Knows of every attempt of training what became of it."""

    def __init__(self, run: Path) -> None:
        self.ledger = Ledger(run)
        self.journal = Journal(run)

    def watch(self, step: int) -> Step:
        """What books the episodes of a step as they are played."""
        return Step(self, step)

    def finalize(
        self,
        step: int,
        groups: Sequence[Group],
        scores: Sequence[Sequence[Score]],
        passes: Sequence[Sequence[Key]],
    ) -> None:
        """Books what a step made of its groups. `passes` names the attempts trained on in each pass over its rows."""
        used = {key for keys in passes for key in keys}
        fates = [fate for group, own in zip(groups, scores, strict=True) for fate in _fates(group, own, used)]
        self.ledger.finalize(step, fates, passes)

    def commit(self, step: int, digest: str, oldest: int) -> None:
        """The checkpoint of `step` stands. Nobody goes back behind that of `oldest`, so that its journal may go."""
        self.ledger.commit(step, digest)
        self.journal.drop_until(oldest)

    def close(self) -> None:
        self.ledger.close()


class Step(EpisodeCallback):
    """Books the episodes of one training step. Those that had finished before the run was stopped are not played."""

    def __init__(self, books: RunRecords, step: int) -> None:
        self._books = books
        self._step = step
        self.taken = 0
        """Episodes that had finished before."""

    def issued(self, jobs: Sequence[Job]) -> Mapping[Key, Trajectory]:
        wanted = {(attempt.group, attempt.number): task.id for task, attempt in jobs}
        finished = {
            key: trajectory
            for key, trajectory in self._books.journal.finished(self._step).items()
            if key in wanted and trajectory.stop is not Stop.ERROR  # which is played again
        }
        self._books.ledger.issue(self._step, wanted.items(), finished)
        self.taken = len(finished)
        return finished

    def begins(self, attempt: Attempt) -> None:
        self._books.ledger.begin((attempt.group, attempt.number))

    def turned(self, attempt: Attempt, number: int, turn: Turn) -> None:
        self._books.journal.turn(self._step, (attempt.group, attempt.number), number, turn)

    def ended(self, trajectory: Trajectory, *, again: bool) -> None:
        self._books.journal.end(self._step, trajectory)  # first: what the ledger has finished can be had
        self._books.ledger.end(trajectory, again=again)


def _fates(group: Group, scores: Sequence[Score], used: set[Key]) -> Iterable[Fate]:
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
        yield Fate(key=trajectory.key, state=state, why=why, outcome=outcome)
