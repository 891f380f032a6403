"""Deadlines for episodes, based on how long earlier episodes of the same task took."""

from __future__ import annotations

from turnstile.types import Stop, Task, Trajectory

MIN_EPISODES = 4  # episodes of a task needed before it has a deadline


class Deadlines:
    """Limits a task's episodes to `straggler_factor` times its longest duration seen, once `MIN_EPISODES` were seen.

    An episode that ran into its deadline, even while its environment was opening, counts with its duration, so a task
    whose episodes grow longer gets more time. Durations are kept in memory only, so an interrupted run resumes without
    them.
    """

    def __init__(self, straggler_factor: float) -> None:
        self.straggler_factor = straggler_factor
        self._longest: dict[str, float] = {}
        self._count: dict[str, int] = {}

    def seconds(self, task: Task) -> float:
        """Return the time limit in seconds for an episode of this task, or infinity if too few were seen."""
        return self._seconds(task.id)

    def _seconds(self, task: str) -> float:
        if self._count.get(task, 0) < MIN_EPISODES:
            return float("inf")
        return self.straggler_factor * self._longest[task]

    def observe(self, trajectory: Trajectory) -> None:
        """Update the task's longest duration with that of a finished episode.

        The duration excludes measuring and engine downtime. An episode that failed before its deadline is ignored.
        """
        times = trajectory.times
        duration = times["total"] - times.get("measure", 0.0) - times.get("downtime", 0.0)
        task = trajectory.task_id
        if trajectory.stop is Stop.ERROR and duration < self._seconds(task):
            return  # how long it would have taken is unknown
        self._count[task] = self._count.get(task, 0) + 1
        self._longest[task] = max(duration, self._longest.get(task, 0.0))
