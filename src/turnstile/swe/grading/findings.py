"""What is asked when a task is checked, and what was found."""

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
        """Whether what was found by this answers the other too."""
        return (
            self.repeats >= other.repeats
            and set(self.cheats) >= set(other.cheats)
            and (self.random or not other.random)
        )

    def joined(self, other: Ask) -> Ask:
        """What covers both."""
        return Ask(
            repeats=max(self.repeats, other.repeats),
            cheats=tuple(dict.fromkeys((*self.cheats, *other.cheats))),
            random=self.random or other.random,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedTask:
    """What checking one task found. Scores are 1 or 0, one a repeat.

    `pile` is what it shares its tests with, such as a package. No `gold` says that no repair is known. `flaky` names
    the tests that came out differently between repeats; `wins` the cheats that scored 1, of the `tried` ones;
    `random` is the random agent's score, None where it did not play; `killed` counts gradings that ended by SIGKILL
    and were asked for again. `trouble` is what speaks against the task beside these, `unready` why its package or
    image could not be had or is another one, which may be mended here, `unknown` what broke when it was no fault of
    the task. `remembered` says that all this was found by an earlier call.
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
        """Whether nothing speaks against the task, and no repair shows that it can be solved."""
        return not self.gold and self.why is None and self.unknown is None

    @property
    def why(self) -> str | None:
        """Why the task must not be trained on, in a clause; None if nothing speaks against it."""
        if self.unknown is not None:
            return None
        if self.flaky:
            return f"flaky: {', '.join(self.flaky[:3])}{', ...' if len(self.flaky) > 3 else ''}"
        if self.trouble is not None or self.unready is not None:
            return self.trouble or self.unready
        return f"a cheat scores 1: {', '.join(self.wins)}" if self.wins else None
