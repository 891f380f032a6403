"""One step of the engine: the tokens of one pass, and the requests that get tokens from it.

A step knows all places that it reads and writes, so that sessions may close while it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from turnstile.engines.local.kv_cache import SizeClass
from turnstile.engines.local.layout import LonelyLayout, RowsLayout, Span
from turnstile.engines.local.requests import Request
from turnstile.engines.local.speculation import Guess

Place = tuple[SizeClass, int, int]
"""Where a token lies: shelf, place on it, column."""


@dataclass(slots=True, eq=False)
class Ready:
    """A request that lacks nothing for its next token, nor for those after each of its guesses."""

    request: Request
    guesses: Sequence[int] = field(default_factory=list)  # tokens that lie behind its path, once the step is computed
    drafted: int = 0  # how many of them this step computes
    drafts: Sequence[Guess] = field(default_factory=list)  # what the engine thought would come: those, and one more
    sampled: int = 0  # tokens that it got


class Step:
    """`spans` are laid out; `ready` lack nothing once they are computed. With a `width` every pass and every
    projection takes that many rows, those that are missing filled up; `trunk` is the layer of which it is kept what
    goes into it, if there is one."""

    def __init__(self, spans: Sequence[Span], ready: Sequence[Ready], *, width: int = 0, trunk: int = 0) -> None:
        self.spans, self.ready, self.width, self.trunk = spans, ready, width, trunk
        self.layout = LonelyLayout(spans) if width else RowsLayout(spans)
        self._tokens = [token for span in spans for token in span.tokens]
        self._positions = [position for span in spans for position in range(span.begin, span.end)]
        self._wanted = [(one, i, _place(one, i)) for one in ready for i in range(1 + len(one.guesses))]

    def tokens(self) -> Tensor:
        """The new tokens, i64[T]."""
        return torch.tensor(self._filled(self._tokens))

    def positions(self) -> Tensor:
        """Their positions, i64[T]."""
        return torch.tensor(self._filled(self._positions))

    def keep(self, states: Sequence[Tensor]) -> None:
        """Keeps the hidden states [T, H] of the pass."""
        self.layout.keep(states)
        for span in self.spans:
            span.row.computed = max(span.row.computed, span.end)

    def hidden(self) -> tuple[Tensor, list[tuple[Ready, int, int]]]:
        """The last hidden states [N, H] that tokens are sampled from, and for each token that may be sampled (the one
        that is ready for it, how many come before it in this step, its place among the N): those at the same place
        share one."""
        nodes = {place: i for i, place in enumerate(dict.fromkeys(place for _, _, place in self._wanted))}
        states = [shelf.hidden[0, place, column] for shelf, place, column in nodes]
        states += states[:1] * (self.width - len(states))
        return torch.stack(states), [(one, i, nodes[place]) for one, i, place in self._wanted]

    def _filled(self, values: list[int]) -> list[int]:
        return values + [0] * (self.width - len(values))


def _place(ready: Ready, ahead: int) -> Place:
    """Where the last hidden state lies that a token is sampled from, when `ahead` tokens of the step come before."""
    cursor = ready.request.cursor
    assert cursor.row is not None
    return cursor.row.at(cursor.length - 1 + ahead)
