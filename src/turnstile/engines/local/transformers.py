"""In-process sampling from a transformers model: many sessions, one running batch, every prefix computed once.

Requests can join the batch at every step, and leave it when they are done. A session's keys and values stay cached
between its turns, and the sessions of one group share theirs as long as their tokens agree. The random numbers of a
request depend only on its own seed and the token's index.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from turnstile.engines.local.constraint import Constraint, ConstraintFactory, ScoredTokens
from turnstile.engines.local.cpu.compiled import can_compute
from turnstile.engines.local.cpu.thread_pool import release_torch_threads
from turnstile.engines.local.failures import as_engine_error
from turnstile.engines.local.inference import Inference
from turnstile.engines.local.kv_cache import KVCache, cache_shape_of
from turnstile.engines.local.plan import PLANNER_STATS, Planner
from turnstile.engines.local.requests import Request, Session
from turnstile.engines.local.sampling import distribution_of, draw, uniform
from turnstile.engines.local.speculation import Speculator, digit_tokens
from turnstile.engines.local.step import EngineStep, ReadyRequest
from turnstile.errors import ENGINE_NOTE, EngineError
from turnstile.models.attention import use_layouts
from turnstile.models.head import logits_at_once
from turnstile.types import F32, I32, Completion, Sampling

STATS = ("tokens_asked", "tokens_sampled", "seconds", *PLANNER_STATS)
"""Counters of the engine: prompt tokens of the requests, tokens sampled, seconds of all steps, and the planner's."""


