"""Plan engine steps: the tokens that requests are missing, and drafts of the tokens that may come next."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from turnstile.engines.local.constraint import ScoredTokens
from turnstile.engines.local.kv_cache import CacheRow, KVCache
from turnstile.engines.local.layout import SHORT_SPAN, Span, lay_out
from turnstile.engines.local.prefix_tree import PrefixPosition, PrefixTree, common_prefix
from turnstile.engines.local.requests import Request
from turnstile.engines.local.speculation import Speculator
from turnstile.engines.local.step import EngineStep, ReadyRequest

PREFILL_TOKENS = 512
"""Most missing tokens computed in one step, so that a long prompt does not delay the requests that decode."""

SCORED_TOKENS = SHORT_SPAN - 1
"""Most scored tokens computed together; they are treated as drafts that are always accepted."""

PLANNER_STATS = ("tokens_computed", "tokens_rebuilt", "tokens_speculated", "tokens_accepted", "evicted")
"""Counters of the planner.

In this order: tokens computed (without rejected drafts); those of them that had been computed before (and were evicted,
or computed with older weights); draft tokens computed; draft tokens accepted; rows evicted.
"""


class Planner:
    """Plans the passes over the prefix trees of all groups and the cache that holds them.

    With a `width`, a pass takes at most that many tokens and speculates nothing. Otherwise `speculator` speculates at
    most `max_drafts` tokens for each request, and at most `max_logits` for all of them. Nothing is speculated at
    positions from `window` on.
    """

    def __init__(
        self, cache: KVCache, *, width: int, speculator: Speculator, max_drafts: int, max_logits: int, window: int
    ) -> None:
        self.cache = cache
        self.activation_layer = 0
        """Layer whose input is kept; 0 for none."""
        self.stats: dict[str, float] = defaultdict(float)
        self._width, self._max_logits, self._window = width, max_logits, window
        self._max_drafts = 0 if width else max_drafts
        self._groups: dict[str, PrefixTree] = {}
        self._speculator = speculator
        self._clock = itertools.count(1)

    def close(self, share: str) -> None:
        """Drop the rows of a group."""
        if share in self._groups:
            self._groups.pop(share).close()

    def clear(self, *, keep: bool = True) -> None:
        """Drop all groups; with `keep`, their memory stays allocated for later rows."""
        self._groups.clear()
        self.cache.clear(keep=keep)

    def keep_activations(self, layer: int) -> None:
        """Keep the input of `layer` from now on (0: of none), and drop all groups.

        A step under way finishes as it was planned.
        """
        self.clear()
        self.activation_layer = layer
        self.cache = self.cache.with_shape(replace(self.cache.shape, with_activations=layer > 0))

    def hidden_states(self, share: str, path: list[int], which: int) -> Tensor:
        """Return the hidden states [n, H] of the first n tokens of a path, as far as its group has computed it.

        `which` is 0 for the last hidden states, 1 for the activations.
        """
        position = PrefixPosition()
        if share in self._groups:
            self._groups[share].advance(position, path)
        if position.row is not None:
            position.length = min(position.length, position.row.computed)
        return self.cache.hidden_states(position.row, position.length, which)

    def plan(self, batch: Sequence[Request]) -> EngineStep:
        """Plan the next step for the requests of a batch.

        In order of arrival, each request gets cache and budget for its missing tokens; cached tokens are free. The rest
        of the step's budget goes to drafts.
        """
        spans: dict[Request, Span] = {}
        complete: list[Request] = []
        pinned: set[CacheRow] = set()
        budget = self._width or PREFILL_TOKENS
        for request in batch:
            group, position, path = self._group(request), request.prefix_position, request.path
            clock = next(self._clock)
            group.advance(position, path, resumed=request.observed)
            self._observe_prompt(request, position.length)
            begin, limit = position.length, budget if self._width else max(1, budget)
            if missing := path[begin : begin + limit]:
                first = not spans and not complete  # one request always makes progress
                if not group.extend(position, missing, pinned, clock, force=first):
                    continue
                assert position.row is not None
                spans[request] = Span(position.row, begin, position.length)
                budget -= len(missing)
                self.stats["tokens_computed"] += len(missing)
                self.stats["tokens_rebuilt"] += request.session.record_computed(path, begin, position.length)
            if position.row is not None and position.length:
                pinned |= position.row.touch(clock)
            if position.length == len(path):
                complete.append(request)
        ready, budget = [], min(budget, self._max_logits)
        for request in complete:
            num_missing = spans[request].size if request in spans else 0
            # More drafts would make the span long, and take it out of the attention batch of short spans.
            limit = SHORT_SPAN - num_missing if num_missing <= SHORT_SPAN else budget
            one = self._speculate(request, max(0, min(budget, limit)))
            budget -= len(one.speculated)
            if one.num_drafted:
                self._add_drafts(request, one.speculated, spans, pinned)
            ready.append(one)
        self.stats["evicted"] += self.cache.take_evicted()
        laid_out = lay_out(list(spans.values()))
        return EngineStep(laid_out, ready, width=self._width, activation_layer=self.activation_layer)

    def finish(self, step: EngineStep, batch: Sequence[Request]) -> None:
        """Give the speculator the outcome of a step's drafts, and discard rejected tokens from the cache."""
        for ready in step.ready:
            request, position, path = ready.request, ready.request.prefix_position, ready.request.path
            if self._max_drafts and not isinstance(request.constraint, ScoredTokens):
                sampled = path[len(path) - ready.sampled :]
                drafted = [draft.token for draft in ready.drafts]
                self._speculator.record_outcome(ready.drafts[: ready.sampled], common_prefix(sampled, drafted))
                self._speculator.observe(path, len(path) - ready.sampled)
            if not ready.num_drafted:
                continue
            accepted = 0
            if position.row is not None and request.session.share in self._groups:
                accepted = min(self._discard_rejected(request, position.row, batch), ready.num_drafted)
                self.stats["tokens_computed"] += accepted
                # Other requests of the group may have sampled more of the path by now.
                computed = common_prefix(position.row.tokens, path, position.length)
                self.stats["tokens_rebuilt"] += request.session.record_computed(path, position.length, computed)
            if ready.drafts:
                self.stats["tokens_speculated"] += ready.num_drafted
                self.stats["tokens_accepted"] += accepted

    def _discard_rejected(self, request: Request, row: CacheRow, batch: Sequence[Request]) -> int:
        """Cut a row back to tokens that some request sampled; return how many of them follow the request's position."""
        paths = [(other.prefix_position.length, other.path) for other in batch if other.prefix_position.row is row]
        # Up to `same` all these paths agree with the row; after it, the path that agrees longest decides what stays.
        same = min(length for length, _ in paths)
        kept = same + max(common_prefix(row.tokens[same:], path[same:]) for _, path in paths)
        self._group(request).truncate(row, kept)
        return max(0, len(row.tokens) - request.prefix_position.length)

    def _group(self, request: Request) -> PrefixTree:
        share = request.session.share
        if share not in self._groups:
            self._groups[share] = PrefixTree(self.cache, share_prefixes=not self._width)
        return self._groups[share]

    def _observe_prompt(self, request: Request, known: int) -> None:
        """Make the speculator observe, once, the part of a prompt that is new to its session and its group."""
        if not request.observed and self._max_drafts and not isinstance(request.constraint, ScoredTokens):
            begin = max(known, request.session.count_seen(request.path))
            self._speculator.observe(request.path, begin + 1)  # nothing follows the end of a turn
        request.observed = True

    def _speculate(self, request: Request, limit: int) -> ReadyRequest:
        """Return the request with its speculated tokens, which the group has cached or this step computes as drafts.

        Drafts must fit into the row's present capacity.
        """
        position, constraint = request.prefix_position, request.constraint
        row, max_drafts = position.row, min(limit, self._draft_limit(request))
        assert row is not None
        assert row.size_class is not None
        if known := row.tokens[position.length : position.length + max_drafts]:
            if isinstance(constraint, ScoredTokens):
                return ReadyRequest(request, known[: common_prefix(known, constraint.next_tokens(max_drafts))])
            return ReadyRequest(request, self._speculator.cut_at_stop(known))
        max_drafts = min(max_drafts, row.size_class.capacity - (position.length - row.begin))
        if isinstance(constraint, ScoredTokens):
            tokens = constraint.next_tokens(max_drafts)
            return ReadyRequest(request, tokens, len(tokens))
        speculates = self._max_drafts and constraint is None
        drafts, likely = self._speculator.propose(request.path, max_drafts) if speculates else ([], 0)
        return ReadyRequest(request, [draft.token for draft in drafts[:likely]], likely, drafts)

    def _add_drafts(
        self, request: Request, tokens: Sequence[int], spans: dict[Request, Span], pinned: set[CacheRow]
    ) -> None:
        """Extend the span of a request by drafts, or create a span for them."""
        end = request.prefix_position.copy()
        has_room = self._group(request).extend(end, tokens, pinned, next(self._clock), force=False)
        assert has_room, "the row has room for them"
        assert end.row is not None
        if request in spans:
            spans[request].end = end.length
        else:
            spans[request] = Span(end.row, request.prefix_position.length, end.length)

    def _draft_limit(self, request: Request) -> int:
        """Return how many tokens may be speculated for a request."""
        if self._width or (request.constraint is not None and not isinstance(request.constraint, ScoredTokens)):
            return 0
        max_drafts = SCORED_TOKENS if isinstance(request.constraint, ScoredTokens) else self._max_drafts
        return max(0, min(max_drafts, request.remaining - 1, self._window - len(request.path)))
