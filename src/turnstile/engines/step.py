"""One step of the engine: the tokens of one pass, and the requests that get a token from it.

A step knows all places that it reads and writes, so that sessions may close while it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from turnstile.engines.layout import LonelyLayout, RowsLayout, Span
from turnstile.engines.requests import Request


class Step:
    """`spans` are laid out; `ready` lack nothing once they are computed. With a `width` every pass and every
    projection takes that many rows, those that are missing filled up."""

    def __init__(self, spans: Sequence[Span], ready: Sequence[Request], width: int = 0) -> None:
        self.spans, self.ready, self._width = spans, ready, width
        self.layout = LonelyLayout(spans) if width else RowsLayout(spans)
        self._tokens = [token for span in spans for token in span.tokens]
        self._positions = [position for span in spans for position in range(span.begin, span.end)]
        self._where = []
        for request in ready:
            cursor = request.cursor
            assert cursor.row is not None
            self._where.append(cursor.row.at(cursor.length - 1))

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

    def hidden(self) -> tuple[Tensor, list[int]]:
        """The last hidden states [N, H] that tokens are sampled from, and which is that of each request: those at the
        same place share one."""
        nodes = {where: i for i, where in enumerate(dict.fromkeys(self._where))}
        states = [shelf.hidden[0, place, column] for shelf, place, column in nodes]
        states += states[:1] * (self._width - len(states))
        return torch.stack(states), [nodes[where] for where in self._where]

    def _filled(self, values: list[int]) -> list[int]:
        return values + [0] * (self._width - len(values))