class TransformersEngine:
    """In-process engine; implements `engines.base.Engine` and `ScoringEngine`.

    `max_batch` limits the requests decoded together, and `memory_mb` the keys and values kept: the least recently used
    sessions are evicted first and computed again when needed, and requests that do not fit wait. With `deterministic`,
    every pass takes `max_batch` tokens, padded if necessary, and each attends alone, so that samples do not depend, to
    the last bit, on what else is computed. Otherwise up to `speculative_tokens` draft tokens are computed along with a
    request's missing tokens, and kept up to the first that is not drawn (`engines/local/speculation.py`). With
    `pack_weights`, a CPU samples from reordered copies of the weights, which take as much memory again. `stop_ids` end
    a turn, as do a request's stop strings.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        deterministic: bool = False,
        max_batch: int = 64,
        memory_mb: int = 4096,
        pack_weights: bool = True,
        speculative_tokens: int = 32,
        stop_ids: Sequence[int] = (),
    ) -> None:
        use_layouts(model)
        self._inference = Inference(model, packed=pack_weights)
        self._tokenizer = tokenizer
        self._max_batch = max_batch
        self._stop_ids = frozenset(stop_ids)
        self._constraints = ConstraintFactory(tokenizer, model.get_output_embeddings().weight.shape[0], self._stop_ids)
        self._window = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 2**20)
        self._planner = Planner(
            KVCache(cache_shape_of(model), memory_mb * 2**20),
            width=max_batch if deterministic else 0,
            speculator=Speculator(
                self._stop_ids, digit_tokens(tokenizer) if speculative_tokens and not deterministic else ()
            ),
            max_drafts=speculative_tokens,
            max_logits=logits_at_once(model),
            window=self._window,
        )
        self._version = 0
        self._sessions: dict[str, Session] = {}
        self._running: list[Request] = []
        self._serial = itertools.count()
        self._driver: asyncio.Task[None] | None = None
        self._pending_loads: list[tuple[Callable[[], int], asyncio.Future[int]]] = []
        # Always the same thread, since each has an OpenMP thread pool of its own.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._prepared = False  # whether the kernels, if there are any, are compiled
        self._stats: dict[str, float] = defaultdict(float)

    def open(self, share: str) -> str:
        """Open a session and return its id."""
        name = f"{share}#{next(self._serial)}"
        self._sessions[name] = Session(share)
        return name

    def close(self, session: str) -> None:
        """Close a session. The last one of a share drops the share's cache, unless activations are kept."""
        share = self._sessions.pop(session).share
        last = all(other.share != share for other in self._sessions.values())
        if last and not self._planner.activation_layer:  # otherwise the trainer needs them
            self._planner.close(share)

    async def generate(self, prompt_ids: I32, sampling: Sampling, session: str) -> Completion:
        """Sample a completion; requests that run at the same time are batched."""
        self._stats["tokens_asked"] += len(prompt_ids)
        return await self._submit(prompt_ids, sampling, session, self._constraints.compile(sampling))

    def window(self) -> int:
        """Return the model's context length in tokens."""
        return self._window

    async def score(self, prompt_ids: I32, token_ids: I32, session: str) -> F32:
        """Return the log-probabilities f32[n] of `token_ids`, as `engines.base.ScoringEngine` describes.

        The tokens are fed like sampled ones, in the same batch, and many of them in one pass unless the engine is
        deterministic. Raises ConfigError for a token that is not in the vocabulary.
        """
        if len(token_ids) == 0:
            return np.zeros(0, np.float32)
        self._constraints.check(token_ids)
        scored_tokens = self._constraints.scored_tokens(token_ids)
        self._stats["tokens_asked"] += len(prompt_ids) + len(token_ids)
        completion = await self._submit(prompt_ids, Sampling(max_tokens=len(token_ids)), session, scored_tokens)
        return completion.logprobs

    async def _submit(
        self, prompt_ids: I32, sampling: Sampling, session: str, constraint: Constraint | ScoredTokens | None
    ) -> Completion:
        """Queue a request and return its completion."""
        if session not in self._sessions:
            raise EngineError(f"session {session!r} is not open")
        if len(prompt_ids) == 0:
            raise EngineError("the prompt is empty")
        self._constraints.check(prompt_ids)  # in a batch an unknown token would fail all requests
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        own = self._sessions[session]
        request = Request(own, prompt_ids.tolist(), sampling, future, own.prefix_position.copy(), constraint)
        self._running.append(request)
        self._wake()
        try:
            return await future
        finally:
            self._remove(request)  # also if the caller was cancelled

    def keep_activations(self, layers: int) -> None:
        """Keep the input of layer `layers` (0: of none), even of finished groups, until weights are published."""
        self._planner.keep_activations(layers)

    @contextmanager
    def without_activations(self) -> Iterator[None]:
        """Keep no activations of tokens sampled inside, which are never trained on. Drops those kept so far."""
        layers = self._planner.activation_layer
        self.keep_activations(0)
        try:
            yield
        finally:
            self.keep_activations(layers)

    def activations(self, share: str, token_ids: I32) -> Tensor:
        """Return the kept activations [n, H] of the first n of `token_ids`, as far as the group has computed them."""
        return self._planner.hidden_states(share, token_ids.tolist() if self._planner.activation_layer else [], 1)

    def publish(self, version: int) -> None:
        """Use weights that have changed in place, as version `version`.

        Cached values are dropped, and requests under way continue from the tokens that they have.
        """
        self._version = version
        self._planner.clear()
        self._inference.invalidate()

    async def update(self, load: Callable[[], int]) -> int:
        """Run `load`, which changes the weights in place, between two steps; publish and return its version.

        Raises the error of `load`, if any.
        """
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._pending_loads.append((load, future))
        self._wake()
        return await future

    async def _load_pending(self) -> None:
        """Run pending loads, and pass each result or error to its caller of `update`."""
        while self._pending_loads:
            load, future = self._pending_loads.pop(0)
            try:
                version = await asyncio.get_running_loop().run_in_executor(self._thread, load)
                self.publish(version)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(version)

    def take_stats(self) -> dict[str, float]:
        """Return the counters of `STATS` since the last call, by name."""
        taken = {**dict.fromkeys(STATS, 0.0), **self._stats, **self._planner.stats}
        self._stats.clear()
        self._planner.stats.clear()
        return taken

    def _wake(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        """Run steps while there are requests, and pending loads between steps.

        Only the computation runs in a thread. A step refers to the slots that it uses, so sessions may close and
        weights may be published meanwhile; slots are reassigned only between steps.
        """
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, int)  # wait for a step that an ended event loop left running
        while self._running or self._pending_loads:
            await self._load_pending()
            if batch := self._running[: self._max_batch]:
                await self._run_step(batch)
                await asyncio.sleep(0)  # answered sessions may submit their next turn before the next step
            if not self._running:
                # The trainer computes next, and gets all processors.
                await loop.run_in_executor(self._thread, release_torch_threads)

    async def _run_step(self, batch: Sequence[Request]) -> None:
        """Run one step for a batch, and resolve the requests whose turn is over.

        An error goes to every request of the batch.
        """
        try:
            started, loop = time.monotonic(), asyncio.get_running_loop()
            if not self._prepared:  # compiled in the thread: planning would block the event loop
                await loop.run_in_executor(self._thread, can_compute, self._planner.cache.shape.empty())
                self._prepared = True
            step = self._planner.plan(batch)
            release_torch_threads()
            await loop.run_in_executor(self._thread, self._step, step, self._version)
            self._planner.finish(step, batch)
            self._stats["seconds"] += time.monotonic() - started
        except BaseException as error:  # passed to every request of the batch
            self._planner.clear(keep=False)  # some slots were reserved and never filled, or filled with NaN
            if not isinstance(error, Exception):
                raise
            wrapped = as_engine_error(error)
            if wrapped is error:  # no single request caused it
                wrapped.add_note(f"{ENGINE_NOTE}while {len(batch)} requests were sampled together")
            for request in batch:
                self._remove(request)
                if not request.future.done():
                    request.future.set_exception(wrapped)
            return
        for request in batch:
            if request.finish is not None:
                self._remove(request)
                if not request.future.done():
                    request.future.set_result(request.completion())

    def _remove(self, request: Request) -> None:
        if request in self._running:
            self._running.remove(request)

    @torch.no_grad()
    def _step(self, step: EngineStep, version: int) -> None:
        """Run the forward pass over the missing tokens, then sample for the ready requests."""
        if step.spans:
            device = self._planner.cache.shape.device
            tokens, positions = step.tokens().to(device), step.positions().to(device)
            step.store_hidden(self._inference.hidden(tokens, positions, step.layout, step.activation_layer))
        if step.ready:
            self._sample(step, version)

    def _sample(self, step: EngineStep, version: int) -> None:
        """Sample tokens for the ready requests from their last hidden states.

        Requests with the same distribution are drawn together.
        """
        hidden, queries = step.hidden()
        logits = self._inference.logits(hidden)
        by_distribution: dict[tuple[Sampling, bool], list[int]] = {}
        for i, (one, _, _) in enumerate(queries):
            key = distribution_of(one.request.sampling), one.request.constraint is not None
            by_distribution.setdefault(key, []).append(i)
        drawn: dict[tuple[ReadyRequest, int], tuple[int, float, float]] = {}
        forced: set[tuple[ReadyRequest, int]] = set()
        for (sampling, _), indices in by_distribution.items():
            chosen = [queries[i] for i in indices]
            draws = [uniform(one.request.sampling.seed, one.request.sampled + offset) for one, offset, _ in chosen]
            rows = torch.tensor([index for _, _, index in chosen], device=logits.device)
            own_logits = logits
            if len(by_distribution) > 1 and not step.width:  # with a width the shapes must not depend on the batch
                unique, rows = rows.unique(return_inverse=True)
                own_logits = logits[unique]
            masks = [mask for one, offset, _ in chosen if (mask := one.request.allowed(offset)) is not None]
            if masks:
                forced |= {each[:2] for each, mask in zip(chosen, masks, strict=True) if mask.sum() == 1}
            allowed = torch.from_numpy(np.stack(masks)).to(logits.device) if masks else None
            tokens = draw(own_logits, rows, sampling, draws, allowed)
            drawn |= {(one, offset): each for (one, offset, _), each in zip(chosen, tokens, strict=True)}
        for one in step.ready:
            each = [(*drawn[one, offset], (one, offset) in forced) for offset in range(1 + len(one.speculated))]
            self._append_drawn(one, each, version)

    def _append_drawn(self, ready: ReadyRequest, drawn: Sequence[tuple[int, float, float, bool]], version: int) -> None:
        """Append drawn tokens to a request until one differs from its draft or the request is finished.

        Each is (token, log-probability, entropy, whether the constraint allowed no other).
        """
        request = ready.request
        for (token, logprob, entropy, forced), speculated_token in zip(drawn, [*ready.speculated, None], strict=True):
            request.append(token, logprob, entropy, version, forced=forced)
            self._update_finish(request, token)
            self._stats["tokens_sampled"] += not isinstance(request.constraint, ScoredTokens)
            ready.sampled += 1
            if request.finish is not None or token != speculated_token:
                break

    def _update_finish(self, request: Request, token: int) -> None:
        constraint_done = request.constraint is not None and request.constraint.advance(token)
        if isinstance(request.constraint, ScoredTokens):
            request.finish = "stop" if constraint_done else None  # scored tokens may contain stop tokens
        elif constraint_done or token in self._stop_ids or self._matches_stop(request):
            request.finish = "stop"
        elif request.sampled >= request.sampling.max_tokens:
            request.finish = "length"

    def _matches_stop(self, request: Request) -> bool:
        """Return whether the last sampled tokens contain a stop string."""
        stops = request.sampling.stop
        if not stops:
            return False
        tail = 16 + max(len(stop.encode()) for stop in stops)  # a token has at least one byte
        text = self._tokenizer.decode(request.last_sampled(tail))
        return any(stop in text for stop in stops)
