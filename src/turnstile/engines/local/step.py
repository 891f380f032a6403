"""One step of the engine, with the tokens of one pass and the requests that get tokens from it.

A step refers to all cache slots that it reads and writes, so sessions may close while it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from turnstile.engines.local.kv_cache import SizeClass
from turnstile.engines.local.layout import CacheLayout, DeterministicLayout, Span
from turnstile.engines.local.requests import Request
from turnstile.engines.local.speculation import Draft

CacheSlot = tuple[SizeClass, int, int]
"""Where a token is stored: size class, slot, column."""


@dataclass(slots=True, eq=False)
class ReadyRequest:
    """A request whose next token, and the tokens after its speculated ones, can be sampled after this step."""

    request: Request
    speculated: Sequence[int] = field(default_factory=list)  # tokens cached after its path once the step is computed
    num_drafted: int = 0  # how many of those this step itself computes
    drafts: Sequence[Draft] = field(default_factory=list)  # all that were proposed, possibly one more than computed
    sampled: int = 0  # number of tokens that the step has sampled for it


class EngineStep:
    """The laid-out `spans` to compute, and the `ready` requests to sample from afterwards.

    With a `width`, every pass and every projection takes that many rows, padded if necessary. `activation_layer` is the
    layer whose input is kept (0: none).
    """

    def __init__(
        self, spans: Sequence[Span], ready: Sequence[ReadyRequest], *, width: int = 0, activation_layer: int = 0
    ) -> None:
        self.spans, self.ready, self.width, self.activation_layer = spans, ready, width, activation_layer
        self.layout = DeterministicLayout(spans) if width else CacheLayout(spans)
        self._tokens = [token for span in spans for token in span.tokens]
        self._positions = [position for span in spans for position in range(span.begin, span.end)]
        self._queries = [(one, i, _slot_of(one, i)) for one in ready for i in range(1 + len(one.speculated))]

    def tokens(self) -> Tensor:
        """Return the new tokens and any padding, i64[T]."""
        return torch.tensor(self._pad(self._tokens))

    def positions(self) -> Tensor:
        """Return the positions of the new tokens and any padding, i64[T]."""
        return torch.tensor(self._pad(self._positions))

    def store_hidden(self, states: Sequence[Tensor]) -> None:
        """Store the hidden states [T, H] of the pass in the cache, and mark its tokens as computed."""
        self.layout.store_hidden(states)
        for span in self.spans:
            span.row.computed = max(span.row.computed, span.end)

    def hidden(self) -> tuple[Tensor, list[tuple[ReadyRequest, int, int]]]:
        """Return the last hidden states [N, H] to sample from, and (request, offset, index into N) of each new token.

        The offset counts the tokens that this step samples for the request before that one. Tokens sampled from the
        same cache slot share one hidden state.
        """
        state_index = {slot: i for i, slot in enumerate(dict.fromkeys(slot for _, _, slot in self._queries))}
        states = [size_class.hidden[0, slot, column] for size_class, slot, column in state_index]
        states += states[:1] * (self.width - len(states))
        return torch.stack(states), [(ready, i, state_index[slot]) for ready, i, slot in self._queries]

    def _pad(self, values: list[int]) -> list[int]:
        return values + [0] * (self.width - len(values))


def _slot_of(ready: ReadyRequest, offset: int) -> CacheSlot:
    """Return the cache slot of the hidden state from which a request's token at `offset` in this step is sampled."""
    position = ready.request.prefix_position
    assert position.row is not None
    return position.row.locate(position.length - 1 + offset)
