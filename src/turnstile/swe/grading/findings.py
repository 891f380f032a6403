"""How thoroughly a task is checked, and what was found."""

from __future__ import annotations

from dataclasses import dataclass

from turnstile.types import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """How thoroughly a task is checked: gradings of its repair and of no change, cheats by name, a random agent."""

    repeats: int = 1
    cheats: tuple[str, ...] = ()
    random: bool = False

    def covers(self, other: Ask) -> bool:
        """Return whether the results of this check answer the other one too."""
        return (
            self.repeats >= other.repeats
            and set(self.cheats) >= set(other.cheats)
            and (self.random or not other.random)
        )

    def joined(self, other: Ask) -> Ask:
        """Return a check that covers both."""
        return Ask(
            repeats=max(self.repeats, other.repeats),
            cheats=tuple(dict.fromkeys((*self.cheats, *other.cheats))),
            random=self.random or other.random,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedTask:
    """What checking one task found. Scores are 1 or 0, one for each repeat.

    `pile` is what it shares its tests with, such as a package. An empty `gold` means that no repair is known. `flaky`
    names the tests with different outcomes in different repeats; `wins` the cheats that scored 1, out of those `tried`;
    `random` is the random agent's score, None if it did not play; `killed` counts gradings that ended by SIGKILL and
    were repeated. `trouble` is anything else that is wrong with the task. `unready` says why its package or image could
    not be had or has changed, which may be fixed on this machine. `unknown` says what broke that was not the task's
    fault. `remembered` means that all this was found by an earlier call.
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
        """Whether nothing is wrong with the task, but no repair shows that it can be solved."""
        return not self.gold and self.why is None and self.unknown is None

    @property
    def why(self) -> str | None:
        """Why the task must not be trained on, in a clause; None if nothing is wrong with it."""
        if self.unknown is not None:
            return None
        if self.flaky:
            return f"flaky: {', '.join(self.flaky[:3])}{', ...' if len(self.flaky) > 3 else ''}"
        if self.trouble is not None or self.unready is not None:
            return self.trouble or self.unready
        return f"a cheat scores 1: {', '.join(self.wins)}" if self.wins else None
