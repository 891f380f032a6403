"""How long an episode may take, going by what its task has taken before."""

from __future__ import annotations

from turnstile.types import Stop, Task, Trajectory

MIN_EPISODES = 4  # episodes of a task before anything is concluded from them


class Deadlines:
    """`straggler_factor` times the longest that an episode of the same task has taken; no limit for a task that is
    little known.

    An episode that met its deadline, if only while it opened, counts as having taken that long, so a task whose
    episodes grow is given more each time. What is known is kept in memory: a run that was interrupted begins anew.
    """

    def __init__(self, straggler_factor: float) -> None:
        self.straggler_factor = straggler_factor
        self._longest: dict[str, float] = {}
        self._count: dict[str, int] = {}

    def seconds(self, task: Task) -> float:
        """Seconds for the turns of an episode; infinity where nothing is known."""
        return self._seconds(task.id)

    def _seconds(self, task: str) -> float:
        if self._count.get(task, 0) < MIN_EPISODES:
            return float("inf")
        return self.straggler_factor * self._longest[task]

    def observe(self, trajectory: Trajectory) -> None:
        times = trajectory.times
        duration = times["total"] - times.get("measure", 0.0) - times.get("downtime", 0.0)
        task = trajectory.task_id
        if trajectory.stop is Stop.ERROR and duration < self._seconds(task):
            return  # nobody knows what it would have taken
        self._count[task] = self._count.get(task, 0) + 1
        self._longest[task] = max(duration, self._longest.get(task, 0.0))
