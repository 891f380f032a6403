"""The current status of a run's episodes: counts that the rollout updates and the screen shows.

They affect nothing else and are not saved; the ledger accounts for attempts. An update is one dictionary operation, and
the reader does the counting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum

from turnstile.types import Stage, Stop, Trajectory, Turn

Key = tuple[str, int]
"""(group, attempt)"""


class EpisodeStatus(StrEnum):
    """The status of an episode."""

    WAITING = "waiting"  # for a free slot
    GENERATING = "generating"
    ACTING = "in a tool"  # or elsewhere in its environment, which may be opening
    GRADING = "being graded"
    FINISHED = "finished"  # waiting for the other episodes of its step
    FAILED = "failed"  # infrastructure failed and no retries were left


UNFINISHED = frozenset({EpisodeStatus.WAITING, EpisodeStatus.GENERATING, EpisodeStatus.ACTING, EpisodeStatus.GRADING})


class StatusBoard:
    """The statuses of one run's episodes.

    Several threads may use it, because every access is a single operation on one dictionary.
    """

    def __init__(self) -> None:
        self.remote_counts: Mapping[EpisodeStatus, int] = {}
        """Counts of the episodes that another process plays, as last reported."""
        self.tokens = 0
        """Tokens sampled so far."""
        self.failures: dict[str, int] = {}
        """Number of infrastructure failures by type, including those of retried attempts."""
        self._statuses: dict[Key, EpisodeStatus] = {}

    def set_status(self, keys: Iterable[Key], status: EpisodeStatus = EpisodeStatus.WAITING) -> None:
        """Set the status of episodes."""
        for key in keys:
            self._statuses[key] = status

    def on_turn(self, turn: Turn) -> None:
        """Count the turn's tokens if it was just sampled."""
        if turn.stage is Stage.SAMPLED:
            self.tokens += len(turn.completion.token_ids)

    def on_end(self, trajectory: Trajectory, *, will_retry: bool) -> None:
        """Set the status of an attempt that ended. `will_retry` is true if it is played again."""
        status = EpisodeStatus.FINISHED
        if trajectory.stop is Stop.ERROR:
            kind = (trajectory.error or "").partition(":")[0]
            self.failures[kind] = self.failures.get(kind, 0) + 1
            status = EpisodeStatus.WAITING if will_retry else EpisodeStatus.FAILED
        self._statuses[trajectory.key] = status

    def remove(self, keys: Iterable[Key]) -> None:
        """Remove episodes that no longer belong to a running step."""
        for key in keys:
            self._statuses.pop(key, None)

    def counts(self) -> dict[EpisodeStatus, int]:
        """Return the number of episodes in each status, in this process and the other one."""
        counter = Counter(list(self._statuses.values()))
        counter.update(self.remote_counts)
        return {status: counter[status] for status in EpisodeStatus}

    def unfinished(self) -> dict[EpisodeStatus, int]:
        """Return the number of episodes that have not ended, by status and without zeros."""
        return {status: count for status, count in self.counts().items() if status in UNFINISHED and count}
