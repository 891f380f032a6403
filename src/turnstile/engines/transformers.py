"""Sampling in process from a transformers model: many sessions, one running batch, every prefix computed once.

Requests join the batch at every step and leave it when they are done; between its turns a session's keys and
values stay where they are; the sessions of one group share theirs for as long as their tokens agree. The
random numbers of a request depend on its own seed and the token's index alone.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from turnstile.engines.constraint import Constraint, Constraints, Given
from turnstile.engines.failures import failure
from turnstile.engines.group import Cursor, Group
from turnstile.engines.layout import Span, lay_out
from turnstile.engines.memory import Memory, Row, shape_of
from turnstile.engines.requests import Request, Session
from turnstile.engines.sampling import draw, plain, uniform
from turnstile.engines.step import Step
from turnstile.errors import EngineError
from turnstile.models.attention import use_layouts
from turnstile.models.inference import Inference
from turnstile.types import F32, I32, Completion, Sampling

PREFILL_TOKENS = 512
"""Prompt tokens computed in one step, so that a long prompt does not hold up those that decode."""

STATS = ("tokens_asked", "tokens_computed", "tokens_rebuilt", "tokens_sampled", "evicted", "seconds")
"""What is counted: prompt tokens of the requests, tokens computed, those of them that had been computed before (they
were dropped for want of memory, or the weights changed), tokens sampled, rows dropped, seconds of all steps."""


class TransformersEngine:
    """Obeys `engines.base.Engine` and `Scores`.

    `max_batch` bounds the requests decoded at once, `memory_mb` the keys and values kept (least recently used
    sessions go first, and are computed again when needed; requests that do not fit wait). With `deterministic` every
    pass takes `max_batch` tokens, real or not, and each is attended by itself: then what is sampled, to the last bit,
    does not depend on what else there is to compute. With `packed` a CPU samples from reordered copies of the weights,
    which take as much memory again. `stop_ids` end a turn, as do a request's stop strings.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        deterministic: bool = False,
        max_batch: int = 64,
        memory_mb: int = 4096,
        packed: bool = True,
        stop_ids: Sequence[int] = (),
    ) -> None:
        use_layouts(model)
        self._inference = Inference(model, packed=packed)
        self._tokenizer = tokenizer
        self._deterministic = deterministic
        self._max_batch = max_batch
        self._memory = Memory(shape_of(model), memory_mb * 2**20)
        self._stop_ids = frozenset(stop_ids)
        self._constraints = Constraints(tokenizer, model.get_output_embeddings().weight.shape[0], self._stop_ids)
        self._window = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 2**20)
        self._trunk_layers = 0
        self._version = 0
        self._sessions: dict[str, Session] = {}
        self._groups: dict[str, Group] = {}
        self._running: list[Request] = []
        self._serial = itertools.count()
        self._clock = itertools.count(1)
        self._driver: asyncio.Task[None] | None = None
        self._loads: list[tuple[Callable[[], int], asyncio.Future[int]]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")  # the same one: it keeps its own OpenMP team
        self.stats: dict[str, float] = dict.fromkeys(STATS, 0.0)

    def open(self, share: str) -> str:
        name = f"{share}#{next(self._serial)}"
        self._sessions[name] = Session(share)
        return name

    def close(self, session: str) -> None:
        share = self._sessions.pop(session).share
        last = all(other.share != share for other in self._sessions.values())
        if last and not self._trunk_layers and share in self._groups:  # a trunk waits for the trainer
            self._groups.pop(share).close()

    async def generate(self, prompt_ids: I32, sampling: Sampling, session: str) -> Completion:
        self.stats["tokens_asked"] += len(prompt_ids)
        return await self._asked(prompt_ids, sampling, session, self._constraints.start(sampling))

    def window(self) -> int:
        """As of `engines.base.Scores`."""
        return self._window

    async def score(self, prompt_ids: I32, token_ids: I32, session: str) -> F32:
        """As of `engines.base.Scores`: the tokens are fed one by one like sampled ones, beside all that is sampled."""
        if len(token_ids) == 0:
            return np.zeros(0, np.float32)
        given = self._constraints.given(token_ids.tolist())
        self.stats["tokens_asked"] += len(prompt_ids) + len(token_ids)
        found = await self._asked(prompt_ids, Sampling(max_tokens=len(token_ids)), session, given)
        return found.logprobs

    async def _asked(
        self, prompt_ids: I32, sampling: Sampling, session: str, constraint: Constraint | Given | None
    ) -> Completion:
        if session not in self._sessions:
            raise EngineError(f"session {session!r} is not open")
        if len(prompt_ids) == 0:
            raise EngineError("the prompt is empty")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        own = self._sessions[session]
        request = Request(own, prompt_ids.tolist(), sampling, future, own.cursor.copy(), constraint)
        self._running.append(request)
        self._wake()
        try:
            return await future
        finally:
            self._leave(request)  # also when the caller was cancelled

    def keep_trunk(self, layers: int) -> None:
        """From now on keeps what goes into layer `layers`, and what finished groups know of it, until weights are
        published (0: no longer)."""
        self._trunk_layers = layers
        self._forget()
        self._memory = self._memory.for_shape(replace(self._memory.shape, trunk=layers > 0))

    @contextmanager
    def without_trunk(self) -> Iterator[None]:
        """Keeps no trunk for what is sampled inside: nobody will train on it."""
        layers = self._trunk_layers
        self.keep_trunk(0)
        try:
            yield
        finally:
            self.keep_trunk(layers)

    def trunk(self, share: str, token_ids: I32) -> Tensor:
        """What went into that layer for the first n of `token_ids` that a group knows, [n, H]."""
        cursor = Cursor()
        if share in self._groups and self._trunk_layers:
            self._groups[share].follow(cursor, token_ids.tolist())
        return self._memory.states(cursor.row, cursor.length, 1)

    def publish(self, version: int) -> None:
        """The weights have changed in place: what was computed with the old ones is dropped, and requests in
        progress go on from what they sampled."""
        self._version = version
        self._forget()
        self._inference.forget()

    async def update(self, load: Callable[[], int]) -> int:
        """Has `load` change the weights in place between two tokens, and publishes the version that it returns."""
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._loads.append((load, done))
        self._wake()
        return await done

    async def _load(self) -> None:
        """Loads the weights that wait for it. Who brought them is told what went wrong."""
        while self._loads:
            load, done = self._loads.pop(0)
            try:
                version = await asyncio.get_running_loop().run_in_executor(self._thread, load)
                self.publish(version)
            except Exception as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(version)

    def take_stats(self) -> dict[str, float]:
        """What was done since the last call: tokens and seconds."""
        taken, self.stats = self.stats, dict.fromkeys(STATS, 0.0)
        return taken

    def _forget(self, *, keep: bool = True) -> None:
        self._groups.clear()
        self._memory.clear(keep=keep)

    def _wake(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        """Steps for as long as there is something to decode, and new weights between two of them.

        Only the computing is done in a thread. A step knows the places it uses, so that sessions may close and
        weights be published while it goes on; places are taken again only between steps.
        """
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, int)  # a loop that ended in mid-step has left that step to finish
        while self._running or self._loads:
            await self._load()
            batch = self._running[: self._max_batch]
            if not batch:
                continue
            try:
                started = time.monotonic()
                step = self._plan(batch)
                await loop.run_in_executor(self._thread, self._step, step, self._version)
                self.stats["seconds"] += time.monotonic() - started
            except Exception as error:  # every request of the batch is told
                failed = failure(error)
                if failed is error:  # all get the same one, and none of them is its place
                    failed.add_note(f"in the engine, while {len(batch)} requests were sampled together")
                for request in batch:
                    self._leave(request)
                    if not request.future.done():
                        request.future.set_exception(failed)
                self._forget(keep=False)  # some places were taken and never filled, or not with numbers
                continue
            for request in batch:
                if request.finish is not None:
                    self._leave(request)
                    if not request.future.done():
                        request.future.set_result(request.completion())
            await asyncio.sleep(0)  # those who were answered may ask again before the next step

    def _leave(self, request: Request) -> None:
        if request in self._running:
            self._running.remove(request)

    def _plan(self, batch: Sequence[Request]) -> Step:
        """Rooms for the next tokens of each request, in the order in which they came; what is known costs nothing."""
        spans: list[Span] = []
        ready: list[Request] = []
        needed: set[Row] = set()
        left = self._max_batch if self._deterministic else PREFILL_TOKENS
        for request in batch:
            session, path = request.session, request.path
            if session.share not in self._groups:
                self._groups[session.share] = Group(self._memory, lean=not self._deterministic)
            cursor, clock = request.cursor, next(self._clock)
            self._groups[session.share].follow(cursor, path)
            begin, room = cursor.length, left if self._deterministic else max(1, left)
            if missing := path[begin : begin + room]:
                first = not spans and not ready  # one always goes on
                if not self._groups[session.share].extend(cursor, missing, needed, clock, must=first):
                    continue
                assert cursor.row is not None
                spans.append(Span(cursor.row, begin, cursor.length))
                left -= len(missing)
                self.stats["tokens_computed"] += len(missing)
                self.stats["tokens_rebuilt"] += session.computes(path, begin, cursor.length)
            if cursor.row is not None and cursor.length:
                needed |= cursor.row.use(clock)
            if cursor.length == len(path):
                ready.append(request)
        self.stats["evicted"] += self._memory.take_dropped()
        return Step(lay_out(spans), ready, self._max_batch if self._deterministic else 0)

    @torch.no_grad()
    def _step(self, step: Step, version: int) -> None:
        """One forward pass over what the requests still lack, then one token for each that lacks nothing."""
        if step.spans:
            device = self._memory.shape.device
            tokens, positions = step.tokens().to(device), step.positions().to(device)
            step.keep(self._inference.hidden(tokens, positions, step.layout, self._trunk_layers))
        if step.ready:
            self._sample(step, version)

    def _sample(self, step: Step, version: int) -> None:
        """One token for each request that is ready, from the hidden state at the end of its path."""
        hidden, where = step.hidden()
        logits = self._inference.logits(hidden)
        alike: dict[tuple[Sampling, bool], list[int]] = {}
        for i, request in enumerate(step.ready):
            alike.setdefault((plain(request.sampling), request.constraint is not None), []).append(i)
        for (sampling, _), members in alike.items():
            requests = [step.ready[i] for i in members]
            draws = [uniform(request.sampling.seed, request.sampled) for request in requests]
            rows = torch.tensor([where[i] for i in members], device=logits.device)
            masks = [request.constraint.allowed() for request in requests if request.constraint is not None]
            allowed = torch.from_numpy(np.stack(masks)).to(logits.device) if masks else None
            drawn = draw(logits, rows, sampling, draws, allowed)
            for request, (token, logprob, entropy) in zip(requests, drawn, strict=True):
                request.append(token, logprob, entropy, version)
                self._finish(request, token)
        self.stats["tokens_sampled"] += sum(not isinstance(request.constraint, Given) for request in step.ready)

    def _finish(self, request: Request, token: int) -> None:
        matched = request.constraint is not None and request.constraint.take(token)
        if isinstance(request.constraint, Given):
            request.finish = "stop" if matched else None  # a token that ends turns may stand amid what is asked after
        elif matched or token in self._stop_ids or self._stops(request):
            request.finish = "stop"
        elif request.sampled >= request.sampling.max_tokens:
            request.finish = "length"

    def _stops(self, request: Request) -> bool:
        """Whether the text ends in, or just went beyond, a stop string."""
        stops = request.sampling.stop
        if not stops:
            return False
        tail = 16 + max(len(stop.encode()) for stop in stops)  # a token is a byte at least
        text = self._tokenizer.decode(request.ids[-tail:])
        return any(stop in text for stop in stops)
