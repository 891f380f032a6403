"""Who asks the engine: sessions, and their requests with what was sampled for them so far."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np

from turnstile.engines.local.constraint import Constraint, Given
from turnstile.engines.local.group import Cursor, common
from turnstile.types import Bool, Completion, Finish, Sampling


@dataclass(slots=True, eq=False)
class Session:
    """One conversation: its group, and where in the group's tree its last turn ended."""

    share: str
    cursor: Cursor = field(default_factory=Cursor)
    past: list[int] = field(default_factory=list)  # the last path of which something was computed for it
    computed: int = 0  # how much of it

    def computes(self, path: list[int], begin: int, end: int) -> int:
        """Notes that tokens begin..end-1 of `path`, which may only grow, are computed for it; returns how many of them
        were before."""
        again = max(0, min(end, self.known(path)) - begin) if begin < self.computed else 0
        if end - begin > again:
            self.past, self.computed = path, end
        return again

    def known(self, path: list[int]) -> int:
        """How many of the first tokens of a path were computed for it."""
        return min(self.computed, self.met(path))

    def met(self, path: list[int]) -> int:
        """With how many of its tokens a path begins, computed or, like the last one that was sampled, not."""
        return common(self.past, path)


@dataclass(slots=True, eq=False)
class Request:
    """One turn that is being sampled. `path` is the prompt and what was sampled after it."""

    session: Session
    path: list[int]
    sampling: Sampling
    future: asyncio.Future[Completion]
    cursor: Cursor
    constraint: Constraint | Given | None = None
    started: float = field(default_factory=time.monotonic)
    versions: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)  # the only one that its constraint allowed
    finish: Finish | None = None
    heard: bool = False  # guesses were learnt from its prompt

    @property
    def sampled(self) -> int:
        """How many tokens were sampled."""
        return len(self.logprobs)

    @property
    def left(self) -> int:
        """How many more tokens may be sampled."""
        return self.sampling.max_tokens - self.sampled

    def allowed(self, ahead: int) -> Bool | None:
        """The tokens [V] that it may go on with after `ahead` guesses; None if all."""
        if isinstance(self.constraint, Given):
            return self.constraint.allowed(ahead)
        return None if self.constraint is None else self.constraint.allowed()

    @property
    def ids(self) -> list[int]:
        """The tokens that were sampled."""
        return self.last(self.sampled)

    def last(self, count: int) -> list[int]:
        """The last of them, at most so many."""
        return self.path[len(self.path) - min(count, self.sampled) :]

    def append(self, token: int, logprob: float, entropy: float, version: int, *, forced: bool = False) -> None:
        self.path.append(token)
        self.logprobs.append(logprob)
        self.entropies.append(entropy)
        self.versions.append(version)
        self.forced.append(forced)

    def completion(self) -> Completion:
        """What was sampled; the session's next turn goes on from there."""
        self.session.cursor = self.cursor
        return Completion(
            token_ids=np.array(self.ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            entropies=np.array(self.entropies, np.float32),
            forced=np.array(self.forced, np.bool_) if isinstance(self.constraint, Constraint) else None,
            versions=np.array(self.versions, np.int32),
            sampling=self.sampling,
            finish=self.finish or "length",
            seconds=time.monotonic() - self.started,
        )
