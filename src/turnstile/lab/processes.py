"""The lab's processes. Every reward is a multiple of 1/64, so that float32 represents it exactly."""

from __future__ import annotations

from collections.abc import Callable

from turnstile.errors import ConfigError
from turnstile.lab.process import THREE, Branch, Menu, Process, State, ends, goes_on
from turnstile.lookup import nearest


def delayed(*, horizon: int = 4, delay: int = 2) -> Process:
    """Return a process with a bad, a fair and a good action in every turn, rewarded `delay` turns later.

    At the end, all outstanding rewards become the outcome. With `delay` 0 every action is rewarded at once; with
    `horizon` or more, everything is paid as the outcome.
    """
    worth = (0.0, 0.25, 1.0)

    def step(state: State, action: int) -> tuple[Branch, ...]:
        t, *owed = state
        due = [*owed, worth[action]]
        paid = due.pop(0) if len(due) > delay else 0.0
        if t == horizon - 1:
            return (ends(sum(due), paid),)
        return (goes_on((t + 1, *due), paid),)

    return Process(
        name="delayed",
        starts=((0,),),
        menu=lambda state: THREE,
        step=step,
        view=lambda state: f"turn {state[0]}",
        key=str,
        subgoal=lambda state: f"turns {state[0] // 2 * 2} and on",
        knobs={"horizon": horizon, "delay": delay},
    )


def lock(*, length: int = 3) -> Process:
    """Return a combination lock: the outcome is 1 if every digit was right, with no hint about which one was wrong.

    There are two tasks: the whole lock, and an easy one with only the last digit left.
    """

    def step(state: State, action: int) -> tuple[Branch, ...]:
        task, t, right = state
        right = right and action == t % len(THREE)
        return (ends(float(right)),) if t == length - 1 else (goes_on((task, t + 1, right)),)

    return Process(
        name="lock",
        starts=(("whole", 0, True), ("last", length - 1, True)),
        menu=lambda state: THREE,
        step=step,
        view=lambda state: f"{state[0]} {state[1]}",
        key=str,
        subgoal=lambda state: f"digit {state[1]}",
        potential=lambda state: 0.25 * (state[1] + 1) * state[2],
        knobs={"length": length},
    )


def key_door(*, distractors: int = 3) -> Process:
    """Return a process whose first turn may take the key, and whose last turn may open the door with it.

    The turns in between offer gambles, which add noise to the return. The policy cannot observe whether it has the key.
    """
    last = distractors + 1

    def step(state: State, action: int) -> tuple[Branch, ...]:
        t, has_key = state
        if t == 0:
            return (goes_on((1, action == 1)),)
        if t == last:
            return (ends(1.0 if has_key and action == 2 else 0.0),)
        after: State = (t + 1, has_key)
        return (goes_on(after, 1.0, 0.5), goes_on(after, -0.75, 0.5)) if action == 0 else (goes_on(after),)

    def menu(state: State) -> Menu:
        return THREE if state[0] == last else ((0,), (1, 0))

    return Process(
        name="key_door",
        starts=((0, False),),
        menu=menu,
        step=step,
        view=lambda state: f"room {state[0]}",
        key=str,
        tag=lambda state, action: "explore" if 0 < state[0] < last else "act",
        potential=lambda state: 0.5 * state[1],
        subgoal=lambda state: "key" if state[0] == 0 else "door" if state[0] == last else "way",
        knobs={"distractors": distractors},
    )


def stopping(*, horizon: int = 3) -> Process:
    """Return a process that the policy may end early: in each turn it stops, or takes a slow (+0.25) or a quick step.

    A quick step gains 0.75 with probability 3/4, and otherwise crashes, which ends the episode with -1. The episode
    ends after the last turn in any case.
    """

    def step(state: State, action: int) -> tuple[Branch, ...]:
        (t,) = state

        def on(reward: float, chance: float = 1.0) -> Branch:
            over = t == horizon - 1
            return ends(0.0, reward, chance) if over else goes_on((t + 1,), reward, chance)

        if action == 0:
            return (ends(0.0),)
        return (on(0.25),) if action == 1 else (on(0.75, 0.75), ends(-1.0, chance=0.25))

    return Process(
        name="stopping",
        starts=((0,),),
        menu=lambda state: THREE,
        step=step,
        view=lambda state: f"turn {state[0]}",
        key=str,
        knobs={"horizon": horizon},
    )


def walk(*, horizon: int = 5) -> Process:
    """Return a walk on a line from the middle: the outcome is 1 at the right end, 0 at the left end or out of time.

    Paths meet again: both the view and the state key are the position alone, whatever the time.
    """

    def step(state: State, action: int) -> tuple[Branch, ...]:
        t, place = state
        place += (-1, 0, 1)[action]
        if abs(place) == 2 or t == horizon - 1:
            return (ends(float(place == 2)),)
        return (goes_on((t + 1, place)),)

    return Process(
        name="walk",
        starts=((0, 0),),
        menu=lambda state: THREE,
        step=step,
        view=lambda state: f"place {state[1]}",
        key=lambda state: f"place {state[1]}",
        potential=lambda state: float(state[1] + 2),
        knobs={"horizon": horizon},
    )


def misaligned(*, horizon: int = 4, needed: int = 3) -> Process:
    """Return a process in which a step reward of 0.5 can be farmed without progress.

    Action 0 is work; the outcome is 1 after `needed` turns of it. With the defaults, farming in every turn adds up to
    more than solving the task does.
    """

    def step(state: State, action: int) -> tuple[Branch, ...]:
        t, done = state
        done += action == 0
        reward = 0.5 if action == 2 else 0.0
        return (ends(float(done >= needed), reward),) if t == horizon - 1 else (goes_on((t + 1, done), reward),)

    return Process(
        name="misaligned",
        starts=((0, 0),),
        menu=lambda state: THREE,
        step=step,
        view=lambda state: f"turn {state[0]}, {state[1]} done",
        key=str,
        tag=lambda state, action: ("act", "explore", "plan")[action],
        knobs={"horizon": horizon, "needed": needed},
    )


def two_seat(*, pile: int = 6) -> Process:
    """Return a game of two agents with one policy, which alternately take one to three items from a pile.

    The agent that takes the last item wins 1, the other loses 1. Each agent's tokens account for its own outcome.
    """
    seats = ("first", "second")

    def step(state: State, action: int) -> tuple[Branch, ...]:
        left, seat = state
        left -= action + 1
        other = seats[1 - seats.index(seat)]
        return (Branch(outcome={seat: 1.0, other: -1.0}),) if left == 0 else (goes_on((left, other)),)

    def menu(state: State) -> Menu:
        return THREE[: min(state[0], 3)]

    return Process(
        name="two_seat",
        starts=((pile, seats[0]),),
        menu=menu,
        step=step,
        view=lambda state: f"{state[0]} left",
        key=lambda state: f"{state[0]} left",
        seat=lambda state: str(state[1]),
        knobs={"pile": pile},
    )


PROCESSES: dict[str, Callable[..., Process]] = {
    "delayed": delayed,
    "lock": lock,
    "key_door": key_door,
    "stopping": stopping,
    "walk": walk,
    "misaligned": misaligned,
    "two_seat": two_seat,
}
"""name -> a function that makes the process; its parameters are the knobs."""


def make(name: str, **knobs: int) -> Process:
    """Return the process with this name. Raises ConfigError, suggesting the nearest known name, if there is none."""
    if name not in PROCESSES:
        raise ConfigError(f"the lab has no process {name!r}; {nearest(name, PROCESSES)}")
    return PROCESSES[name](**knobs)
