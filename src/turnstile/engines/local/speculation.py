"""Speculative decoding with n-grams, which drafts the next tokens from text that was seen before.

The method follows prompt lookup decoding (Saxena, 2023) and the grouped drafts of Seer (arXiv 2511.14617). Agents
repeat themselves: the frame of a tool call, quotes of a file, text that another attempt at the task has just produced.
A draft is computed together with the token that it follows, and kept only if exactly that token is drawn, so the
sampled distribution stays the model's own. Accepted drafts save passes; rejected ones cost their computation.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

NUMBER = 0
"""Denotes, among the context sizes, the context of a number: its `FRAME` and its digits so far, whatever they are."""

MIN_HITS = {6: 1, NUMBER: 1, 3: 1, 2: 2, 1: 4}
"""Context sizes, most specific first, and how often in a row a context must have continued the same way to be used."""

FRAME = 3
"""Number of tokens before a number that belong to its context."""

DIGITS = -1
"""Placeholder in a context for any token of digits."""

MAX_CONTEXT = 16
"""Number of last tokens that contexts are taken from; a number that is longer with its frame has no context."""

MAX_KIND_HITS = 4
"""Largest number of hits in a kind of draft; more hits count as this many."""

PRIOR = (0.8, 5)
"""Acceptance rate assumed for an untried kind of draft, and the number of trials that it counts as."""

RATE_WINDOW = 50
"""Number of trials of a kind after which older ones lose weight."""

MIN_LIKELIHOOD = 0.5
"""A run of drafts ends where the probability that all of it is accepted falls below this."""

MAX_CONTEXTS = 2**17
"""Contexts per generation. Two generations are kept: when the newer one is full, the older one is dropped."""


def digit_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of tokens that consist of decimal digits, after an optional space in any notation."""
    vocabulary = tokenizer.get_vocab()
    return frozenset(token for text, token in vocabulary.items() if text.lstrip(" \u0120\u2581").isdecimal())


class Draft(NamedTuple):
    """A token that may come next, and its kind: (size of the context, hits)."""

    token: int
    kind: tuple[int, int]


class Speculator:
    """Remembers how short contexts continued, and how often drafts of each kind were accepted.

    Drafts to compute end before one of `stop_ids`, since nothing is sampled after it. `digits` are the tokens of
    digits. A number is usually new, but its length and what follows it often are not (`"line": 120, "end": 180`).
    """

    def __init__(self, stop_ids: Container[int] = (), digits: Container[int] = ()) -> None:
        self._stop_ids, self._digits = stop_ids, digits
        self._recent: dict[tuple[int, ...], tuple[int, int]] = {}  # context -> (next token, times in a row)
        self._older: dict[tuple[int, ...], tuple[int, int]] = {}
        self._accepted: dict[tuple[int, int], tuple[float, int]] = {}  # kind -> (acceptance rate, trials)

    def observe(self, path: Sequence[int], begin: int) -> None:
        """Learn how the contexts before each of the tokens `path[begin:]` continue."""
        for end in range(max(begin, 1), len(path)):
            token = path[end]
            for _, context in self._contexts(path[max(0, end - MAX_CONTEXT) : end]):
                before, hits = self._lookup(context) or (token, 0)
                self._recent[context] = (token, hits + 1 if token == before else 0)
            if len(self._recent) > MAX_CONTEXTS:
                self._older, self._recent = self._recent, {}

    def propose(self, path: Sequence[int], limit: int) -> tuple[list[Draft], int]:
        """Return drafts of the tokens after a path, and how many of them are likely enough to compute.

        At most `limit` are computed. The drafts may contain one more, whose outcome is recorded too: otherwise a kind
        that was rejected once would never be tried again.
        """
        context, drafts, probability = tuple(path[-MAX_CONTEXT:]), list[Draft](), 1.0
        while draft := self._next_draft(context):
            drafts.append(draft)
            probability *= self._acceptance_rate(draft.kind)
            if len(drafts) > limit or probability < MIN_LIKELIHOOD or draft.token in self._stop_ids:
                return drafts, len(drafts) - 1
            context = (*context, draft.token)[-MAX_CONTEXT:]
        return drafts, len(drafts)

    def cut_at_stop(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens before the first stop token."""
        end = next((i for i, token in enumerate(tokens) if token in self._stop_ids), len(tokens))
        return tokens[:end]

    def record_outcome(self, drafts: Sequence[Draft], accepted: int) -> None:
        """Record that the first `accepted` drafts were accepted and the next one, if any, was rejected."""
        for number, draft in enumerate(drafts[: accepted + 1]):
            rate, trials = self._accepted.get(draft.kind, PRIOR)
            trials = min(trials + 1, RATE_WINDOW)
            self._accepted[draft.kind] = rate + ((number < accepted) - rate) / trials, trials

    def _next_draft(self, tail: Sequence[int]) -> Draft | None:
        """Return a draft of the token that followed the most specific known context; None without a reliable context.

        Any context that continues with the same token supports it. A long one may be nearly new where a shorter one has
        always continued the same way, so the draft is of the kind with the highest acceptance rate.
        """
        continuations = [
            (size, *known)
            for size, context in self._contexts(tail)
            if (known := self._lookup(context)) and (size != NUMBER or self._ends_number(*known))
        ]
        kinds = [
            (size, min(hits, MAX_KIND_HITS))
            for size, token, hits in continuations
            if token == continuations[0][1] and hits >= MIN_HITS[size]
        ]
        return Draft(continuations[0][1], max(kinds, key=self._acceptance_rate)) if kinds else None

    def _ends_number(self, token: int, hits: int) -> bool:
        """Return whether numbers of this length reliably end with this token; otherwise another digit may come next."""
        return token not in self._digits and hits >= MIN_HITS[NUMBER]

    def _contexts(self, tail: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield (size, context) for each context that ends with the last token of `tail`.

        `tail` has at most MAX_CONTEXT tokens.
        """
        begin = len(tail)
        while begin and tail[begin - 1] in self._digits:
            begin -= 1
        for size in MIN_HITS:
            if size == NUMBER:
                if FRAME <= begin < len(tail):
                    yield size, tuple([DIGITS if token in self._digits else token for token in tail[begin - FRAME :]])
            elif size <= len(tail):
                yield size, tuple(tail[-size:])

    def _acceptance_rate(self, kind: tuple[int, int]) -> float:
        """Return the acceptance rate of a kind of draft."""
        return self._accepted.get(kind, PRIOR)[0]

    def _lookup(self, context: tuple[int, ...]) -> tuple[int, int] | None:
        return self._recent.get(context) or self._older.get(context)
