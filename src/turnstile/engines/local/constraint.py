"""Turns that must match a regular expression or a grammar, by the library llguidance."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from turnstile.errors import ConfigError, MissingExtraError
from turnstile.types import I32, Bool, Sampling


class Constraints:
    """Makes constraints for one tokenizer; `vocabulary` is the width of the logits, `stop_ids` may end a match."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, stop_ids: Collection[int]) -> None:
        self._tokenizer, self._vocabulary, self._stop_ids = tokenizer, vocabulary, stop_ids
        self._wrapped: Any = None  # takes a second to make

    def given(self, token_ids: I32) -> Given:
        """What says these tokens and no others."""
        return Given(token_ids.tolist(), self._vocabulary)

    def check(self, token_ids: I32) -> None:
        """Raises ConfigError for a token that the model does not have."""
        unknown = token_ids[(token_ids < 0) | (token_ids >= self._vocabulary)]
        if len(unknown):
            raise ConfigError(f"the model has {self._vocabulary} tokens, and {unknown[0]} is none of them")

    def start(self, sampling: Sampling) -> Constraint | None:
        """What a turn sampled like that must match, if anything.

        Raises ConfigError for an expression that cannot be read, for both kinds at once, and together with a
        truncation, which could leave nothing to draw.
        """
        if not (sampling.regex or sampling.grammar):
            return None
        if sampling.regex and sampling.grammar:
            raise ConfigError("sampling.regex and sampling.grammar are both set; take one")
        if sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0:
            raise ConfigError(
                "sampling.regex and sampling.grammar leave top_k, top_p and min_p no room; turn those off"
            )
        try:
            import llguidance
            from llguidance.hf import from_tokenizer
        except ModuleNotFoundError:
            raise MissingExtraError("sampling.regex or sampling.grammar", "grammar") from None
        if self._wrapped is None:
            ends = sorted(self._stop_ids) or None
            self._wrapped = from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=ends)  # type: ignore[arg-type]
        rule = llguidance.LLMatcher.grammar_from_regex(sampling.regex) if sampling.regex else sampling.grammar
        matcher = llguidance.LLMatcher(self._wrapped, rule, log_level=0)
        if matcher.is_error():
            name = "regex" if sampling.regex else "grammar"
            raise ConfigError(f"sampling.{name} cannot be read: {matcher.get_error().splitlines()[0]}")
        return Constraint(matcher, self._vocabulary)


class Constraint:
    """What one turn may still say."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def allowed(self) -> Bool:
        """Which tokens may come next, [V]."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocabulary].astype(bool)

    def take(self, token: int) -> bool:
        """Goes on by a token; returns whether the turn is over with it."""
        self._matcher.consume_token(token)
        return bool(self._matcher.is_stopped())


class Given:
    """Nothing but these tokens, one after the other: they are not sampled but asked after."""

    def __init__(self, token_ids: Sequence[int], vocabulary: int) -> None:
        self._left, self._vocabulary = list(token_ids), vocabulary

    def next(self, count: int) -> list[int]:
        """The next tokens, at most so many."""
        return self._left[:count]

    def allowed(self, ahead: int = 0) -> Bool:
        """The next token alone, [V]; with `ahead`, the one after so many more."""
        mask = np.zeros(self._vocabulary, dtype=bool)
        mask[self._left[ahead]] = True
        return mask

    def take(self, token: int) -> bool:
        """Goes on by a token; returns whether it was the last."""
        self._left.pop(0)
        return not self._left
