"""Which tokens branches of one group have in common."""

from __future__ import annotations

from collections.abc import Sequence

from turnstile.errors import TrainingError
from turnstile.types import Group

Place = tuple[int, int]
"""(turn, token): what lies before it is shared."""
START: Place = (0, 0)


def common(group: Group) -> list[list[Place]]:
    """How far each two trajectories of a group are the same, [G][G].

    A branch holds all its turns, those too that it shares with its parent; `Trajectory.parent` says where it left.
    Trajectories of their own share the task alone, (0, 0). Raises TrainingError where a parent is not in the group.
    """
    places = {trajectory.attempt: i for i, trajectory in enumerate(group.trajectories)}
    parents: list[int | None] = []
    cuts: list[Place] = []
    for trajectory in group.trajectories:
        attempt, turn, token = trajectory.parent or (None, *START)
        if attempt is not None and attempt not in places:
            raise TrainingError(
                f"task {group.task.id!r}, attempt {trajectory.attempt}: it branched from attempt {attempt}, which is "
                "not in its group; a group must be scored whole"
            )
        parents.append(None if attempt is None else places[attempt])
        cuts.append((turn, token))
    depths = [_depth(i, parents) for i in range(len(parents))]
    size = len(parents)
    found: list[list[Place]] = [[START] * size for _ in range(size)]
    order = sorted(range(size), key=lambda i: depths[i])  # parents first
    for place, i in enumerate(order):
        found[i][i] = (len(group.trajectories[i].turns), 0)
        parent = parents[i]
        for j in order[:place]:
            if parent is not None:  # whatever it shares, it shares through its parent
                found[i][j] = found[j][i] = cuts[i] if parent == j else min(cuts[i], found[parent][j])
    return found


def _depth(trajectory: int, parents: Sequence[int | None]) -> int:
    depth, parent = 0, parents[trajectory]
    while parent is not None:
        depth, parent = depth + 1, parents[parent]
        if depth > len(parents):
            raise TrainingError("the trajectories of a group branched from each other in a circle")
    return depth
