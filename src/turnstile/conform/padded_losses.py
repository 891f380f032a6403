"""Losses on padded arrays: their gradients with respect to log-probabilities (or values) against the invariants.

A scalar loss has its own token weights, which a caller cannot undo. So the gradients at action tokens are compared, and
parts of a batch may be combined by their numbers of rows, by their numbers of tokens, or unweighted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from turnstile.conform.padded import Function, label, roles
from turnstile.credit.invariants import DoesNotApply, Finding, examine, format_change
from turnstile.credit.stats import F64
from turnstile.errors import ConfigError

TURNS = ((3, 2), (2, 4), (1, 3, 2), (4,))
"""The number of tokens in each turn of each row of the sample."""
_SPREAD = {"logprobs": 0.4, "old": 0.0, "reference": 0.2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The attempts of a sample batch. Arrays are [row][turn] -> f64[n], by role."""

    arrays: Mapping[str, list[list[F64]]]
    gap: int = 2  # observed tokens after each turn
    pad: int = 1
    failed: int = 0  # fully masked rows after the others
    apart: bool = False  # whether old and new log-probabilities of masked tokens are very far apart

    @property
    def shape(self) -> list[list[int]]:
        return [[len(turn) for turn in row] for row in self.arrays["old"]]


def sample_rows(seed: int = 0) -> Rows:
    """Return four random attempts, two per group, with one to three turns each."""
    rng = np.random.default_rng(seed)
    names = ("logprobs", "old", "reference", "advantages", "values", "predictions", "returns")
    arrays: dict[str, list[list[F64]]] = {name: [] for name in names}
    for turns in TURNS:
        for name in names:
            arrays[name].append([rng.normal(size=n) for n in turns])
        played = [-0.5 - 2 * rng.random(n) for n in turns]
        for name, spread in _SPREAD.items():
            arrays[name][-1] = [np.minimum(p + spread * rng.normal(size=len(p)), -1e-3) for p in played]
    return Rows(arrays=arrays)


