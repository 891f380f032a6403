"""Guesses at the tokens that come next, from what was said before (speculative decoding with n-grams, as in the prompt
lookup of Saxena, 2023, and the grouped drafts of Seer, arXiv 2511.14617).

Agents repeat themselves: the frame of a tool call, what they quote of a file, what other attempts at the task have
just said. A guess is computed beside the token that it follows and kept only if that very token is drawn, so the
distribution stays the model's own; right guesses save passes, and wrong ones cost what they computed.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

NUMBER = 0
"""Stands among the sizes of contexts for one that is a number as far as it goes, whatever its digits, and the `FRAME`
before it."""

HITS = {6: 1, NUMBER: 1, 3: 1, 2: 2, 1: 4}
"""By the size of a context, the most telling first: how often in a row it must have gone on in one way for that to be
guessed."""

FRAME = 3
"""Tokens before a number that tell it from others."""

DIGITS = -1
"""Stands in a context for a token of digits, whichever."""

NEAR = 16
"""How many tokens back contexts are looked for; numbers of more than fit with their frame have none of their own."""

HITS_TOLD_APART = 4
"""So many hits or more are one kind of guess."""

UNTRIED = (0.8, 5)
"""How often a kind of guess is taken to be right before it was tried, and how many guesses that counts for."""

LATELY = 50
"""Guesses of a kind after which older ones fade."""

LIKELY = 0.5
"""A run of guesses ends where it is less likely than this to be right as a whole."""

REMEMBERED = 2**17
"""Contexts of a generation. Two are remembered: when the newer is full the older one is forgotten."""


def digit_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that are decimal digits, one or several, maybe with a space before them, as vocabularies write it."""
    vocabulary = tokenizer.get_vocab()
    return frozenset(token for text, token in vocabulary.items() if text.lstrip(" \u0120\u2581").isdecimal())


class Guess(NamedTuple):
    """A token that may come next, and the kind of guess it is: (size of the context, hits)."""

    token: int
    kind: tuple[int, int]


class Speculator:
    """How contexts of a few tokens went on, and how often guesses of each kind were right. Runs of guesses end before
    one of `stop_ids`, as nothing is sampled after it. `digits` are the tokens that numbers are written with: a number
    is new as a rule, but often neither its length nor what comes after it (`"line": 120, "end": 180`)."""

    def __init__(self, stop_ids: Container[int] = (), digits: Container[int] = ()) -> None:
        self._stop_ids, self._digits = stop_ids, digits
        self._new: dict[tuple[int, ...], tuple[int, int]] = {}  # context -> what came after it, how often in a row
        self._old: dict[tuple[int, ...], tuple[int, int]] = {}
        self._right: dict[tuple[int, int], tuple[float, int]] = {}  # kind -> share of right guesses, out of how many

    def observe(self, path: Sequence[int], begin: int) -> None:
        """Learns tokens `begin`.. of a path, each after those before it."""
        for end in range(max(begin, 1), len(path)):
            token = path[end]
            for _, context in self._contexts(path[max(0, end - NEAR) : end]):
                before, hits = self._known(context) or (token, 0)
                self._new[context] = (token, hits + 1 if token == before else 0)
            if len(self._new) > REMEMBERED:
                self._old, self._new = self._new, {}

    def guess(self, path: Sequence[int], most: int) -> tuple[list[Guess], int]:
        """Tokens that may come after a path, and how many of them, at most `most`, are likely to. The one after those,
        if there is one, is to be judged all the same: else what was wrong once would never be tried again."""
        context, found, chance = tuple(path[-NEAR:]), list[Guess](), 1.0
        while guess := self._next(context):
            found.append(guess)
            chance *= self._sure(guess.kind)
            if len(found) > most or chance < LIKELY or guess.token in self._stop_ids:
                return found, len(found) - 1
            context = (*context, guess.token)[-NEAR:]
        return found, len(found)

    def turn(self, tokens: Sequence[int]) -> Sequence[int]:
        """The first of these tokens, up to one that ends a turn, without it."""
        end = next((i for i, token in enumerate(tokens) if token in self._stop_ids), len(tokens))
        return tokens[:end]

    def judge(self, guesses: Sequence[Guess], right: int) -> None:
        """Learns that the first `right` guesses were right and the next one, if there is one, was not."""
        for number, guess in enumerate(guesses[: right + 1]):
            share, tried = self._right.get(guess.kind, UNTRIED)
            tried = min(tried + 1, LATELY)
            self._right[guess.kind] = share + ((number < right) - share) / tried, tried

    def _next(self, near: Sequence[int]) -> Guess | None:
        """The token that the most telling known context last went on with. Any context that agrees may vouch for it,
        and the surest kind does: a long one may be nearly new where three tokens have always gone on in one way."""
        said = [
            (size, *known)
            for size, context in self._contexts(near)
            if (known := self._known(context)) and (size != NUMBER or self._ended(*known))
        ]
        kinds = [
            (size, min(hits, HITS_TOLD_APART))
            for size, token, hits in said
            if token == said[0][1] and hits >= HITS[size]
        ]
        return Guess(said[0][1], max(kinds, key=self._sure)) if kinds else None

    def _ended(self, token: int, hits: int) -> bool:
        """Whether numbers of this length end with their frame; if they go on, any digit may come."""
        return token not in self._digits and hits >= HITS[NUMBER]

    def _contexts(self, near: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """What the last tokens of a path, at most NEAR of them, end in: (size, context)."""
        begin = len(near)
        while begin and near[begin - 1] in self._digits:
            begin -= 1
        for size in HITS:
            if size == NUMBER:
                if FRAME <= begin < len(near):
                    yield size, tuple([DIGITS if token in self._digits else token for token in near[begin - FRAME :]])
            elif size <= len(near):
                yield size, tuple(near[-size:])

    def _sure(self, kind: tuple[int, int]) -> float:
        """The share of right ones among the guesses of a kind."""
        return self._right.get(kind, UNTRIED)[0]

    def _known(self, context: tuple[int, ...]) -> tuple[int, int] | None:
        return self._new.get(context) or self._old.get(context)
