"""Where a run's episodes are right now: a few numbers that the rollout keeps as it plays, and a screen reads.

Nothing is decided by them, and nothing is kept: the ledger is what accounts for attempts. To move an episode costs a
line in a dictionary; whoever reads counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum

from turnstile.types import Stage, Stop, Trajectory, Turn

Key = tuple[str, int]
"""(group, attempt)"""


class EpisodeStatus(StrEnum):
    """Where an episode is."""

    WAITING = "waiting"  # for a place to be played in
    GENERATING = "generating"
    ACTING = "in a tool"  # or in whatever its environment does, opening it too
    GRADING = "being graded"
    FINISHED = "finished"  # and waiting for the others of its step
    FAILED = "failed"  # infrastructure did, and no retries were left


UNFINISHED = frozenset({EpisodeStatus.WAITING, EpisodeStatus.GENERATING, EpisodeStatus.ACTING, EpisodeStatus.GRADING})


class StatusBoard:
    """One for a run. Several threads may write and read: each line here is one operation on one dictionary."""

    def __init__(self) -> None:
        self.remote_counts: Mapping[EpisodeStatus, int] = {}
        """Episodes that another process plays, as it told last."""
        self.tokens = 0
        """Sampled so far."""
        self.failures: dict[str, int] = {}
        """Failures of infrastructure by kind, also of attempts that were played again then."""
        self._statuses: dict[Key, EpisodeStatus] = {}

    def set_status(self, keys: Iterable[Key], status: EpisodeStatus = EpisodeStatus.WAITING) -> None:
        for key in keys:
            self._statuses[key] = status

    def on_turn(self, turn: Turn) -> None:
        """A turn reached its stage."""
        if turn.stage is Stage.SAMPLED:
            self.tokens += len(turn.completion.token_ids)

    def on_end(self, trajectory: Trajectory, *, will_retry: bool) -> None:
        """An attempt came to an end; `again` says that it is played once more."""
        status = EpisodeStatus.FINISHED
        if trajectory.stop is Stop.ERROR:
            kind = (trajectory.error or "").partition(":")[0]
            self.failures[kind] = self.failures.get(kind, 0) + 1
            status = EpisodeStatus.WAITING if will_retry else EpisodeStatus.FAILED
        self._statuses[trajectory.key] = status

    def remove(self, keys: Iterable[Key]) -> None:
        """They are nobody's any more: trained on, or given up with their step."""
        for key in keys:
            self._statuses.pop(key, None)

    def counts(self) -> dict[EpisodeStatus, int]:
        """How many episodes are at each place, here and elsewhere."""
        found = Counter(list(self._statuses.values()))
        found.update(self.remote_counts)
        return {status: found[status] for status in EpisodeStatus}

    def unfinished(self) -> dict[EpisodeStatus, int]:
        """The same of those that have not ended."""
        return {status: count for status, count in self.counts().items() if status in UNFINISHED and count}