def examine_padded_loss(function: Function, *, seed: int = 0) -> dict[int, Finding]:
    """Return the finding for each invariant of a function from padded log-probabilities (or values) and a mask.

    The function returns a scalar, or an array [B, L], whose masked sum is taken. Raises ConfigError if it has no
    gradient.
    """
    wanted = roles(function)
    by = next((role for role in ("logprobs", "predictions") if role in wanted.values()), None)
    if by is None:
        raise ConfigError(f"{label(function)} takes neither token_level_rewards nor log_prob nor vpreds")

    def look(rows: Rows) -> Slopes:
        return slopes(function, wanted, by, rows)

    rows = sample_rows(seed)
    plain = look(rows)
    if not all(np.isfinite(turn).all() for row in plain.actions for turn in row):
        raise AssertionError("its gradient is not finite, of finite log-probabilities")
    return examine(
        {
            1: [
                lambda: _describe_difference(
                    "with three more observed tokens between turns", plain, look(replace(rows, gap=5))
                )
            ],
            2: [lambda: _permutation(look, rows)],
            3: [
                lambda: _describe_difference("with three more columns of padding", plain, look(replace(rows, pad=4))),
                lambda: _splitting(look, rows),
            ],
            4: [
                lambda: _masked(look(replace(rows, apart=True))),
                lambda: _describe_difference(
                    "beside an attempt that failed, all masked", plain, look(replace(rows, failed=1))
                ),
            ],
            5: [_sees_no_rewards],
            6: [_sees_no_rewards],
            7: [lambda: _no_advantage(look, rows, "advantages" in wanted.values())],
        }
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Slopes:
    """The gradient of a loss at action tokens, [row][turn] -> f64[n], and at masked tokens, f64[m]."""

    actions: list[list[F64]]
    masked: F64


Look = Callable[[Rows], Slopes]


def slopes(function: Function, wanted: Mapping[str, str], by: str, rows: Rows) -> Slopes:
    """Return the gradient of the loss on `rows` with respect to the array with role `by`.

    `wanted` maps each parameter of the function to its role. Raises ConfigError if the result has no gradient.
    """
    arrays, places = pad_rows(rows)
    leaf = arrays[by].requires_grad_()
    mask = arrays["mask"]
    result = function(**{name: arrays[role] for name, role in wanted.items()})
    loss = result[0] if isinstance(result, tuple | list) else result
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise ConfigError(f"the result of {label(function)} has no gradient by the log-probabilities it was given")
    total = (loss * mask).sum() if loss.shape == mask.shape else loss.sum()
    (found,) = torch.autograd.grad(total, leaf)
    values = found.detach().numpy().astype(np.float64)
    actions = [[values[r, begin:end] for begin, end in turns] for r, turns in enumerate(places)]
    return Slopes(actions=actions, masked=values[mask.numpy() == 0])


def pad_rows(rows: Rows) -> tuple[dict[str, Any], list[list[tuple[int, int]]]]:
    """Return the tensors f64[B, L] of `rows` and their group index by role, and the span of each turn in its row."""
    shape = rows.shape
    length = max(sum(turns) + rows.gap * len(turns) for turns in shape) + rows.pad
    size = len(shape) + rows.failed, length
    rng = np.random.default_rng(1)
    tensors = {name: torch.from_numpy(rng.normal(size=size)) for name in rows.arrays}  # masked entries are random
    for name in _SPREAD:
        tensors[name] = -1 - torch.from_numpy(rng.random(size=size))
    if rows.apart:
        tensors["old"].fill_(-800.0)
        tensors["logprobs"].fill_(-0.001)
    tensors["mask"] = torch.zeros(size, dtype=torch.float64)
    places: list[list[tuple[int, int]]] = []
    for r, turns in enumerate(shape):
        places.append([])
        at = 0
        for k, n in enumerate(turns):
            for name, values in rows.arrays.items():
                tensors[name][r, at : at + n] = torch.from_numpy(values[r][k])
            tensors["mask"][r, at : at + n] = 1
            places[-1].append((at, at + n))
            at += n + rows.gap
    index = np.array([f"g{r // 2}" for r in range(size[0])], dtype=object)
    return {**tensors, "index": index}, places


def _select_rows(rows: Rows, which: Sequence[int]) -> Rows:
    return replace(rows, arrays={name: [values[r] for r in which] for name, values in rows.arrays.items()})


def _permutation(look: Look, rows: Rows) -> str | None:
    order = [2, 0, 3, 1]
    expected = look(rows)
    moved = look(_select_rows(rows, order))
    back = [moved.actions[order.index(r)] for r in range(len(order))]
    return _describe_difference("with the rows in another order", expected, replace(moved, actions=back))


def _splitting(look: Look, rows: Rows) -> str | None:
    """Return how two micro-batches differ from the whole batch, or None if they do not.

    They are combined in the way that comes closest to it.
    """
    plain, halves = look(rows), ([0], [1, 2, 3])
    tokens = [sum(turns) for turns in rows.shape]
    ways = {
        "put together by their rows": [len(half) / len(tokens) for half in halves],
        "put together by their tokens": [sum(tokens[r] for r in half) / sum(tokens) for half in halves],
        "added up": [1.0, 1.0],
    }
    found: list[tuple[float, str | None]] = []
    for way, shares in ways.items():
        parts = [look(_select_rows(rows, half)).actions for half in halves]
        actions = [[share * turn for turn in row] for share, part in zip(shares, parts, strict=True) for row in part]
        whole = Slopes(actions=actions, masked=plain.masked)
        difference = _describe_difference(f"as micro-batches of 1 and 3 rows, {way}", plain, whole)
        found.append((_gap(plain, whole), difference))
    return min(found, key=lambda one: one[0])[1]


def _masked(found: Slopes) -> str | None:
    if found.masked.any():
        return f"a masked token, whose log-probabilities lie far apart, has the gradient {_nonzero(found.masked):.3g}"
    if not all(np.isfinite(turn).all() for row in found.actions for turn in row):
        return "beside masked tokens whose log-probabilities lie far apart, a gradient is not finite"
    return None


def _no_advantage(look: Look, rows: Rows, takes_advantages: bool) -> str | None:
    if not takes_advantages:
        raise DoesNotApply("it takes no advantages")
    flat = [[np.zeros_like(turn) for turn in row] for row in rows.arrays["advantages"]]
    found = look(replace(rows, arrays={**rows.arrays, "advantages": flat}))
    for row in found.actions:
        for turn in row:
            if turn.any():
                return f"where every advantage is 0, a token has the gradient {_nonzero(turn):.3g}"
    return None


def _nonzero(values: F64) -> float:
    return float(values[values != 0][0])


def _sees_no_rewards() -> str | None:
    raise DoesNotApply("a loss sees advantages, no rewards")


def _gap(expected: Slopes, actual: Slopes) -> float:
    pairs = zip(expected.actions, actual.actions, strict=True)
    gaps = [np.abs(x - y).max() for a, b in pairs for x, y in zip(a, b, strict=True)]
    return float(np.nan_to_num(max(gaps), nan=np.inf))


def _describe_difference(what: str, expected: Slopes, actual: Slopes) -> str | None:
    worst, seen = 0.0, None
    for r, row in enumerate(expected.actions):
        for k, turn in enumerate(row):
            other = actual.actions[r][k]
            gap = np.nan_to_num(np.abs(turn - other), nan=np.inf)
            if gap.max() > worst and not np.allclose(turn, other, rtol=1e-5, atol=1e-9):
                worst, n = float(gap.max()), int(gap.argmax())
                seen = f"{what}, the gradient at turn {k} of row {r} {format_change(turn[n], other[n])}"
    return seen
