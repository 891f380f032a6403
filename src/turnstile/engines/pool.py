"""The keys and values of sessions that share prefixes: a trie of tokens over one flat store.

Every slot of a pool is one token after one history, so two sessions that begin alike walk the same slots and
nothing is computed twice. A session that samples something else simply takes the next free slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Shape:
    """What one token's keys and values take."""

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    dtype: torch.dtype
    device: torch.device
    trunk: bool = False  # also keep what goes into the first layer that learns

    @property
    def states(self) -> int:
        """Hidden states kept of each token: the last, and the trunk's."""
        return 1 + self.trunk

    @property
    def bytes_per_token(self) -> int:
        numbers = 2 * self.layers * self.kv_heads * self.head_dim + self.states * self.hidden
        return numbers * self.dtype.itemsize


class Pool:
    """Keys, values and hidden states of one trie of tokens. Slot -1 is the empty history."""

    def __init__(self, shape: Shape, capacity: int = 256) -> None:
        self.shape = shape
        self.children: dict[tuple[int, int], int] = {}  # (slot, next token) -> slot
        self.used = 0
        self.last_use = 0
        self._kv = self._room(capacity)
        self._hidden = self._states(capacity)

    @property
    def bytes(self) -> int:
        return self._hidden.shape[1] * self.shape.bytes_per_token

    def walk(self, tokens: Sequence[int], slots: list[int]) -> int:
        """Follows `tokens` from the end of the path `slots` as far as they are known, extending `slots`.
        Returns how many were."""
        here = slots[-1] if slots else -1
        for done, token in enumerate(tokens):
            child = self.children.get((here, token))
            if child is None:
                return done
            slots.append(child)
            here = child
        return len(tokens)

    def grow(self, tokens: Sequence[int], slots: list[int]) -> None:
        """Takes a new slot for each of `tokens` after the end of `slots`, extending `slots`."""
        here = slots[-1] if slots else -1
        for token in tokens:
            self.children[here, token] = self.used
            here = self.used
            slots.append(here)
            self.used += 1
        if self.used > self._hidden.shape[1]:
            self._enlarge(max(self.used, 2 * self._hidden.shape[1]))

    def hidden(self, slots: Sequence[int]) -> Tensor:
        """Last hidden states [n, H]."""
        return self._hidden[0, list(slots)]

    def trunk(self, slots: Sequence[int]) -> Tensor:
        """What went into the first layer that learns, [n, H]."""
        return self._hidden[1, list(slots)]

    def keep_hidden(self, begin: int, *states: Tensor) -> None:
        """The hidden states [n, H] of the n slots from `begin`: the last, then the trunk's if the shape has it."""
        for kept, state in zip(self._hidden, states, strict=True):
            kept[begin : begin + state.shape[0]] = state

    def store(self, layer: int, begin: int, key: Tensor, value: Tensor) -> None:
        """Keys and values [Hkv, n, D] of the n slots from `begin`."""
        end = begin + key.shape[1]
        self._kv[layer, 0, :, begin:end] = key
        self._kv[layer, 1, :, begin:end] = value

    def attend(self, layer: int, query: Tensor, bias: Tensor, scale: float | None) -> Tensor:
        """query [1, Hq, n, D] over all used slots, as far as `bias` [n, used] lets it see."""
        kv = self._kv[layer, :, None, :, : self.used]
        return scaled_dot_product_attention(query, kv[0], kv[1], attn_mask=bias, scale=scale, enable_gqa=True)

    def _room(self, capacity: int) -> Tensor:
        s = self.shape
        return torch.empty(s.layers, 2, s.kv_heads, capacity, s.head_dim, dtype=s.dtype, device=s.device)

    def _states(self, capacity: int) -> Tensor:
        s = self.shape
        return torch.empty(s.states, capacity, s.hidden, dtype=s.dtype, device=s.device)

    def _enlarge(self, capacity: int) -> None:
        old_kv, old_hidden = self._kv, self._hidden
        self._kv, self._hidden = self._room(capacity), self._states(capacity)
        self._kv[:, :, :, : old_kv.shape[3]] = old_kv
        self._hidden[:, : old_hidden.shape[1]] = old_hidden


@dataclass(slots=True)
class Part:
    """The new tokens of one pool in one forward pass: slots begin..begin+n-1, lying at `at` in the flat run."""

    pool: Pool
    begin: int
    at: int
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    paths: list[np.ndarray] = field(default_factory=list)  # slots each new token sees
    bias: Tensor | None = None

    def seal(self) -> None:
        """Fixes who sees whom, once all tokens are in."""
        bias = np.full((len(self.tokens), self.pool.used), -np.inf, dtype=np.float32)
        for i, path in enumerate(self.paths):
            bias[i, path] = 0.0
        self.bias = torch.from_numpy(bias).to(self.pool.shape.device, self.pool.shape.dtype)


class PoolLayout:
    """One forward pass over the new tokens of several pools (see `models.attention.Layout`)."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        outs = []
        for part in self._parts:
            span = slice(part.at, part.at + len(part.tokens))
            part.pool.store(layer, part.begin, key[0, :, span], value[0, :, span])
            assert part.bias is not None
            outs.append(part.pool.attend(layer, query[:, :, span], part.bias, scale))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
