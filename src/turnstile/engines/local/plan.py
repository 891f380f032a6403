"""What each step of the engine computes: the tokens that requests lack, and guesses at those that come next."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from turnstile.engines.local.constraint import Given
from turnstile.engines.local.group import Cursor, Group, common
from turnstile.engines.local.kv_cache import Memory, Row
from turnstile.engines.local.layout import FEW, Span, lay_out
from turnstile.engines.local.requests import Request
from turnstile.engines.local.speculation import Speculator
from turnstile.engines.local.step import Ready, Step

PREFILL_TOKENS = 512
"""Prompt tokens computed in one step, so that a long prompt does not hold up those that decode."""

GIVEN_TOKENS = FEW - 1
"""Tokens asked after that are taken together: they are guesses that are always right."""

COUNTED = ("tokens_computed", "tokens_rebuilt", "tokens_guessed", "tokens_guessed_right", "evicted")
"""Tokens computed, but for wrong guesses; those of them that had been computed before (they were dropped for want of
memory, or the weights changed); tokens computed as guesses of its own, those of them that were right; rows dropped."""


class Planner:
    """The trees of all groups and the memory that they lie in; plans the passes over them.

    A pass takes no more than `width` tokens if there is a width, and then makes no guesses; else at most `most` tokens
    are guessed for each request by `drafts`, and `at_once` for all of them. Positions end at `window`.
    """

    def __init__(self, memory: Memory, *, width: int, drafts: Speculator, most: int, at_once: int, window: int) -> None:
        self.memory = memory
        self.trunk = 0
        """The layer of which it is kept what goes into it; 0 for none."""
        self.counted: dict[str, float] = defaultdict(float)
        self._width, self._at_once, self._window = width, at_once, window
        self._most = 0 if width else most
        self._groups: dict[str, Group] = {}
        self._drafts = drafts
        self._clock = itertools.count(1)

    def close(self, share: str) -> None:
        """Drops a group."""
        if share in self._groups:
            self._groups.pop(share).close()

    def forget(self, *, keep: bool = True) -> None:
        """Drops all groups; if the memory is to be kept, it waits for what comes next."""
        self._groups.clear()
        self.memory.clear(keep=keep)

    def keep_activations(self, layer: int) -> None:
        """From now on keeps what goes into that layer, or no longer, and drops all groups. A step that goes on is done
        as it was planned."""
        self.forget()
        self.trunk, self.memory = layer, self.memory.for_shape(replace(self.memory.shape, trunk=layer > 0))

    def states(self, share: str, path: list[int], which: int) -> Tensor:
        """Hidden states [n, H] of the first n tokens of a path that a group has computed."""
        cursor = Cursor()
        if share in self._groups:
            self._groups[share].follow(cursor, path)
        if cursor.row is not None:
            cursor.length = min(cursor.length, cursor.row.computed)
        return self.memory.states(cursor.row, cursor.length, which)

    def plan(self, batch: Sequence[Request]) -> Step:
        """Rooms for the next tokens of each request, in the order in which they came; what is known costs nothing. What
        is left of the step is for guesses."""
        spans: dict[Request, Span] = {}
        whole: list[Request] = []
        needed: set[Row] = set()
        left = self._width or PREFILL_TOKENS
        for request in batch:
            group, cursor, path, clock = self._group(request), request.cursor, request.path, next(self._clock)
            group.follow(cursor, path, again=request.heard)
            self._hear(request, cursor.length)
            begin, room = cursor.length, left if self._width else max(1, left)
            if missing := path[begin : begin + room]:
                first = not spans and not whole  # one always goes on
                if not group.extend(cursor, missing, needed, clock, must=first):
                    continue
                assert cursor.row is not None
                spans[request] = Span(cursor.row, begin, cursor.length)
                left -= len(missing)
                self.counted["tokens_computed"] += len(missing)
                self.counted["tokens_rebuilt"] += request.session.computes(path, begin, cursor.length)
            if cursor.row is not None and cursor.length:
                needed |= cursor.row.use(clock)
            if cursor.length == len(path):
                whole.append(request)
        ready, left = [], min(left, self._at_once)
        for request in whole:
            lacking = spans[request].size if request in spans else 0
            room = FEW - lacking if lacking <= FEW else left  # more would have them attended to apart from others
            one = self._guess(request, max(0, min(left, room)))
            left -= len(one.guesses)
            if one.drafted:
                self._draft(request, one.guesses, spans, needed)
            ready.append(one)
        self.counted["evicted"] += self.memory.take_dropped()
        return Step(lay_out(list(spans.values())), ready, width=self._width, trunk=self.trunk)

    def settle(self, step: Step, batch: Sequence[Request]) -> None:
        """Learns after a step what came of its guesses, and takes back those that were wrong."""
        for one in step.ready:
            request, cursor, path = one.request, one.request.cursor, one.request.path
            if self._most and not isinstance(request.constraint, Given):
                said = path[len(path) - one.sampled :]
                self._drafts.judge(one.drafts[: one.sampled], common(said, [draft.token for draft in one.drafts]))
                self._drafts.observe(path, len(path) - one.sampled)
            if not one.drafted:
                continue
            right = 0
            if cursor.row is not None and request.session.share in self._groups:
                right = min(self._retract(request, cursor.row, batch), one.drafted)
                self.counted["tokens_computed"] += right
                own = common(cursor.row.tokens, path, cursor.length)  # others may have said more of it
                self.counted["tokens_rebuilt"] += request.session.computes(path, cursor.length, own)
            if one.drafts:
                self.counted["tokens_guessed"] += one.drafted
                self.counted["tokens_guessed_right"] += right

    def _retract(self, request: Request, row: Row, batch: Sequence[Request]) -> int:
        """Takes back what stands in the request's row and was said by nobody; returns how much is left behind its
        place there."""
        cursors = [(other.cursor.length, other.path) for other in batch if other.cursor.row is row]
        same = min(length for length, _ in cursors)  # up to there the paths are the row's
        known = same + max(common(row.tokens[same:], path[same:]) for _, path in cursors)
        self._group(request).retract(row, known)
        return max(0, len(row.tokens) - request.cursor.length)

    def _group(self, request: Request) -> Group:
        share = request.session.share
        if share not in self._groups:
            self._groups[share] = Group(self.memory, lean=not self._width)
        return self._groups[share]

    def _hear(self, request: Request, known: int) -> None:
        """Learns once how what of a prompt is new, to its session and its group, goes on."""
        if not request.heard and self._most and not isinstance(request.constraint, Given):
            begin = max(known, request.session.met(request.path))
            self._drafts.observe(request.path, begin + 1)  # the end of a turn goes on with nothing
        request.heard = True

    def _guess(self, request: Request, room: int) -> Ready:
        """The request with tokens that may come next: those that the group knows already, or else ones that this step
        computes as well, for which the row has room."""
        cursor, given = request.cursor, request.constraint
        row, most = cursor.row, min(room, self._guesses(request))
        assert row is not None
        assert row.shelf is not None
        if known := row.tokens[cursor.length : cursor.length + most]:
            if isinstance(given, Given):
                return Ready(request, known[: common(known, given.next(most))])
            return Ready(request, self._drafts.turn(known))
        most = min(most, row.shelf.capacity - (cursor.length - row.begin))
        if isinstance(given, Given):
            tokens = given.next(most)
            return Ready(request, tokens, len(tokens))
        drafts, likely = self._drafts.guess(request.path, most) if self._most and given is None else ([], 0)
        return Ready(request, [draft.token for draft in drafts[:likely]], likely, drafts)

    def _draft(self, request: Request, tokens: Sequence[int], spans: dict[Request, Span], needed: set[Row]) -> None:
        """Has guesses computed in the row of a request."""
        end = request.cursor.copy()
        held = self._group(request).extend(end, tokens, needed, next(self._clock), must=False)
        assert held, "the row has room for them"
        assert end.row is not None
        if request in spans:
            spans[request].end = end.length
        else:
            spans[request] = Span(end.row, request.cursor.length, end.length)

    def _guesses(self, request: Request) -> int:
        """How many tokens may be guessed for it."""
        if self._width or (request.constraint is not None and not isinstance(request.constraint, Given)):
            return 0
        most = GIVEN_TOKENS if isinstance(request.constraint, Given) else self._most
        return max(0, min(most, request.left - 1, self._window - len(request.path)))
