"""Sessions of the engine, and requests with the tokens sampled so far."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import numpy as np

from turnstile.engines.local.constraint import Constraint, ScoredTokens
from turnstile.engines.local.prefix_tree import PrefixPosition, common_prefix
from turnstile.types import Bool, Completion, Finish, Sampling


@dataclass(slots=True, eq=False)
class Session:
    """One conversation, with its group and the position in the group's prefix tree where its last turn ended."""

    share: str
    prefix_position: PrefixPosition = field(default_factory=PrefixPosition)
    last_path: list[int] = field(default_factory=list)  # the last path that had tokens computed for this session
    computed: int = 0  # how many leading tokens of that path were computed

    def record_computed(self, path: list[int], begin: int, end: int) -> int:
        """Record that tokens begin..end-1 of `path` are computed; return how many of them had been computed before.

        The session refers to `path`, which may only grow from then on.
        """
        recomputed = max(0, min(end, self.count_computed(path)) - begin) if begin < self.computed else 0
        if end - begin > recomputed:
            self.last_path, self.computed = path, end
        return recomputed

    def count_computed(self, path: list[int]) -> int:
        """Return how many leading tokens of a path were computed for this session."""
        return min(self.computed, self.count_seen(path))

    def count_seen(self, path: list[int]) -> int:
        """Return how many leading tokens a path shares with the session's last one.

        They may include the last sampled token, which was never computed.
        """
        return common_prefix(self.last_path, path)


@dataclass(slots=True, eq=False)
class Request:
    """One turn that is being sampled. `path` is the prompt and the tokens sampled after it."""

    session: Session
    path: list[int]
    sampling: Sampling
    future: asyncio.Future[Completion]
    prefix_position: PrefixPosition
    constraint: Constraint | ScoredTokens | None = None
    started: float = field(default_factory=time.monotonic)
    versions: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)  # whether the constraint allowed no other token
    finish: Finish | None = None
    observed: bool = False  # the speculator has observed its prompt

    @property
    def sampled(self) -> int:
        """Number of sampled tokens."""
        return len(self.logprobs)

    @property
    def remaining(self) -> int:
        """Number of tokens that may still be sampled."""
        return self.sampling.max_tokens - self.sampled

    def allowed(self, ahead: int) -> Bool | None:
        """Return the mask bool[V] of the tokens allowed after `ahead` speculated tokens, or None if all are."""
        if isinstance(self.constraint, ScoredTokens):
            return self.constraint.allowed(ahead)
        return None if self.constraint is None else self.constraint.allowed()

    @property
    def sampled_ids(self) -> list[int]:
        """The sampled tokens."""
        return self.last_sampled(self.sampled)

    def last_sampled(self, count: int) -> list[int]:
        """Return the last `count` sampled tokens, or all of them if there are fewer."""
        return self.path[len(self.path) - min(count, self.sampled) :]

    def append(self, token: int, logprob: float, entropy: float, version: int, *, forced: bool = False) -> None:
        """Append a sampled token and what is known about it."""
        self.path.append(token)
        self.logprobs.append(logprob)
        self.entropies.append(entropy)
        self.versions.append(version)
        self.forced.append(forced)

    def completion(self) -> Completion:
        """Return the completion, and move the session's position to its end, where the next turn continues."""
        self.session.prefix_position = self.prefix_position
        return Completion(
            token_ids=np.array(self.sampled_ids, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            entropies=np.array(self.entropies, np.float32),
            forced=np.array(self.forced, np.bool_) if isinstance(self.constraint, Constraint) else None,
            versions=np.array(self.versions, np.int32),
            sampling=self.sampling,
            finish=self.finish or "length",
            seconds=time.monotonic() - self.started,
        )
