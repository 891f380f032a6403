"""Conversations as ids without a tokenizer: code points, with four ids beyond them for roles and the end of a message.

So an agent can speak through a server that takes messages and gives text, and the episode loop, which knows ids alone,
is the same. Lengths are in characters then, and there are no log-probabilities: nothing of it can be trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from turnstile.types import I32

BEYOND = 0x110000  # no character has such a number, so nothing that is said can be taken for a mark
ROLES = ("system", "user", "assistant")
HEADS = {role: BEYOND + place for place, role in enumerate(ROLES)}
END = BEYOND + len(ROLES)
"""The id behind a message."""


def spelled(text: str) -> I32:
    """The code points of a text, i32[n]."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<i4").astype(np.int32)


def written(messages: Iterable[tuple[str, str]], *, head: bool = False) -> I32:
    """(role, text) pairs as ids, each whole; with `head` the assistant's turn is begun behind them."""
    parts = [part for role, text in messages for part in ([HEADS[role]], spelled(text), [END])]
    tail = [[HEADS["assistant"]]] if head else []
    return np.concatenate([np.zeros(0, np.int32), *(np.asarray(part, np.int32) for part in (*parts, *tail))])


def text_of(ids: I32) -> str:
    """The text before the first mark."""
    marks = np.flatnonzero(ids >= BEYOND)
    plain = ids[: marks[0]] if len(marks) else ids
    return plain.astype("<i4").tobytes().decode("utf-32-le", "surrogatepass")


class Spelling:
    """Reads such ids where a tokenizer is asked for: characters as they are, a role as a line of its own."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [int(letter) for letter in spelled(text)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        marks = {head: f"[{role}]\n" for role, head in HEADS.items()} | {END: "\n"}
        return "".join(marks[one] if one in marks else chr(one) for one in token_ids)


def is_talk(ids: I32) -> bool:
    """Whether a prompt is of messages, and not of a tokenizer's ids."""
    return len(ids) > 0 and int(ids[0]) in HEADS.values()


def conversation(ids: I32) -> list[tuple[str, str]]:
    """What `written` was given; neighbours of one role are joined, since servers want roles to alternate. Raises
    ValueError for ids that do not begin with a role."""
    if not is_talk(ids):
        raise ValueError("this prompt is ids of a tokenizer, and no messages")
    begins = np.flatnonzero((ids >= BEYOND) & (ids != END))
    pieces: Sequence[I32] = np.split(ids, begins[1:])
    found: list[tuple[str, str]] = []
    for piece in pieces:
        role, text = ROLES[int(piece[0]) - BEYOND], text_of(piece[1:])
        if len(piece) == 1 and piece is pieces[-1]:
            continue  # the head of the turn that is asked for
        if found and found[-1][0] == role:
            text = f"{found.pop()[1]}\n\n{text}"
        found.append((role, text))
    return found
