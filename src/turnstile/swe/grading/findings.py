"""What a check of a task consists of, and what it found."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """The extent of a task's check.

    The repair and the unchanged code are graded `repeats` times each, `cheats` are tried by name, and a random agent
    plays if `random`.
    """

    repeats: int = 1
    cheats: tuple[str, ...] = ()
    random: bool = False

    def covers(self, other: Ask) -> bool:
        """Return whether the results of this check also answer the other one."""
        return (
            self.repeats >= other.repeats
            and set(self.cheats) >= set(other.cheats)
            and (self.random or not other.random)
        )

    def joined(self, other: Ask) -> Ask:
        """Return the smallest check that covers this one and the other one."""
        return Ask(
            repeats=max(self.repeats, other.repeats),
            cheats=tuple(dict.fromkeys((*self.cheats, *other.cheats))),
            random=self.random or other.random,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedTask:
    """The findings of one task's check. Scores are 1 or 0, one for each repeat.

    `pile` names what the task shares its tests with, such as a package. `gold` holds the scores of the repair and is
    empty if none is known; `empty` holds those of the unchanged code. `flaky` names the tests with different outcomes
    in different repeats; `wins` the cheats that scored 1, out of those `tried`; `random` is the random agent's score,
    None if it did not play; `killed` counts gradings that ended by SIGKILL. `trouble` is anything else that is wrong
    with the task. `unready` says why its package or image is unavailable or has changed, which may be fixed on this
    machine. `unknown` says what broke that was not the task's fault. `remembered` means that an earlier call found all
    this.
    """

    task: Task
    pile: str = "-"
    gold: tuple[int, ...] = ()
    empty: tuple[int, ...] = ()
    flaky: tuple[str, ...] = ()
    wins: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    random: int | None = None
    killed: int = 0
    trouble: str | None = None
    unready: str | None = None
    unknown: str | None = None
    remembered: bool = False

    @property
    def unproven(self) -> bool:
        """Whether nothing was found wrong with the task, but it has no repair to show that it can be solved."""
        return not self.gold and self.why is None and self.unknown is None

    @property
    def why(self) -> str | None:
        """Why the task must not be trained on, as a clause; None if nothing is wrong with it."""
        if self.unknown is not None:
            return None
        if self.flaky:
            return f"flaky: {', '.join(self.flaky[:3])}{', ...' if len(self.flaky) > 3 else ''}"
        if self.trouble is not None or self.unready is not None:
            return self.trouble or self.unready
        return f"a cheat scores 1: {', '.join(self.wins)}" if self.wins else None
