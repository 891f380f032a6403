"""The minimum number of tokens to compute for a group's episodes, counting each shared prefix once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from turnstile.types import Group, Trajectory


def tree_tokens(group: Group) -> int:
    """Return the number of nodes in the prefix tree of a group's contexts, each without its last token.

    This is what an engine computes that computes each shared prefix once; the last token of a context is never fed to
    the model.
    """
    paths = sorted(path for trajectory in group.trajectories for path in _contexts(trajectory))
    # In sorted order the longest prefix that a path shares with any earlier one is shared with its predecessor.
    nodes, before = 0, b""
    for path in paths:
        nodes += (len(path) - _common_prefix_bytes(before, path)) // TOKEN_BYTES
        before = path
    return nodes


TOKEN_BYTES = 4
"""Bytes per token in a path."""


def _contexts(trajectory: Trajectory) -> Iterator[bytes]:
    """Yield the contexts of one episode, each without its last token. Each rewrite starts another context."""
    pieces: list[np.ndarray] = []
    for turn in trajectory.turns:
        if turn.fresh:
            yield _path_bytes(pieces)
            pieces = []
        pieces += [turn.context_ids, turn.completion.token_ids]
    yield _path_bytes(pieces)


def _path_bytes(pieces: list[np.ndarray]) -> bytes:
    return np.concatenate(pieces).astype(">i4")[:-1].tobytes() if pieces else b""


def _common_prefix_bytes(one: bytes, other: bytes) -> int:
    """Return the length in bytes of the longest common prefix of two paths, in whole tokens."""
    length = min(len(one), len(other)) // TOKEN_BYTES
    if length == 0:
        return 0
    differ = np.flatnonzero(np.frombuffer(one, ">i4", length) != np.frombuffer(other, ">i4", length))
    return (int(differ[0]) if len(differ) else length) * TOKEN_BYTES
