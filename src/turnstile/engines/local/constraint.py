"""Constrain turns to match a regular expression or a grammar, with the library llguidance."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from turnstile.errors import ConfigError, MissingExtraError
from turnstile.types import I32, Bool, Sampling


class ConstraintFactory:
    """Makes constraints for one tokenizer.

    `vocabulary` is the width of the logits, and `stop_ids` are the tokens that may end a match.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, stop_ids: Collection[int]) -> None:
        self._tokenizer, self._vocabulary, self._stop_ids = tokenizer, vocabulary, stop_ids
        self._tokenizer_info: Any = None  # made at first use, which takes a second

    def scored_tokens(self, token_ids: I32) -> ScoredTokens:
        """Return the constraint that allows only this sequence of tokens."""
        return ScoredTokens(token_ids.tolist(), self._vocabulary)

    def check(self, token_ids: I32) -> None:
        """Raise ConfigError if a token is not in the model's vocabulary."""
        unknown = token_ids[(token_ids < 0) | (token_ids >= self._vocabulary)]
        if len(unknown):
            raise ConfigError(f"token {unknown[0]} is not in the model's vocabulary of {self._vocabulary} tokens")

    def compile(self, sampling: Sampling) -> Constraint | None:
        """Return a new constraint for a turn with this sampling, or None if the sampling is not constrained.

        Raises ConfigError for an expression that does not parse, for a regex together with a grammar, and for either
        together with truncation, which could leave no token to draw. Raises MissingExtraError without llguidance.
        """
        if not (sampling.regex or sampling.grammar):
            return None
        if sampling.regex and sampling.grammar:
            raise ConfigError("sampling.regex and sampling.grammar are both set; set only one")
        if sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0:
            raise ConfigError(
                "sampling.regex and sampling.grammar cannot be combined with top_k, top_p or min_p; turn those off"
            )
        try:
            import llguidance
            from llguidance.hf import from_tokenizer
        except ModuleNotFoundError:
            raise MissingExtraError("sampling.regex or sampling.grammar", "grammar") from None
        if self._tokenizer_info is None:
            eos_ids = sorted(self._stop_ids) or None
            self._tokenizer_info = from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=eos_ids)  # type: ignore[arg-type]
        rule = llguidance.LLMatcher.grammar_from_regex(sampling.regex) if sampling.regex else sampling.grammar
        matcher = llguidance.LLMatcher(self._tokenizer_info, rule, log_level=0)
        if matcher.is_error():
            name = "regex" if sampling.regex else "grammar"
            raise ConfigError(f"sampling.{name} cannot be read: {matcher.get_error().splitlines()[0]}")
        return Constraint(matcher, self._vocabulary)


class Constraint:
    """Tracks which tokens a turn may sample next."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def allowed(self) -> Bool:
        """Return the mask bool[V] of the tokens that may come next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocabulary].astype(bool)

    def advance(self, token: int) -> bool:
        """Consume a token and return whether the turn is complete."""
        self._matcher.consume_token(token)
        return bool(self._matcher.is_stopped())


class ScoredTokens:
    """A constraint that allows one given sequence of tokens, which are scored instead of sampled."""

    def __init__(self, token_ids: Sequence[int], vocabulary: int) -> None:
        self._remaining_ids, self._vocabulary = list(token_ids), vocabulary

    def next_tokens(self, count: int) -> list[int]:
        """Return at most `count` of the next tokens."""
        return self._remaining_ids[:count]

    def allowed(self, offset: int = 0) -> Bool:
        """Return the mask bool[V] that allows only the token `offset` places after the next one."""
        mask = np.zeros(self._vocabulary, dtype=bool)
        mask[self._remaining_ids[offset]] = True
        return mask

    def advance(self, token: int) -> bool:
        """Consume a token and return whether it was the last one."""
        self._remaining_ids.pop(0)
        return not self._remaining_ids
