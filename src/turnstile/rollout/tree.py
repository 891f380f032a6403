"""How much there was to compute: the tokens of a group's episodes, each prefix counted once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from turnstile.types import Group, Trajectory


def tree_tokens(group: Group) -> int:
    """The nodes of the prefix tree of all contexts of a group that a model had to be fed to sample what was sampled.

    An engine that computes every token once has computed just these; the last token of a context is fed to nobody.
    """
    paths = sorted(path for trajectory in group.trajectories for path in _contexts(trajectory))
    nodes, before = 0, b""
    for path in paths:
        nodes += (len(path) - _common(before, path)) // TOKEN_BYTES
        before = path
    return nodes


TOKEN_BYTES = 4
"""Bytes that stand for a token."""


def _contexts(trajectory: Trajectory) -> Iterator[bytes]:
    """The contexts of one episode, less their last tokens: one, and one more for each time it was rewritten."""
    pieces: list[np.ndarray] = []
    for turn in trajectory.turns:
        if turn.fresh:
            yield _bytes(pieces)
            pieces = []
        pieces += [turn.context_ids, turn.completion.token_ids]
    yield _bytes(pieces)


def _bytes(pieces: list[np.ndarray]) -> bytes:
    return np.concatenate(pieces).astype(">i4")[:-1].tobytes() if pieces else b""


def _common(one: bytes, other: bytes) -> int:
    """Bytes of whole tokens that two paths begin with alike."""
    length = min(len(one), len(other)) // TOKEN_BYTES
    if length == 0:
        return 0
    differ = np.flatnonzero(np.frombuffer(one, ">i4", length) != np.frombuffer(other, ">i4", length))
    return (int(differ[0]) if len(differ) else length) * TOKEN_BYTES
