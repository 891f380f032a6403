"""The ancestry of branched trajectories, and the turns that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turnstile.errors import TrainingError
from turnstile.types import Group

Place = tuple[int, int]
"""(turn, token): the end of a shared prefix."""
START: Place = (0, 0)


def common(group: Group) -> list[list[Place]]:
    """Return where the common prefix of any two trajectories of a group ends, [G][G].

    A branch contains all its turns, including those that it shares with its parent; `Trajectory.parent` says where it
    left. Unrelated trajectories share only the task and get (0, 0). Raises TrainingError if a parent is not in the
    group.
    """
    parents, cuts = _parents(group)
    depths = [_depth(i, parents) for i in range(len(parents))]
    size = len(parents)
    found: list[list[Place]] = [[START] * size for _ in range(size)]
    order = sorted(range(size), key=lambda i: depths[i])  # parents first
    for place, i in enumerate(order):
        found[i][i] = (len(group.trajectories[i].turns), 0)
        parent = parents[i]
        for j in order[:place]:
            if parent is not None:  # all sharing is through the parent
                found[i][j] = found[j][i] = cuts[i] if parent == j else min(cuts[i], found[parent][j])
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshots:
    """The states of a group from which more than one trajectory continued."""

    begins: Sequence[int]  # [G] the turn at which each trajectory left its parent; 0 if it has none
    parents: Sequence[int | None]  # [G]
    members: Mapping[tuple[int, int], Sequence[int]]  # (owner, turn) -> trajectories that continued from there

    def through(self, trajectory: int, turn: int) -> Sequence[int]:
        """Return the trajectories that continued from the state before this turn, including `trajectory` itself.

        Returns () if there is no snapshot of the state. A state on a shared turn belongs to the parent.
        """
        return self.members.get(_owner(trajectory, turn, self.begins, self.parents), ())


def snapshots(group: Group) -> Snapshots:
    """Return the snapshots of a group: its start, and the state before each turn at which a branch left.

    Raises TrainingError if a branch left inside a turn, since that is not a state, or if a parent is not in the group.
    """
    parents, cuts = _parents(group)
    for i, trajectory in enumerate(group.trajectories):
        _depth(i, parents)
        if trajectory.parent is not None and trajectory.parent[2]:
            left, turn, _ = trajectory.parent
            raise TrainingError(
                f"task {group.task.id!r}, attempt {trajectory.attempt}: it left attempt {left} inside turn {turn}; "
                "only what begins with a turn can be compared with the state it began in"
            )
    begins = [turn for turn, _ in cuts]
    members: dict[tuple[int, int], list[int]] = {}
    for i, (parent, begin) in enumerate(zip(parents, begins, strict=True)):
        owner = _owner(i, begin, begins, parents)
        played = members.setdefault(owner, [])
        if parent is not None and owner[0] >= 0 and owner[0] not in played:
            played.append(owner[0])  # the parent continued from there too
        if i not in played:
            played.append(i)
    return Snapshots(begins=begins, parents=parents, members=members)


def _owner(trajectory: int, turn: int, begins: Sequence[int], parents: Sequence[int | None]) -> tuple[int, int]:
    """Return the (trajectory, turn) that identifies the state before this turn; (-1, 0) for the start.

    The state belongs to the ancestor that the trajectory had not yet left at this turn, or to the trajectory itself.
    """
    if turn == 0:
        return (-1, 0)
    while (parent := parents[trajectory]) is not None and turn <= begins[trajectory]:
        trajectory = parent
    return (trajectory, turn)


def _parents(group: Group) -> tuple[list[int | None], list[Place]]:
    """Return the index in the group of each trajectory's parent, and where it left the parent."""
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
    return parents, cuts


def _depth(trajectory: int, parents: Sequence[int | None]) -> int:
    depth, parent = 0, parents[trajectory]
    while parent is not None:
        depth, parent = depth + 1, parents[parent]
        if depth > len(parents):
            raise TrainingError("the trajectories of a group branched from each other in a circle")
    return depth
