"""Encode conversations as ids without a tokenizer, using code points and markers for roles and message ends.

With this codec the episode loop, which only knows ids, can talk to a server that takes messages and returns text.
Lengths are then in characters, and there are no log-probabilities, so such turns cannot be trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from turnstile.types import I32

FIRST_MARKER = 0x110000  # beyond all code points, so that no text contains a marker
ROLES = ("system", "user", "assistant")
ROLE_IDS = {role: FIRST_MARKER + index for index, role in enumerate(ROLES)}
END_ID = FIRST_MARKER + len(ROLES)
"""The id that ends a message."""


def encode_text(text: str) -> I32:
    """Return the code points of a text, i32[n]."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<i4").astype(np.int32)


def encode_messages(messages: Iterable[tuple[str, str]], *, head: bool = False) -> I32:
    """Return the ids i32[n] of (role, text) pairs as complete messages.

    With `head`, the assistant's role marker follows them.
    """
    parts = [part for role, text in messages for part in ([ROLE_IDS[role]], encode_text(text), [END_ID])]
    tail = [[ROLE_IDS["assistant"]]] if head else []
    return np.concatenate([np.zeros(0, np.int32), *(np.asarray(part, np.int32) for part in (*parts, *tail))])


def decode_text(ids: I32) -> str:
    """Return the text of the ids before the first marker."""
    markers = np.flatnonzero(ids >= FIRST_MARKER)
    plain = ids[: markers[0]] if len(markers) else ids
    return plain.astype("<i4").tobytes().decode("utf-32-le", "surrogatepass")


class TextTokenizer:
    """A stand-in for a tokenizer that decodes such ids as characters, and each role marker as a line of its own."""

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the code points of a text."""
        return [int(code_point) for code_point in encode_text(text)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids, with role markers as lines."""
        markers = {head: f"[{role}]\n" for role, head in ROLE_IDS.items()} | {END_ID: "\n"}
        return "".join(markers[one] if one in markers else chr(one) for one in token_ids)


def is_text_prompt(ids: I32) -> bool:
    """Return whether a prompt consists of encoded messages rather than of a tokenizer's ids."""
    return len(ids) > 0 and int(ids[0]) in ROLE_IDS.values()


def decode_messages(ids: I32) -> list[tuple[str, str]]:
    """Return the (role, text) pairs that `encode_messages` encoded.

    Consecutive messages of one role are joined, since servers expect roles to alternate. Raises ValueError for ids that
    do not begin with a role marker.
    """
    if not is_text_prompt(ids):
        raise ValueError("this prompt has a tokenizer's ids instead of encoded messages")
    starts = np.flatnonzero((ids >= FIRST_MARKER) & (ids != END_ID))
    segments: Sequence[I32] = np.split(ids, starts[1:])
    messages: list[tuple[str, str]] = []
    for segment in segments:
        role, text = ROLES[int(segment[0]) - FIRST_MARKER], decode_text(segment[1:])
        if len(segment) == 1 and segment is segments[-1]:
            continue  # the role marker of the turn to sample
        if messages and messages[-1][0] == role:
            text = f"{messages.pop()[1]}\n\n{text}"
        messages.append((role, text))
    return messages
