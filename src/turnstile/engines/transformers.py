"""Sampling in process from a transformers model: many sessions, one running batch, every prefix computed once.

Requests join the batch at every step and leave it when they are done; between its turns a session's keys and
values stay where they are; the sessions of one group share theirs for as long as their tokens agree. The
random numbers of a request depend on its own seed and the token's index alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from turnstile.engines.pool import Part, Pool, PoolLayout, Shape
from turnstile.errors import EngineError
from turnstile.models.attention import forward_hidden, use_layouts
from turnstile.models.logprobs import project, truncate
from turnstile.models.packed import PackedLinears
from turnstile.models.trunk import captured
from turnstile.types import I32, Completion, Finish, Sampling

PREFILL_TOKENS = 512
"""Prompt tokens computed in one step, so that a long prompt does not hold up those that decode."""


@dataclass(slots=True, eq=False)
class _Request:
    share: str
    serial: int  # of the session
    prompt: list[int]
    sampling: Sampling
    future: asyncio.Future[Completion]
    started: float
    pending: list[int] = field(default_factory=list)  # tokens not in the pool yet
    slots: list[int] = field(default_factory=list)  # the path so far
    pool: Pool | None = None  # that the slots are of
    ids: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def order(self) -> tuple[str, int]:
        return self.share, self.serial

    def enter(self, pool: Pool) -> None:
        """Begins at the root of a pool; where it was in another one is gone, what it sampled stays."""
        self.pool = pool
        self.pending = self.prompt + self.ids
        self.slots = []


class TransformersEngine:
    """Obeys `engines.base.Engine`.

    `max_batch` bounds the requests decoded at once, `memory_mb` the keys and values kept (least recently used
    groups go first, and are computed again when needed). With `deterministic` a step starts only when every
    open session waits for tokens, in a fixed order: what is sampled no longer depends on how long tools took,
    and costs waiting for the slowest of them. With `packed` a CPU samples from reordered copies of the weights,
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
        self._model = model
        self._tokenizer = tokenizer
        self._deterministic = deterministic
        self._max_batch = max_batch
        self._memory = memory_mb * 2**20
        self._packed = PackedLinears(model if packed else nn.ModuleList())
        self._stop_ids = frozenset(stop_ids)
        self._trunk_layers = 0
        self._shape = _shape(model)
        self._version = 0
        self._sessions: dict[str, str] = {}  # session -> share
        self._pools: dict[str, Pool] = {}
        self._running: list[_Request] = []
        self._serial = itertools.count()
        self._clock = itertools.count(1)
        self._driver: asyncio.Task[None] | None = None
        self.stats: dict[str, float] = dict.fromkeys(STATS, 0.0)

    def open(self, share: str) -> str:
        session = f"{share}#{next(self._serial)}"
        self._sessions[session] = share
        return session

    def close(self, session: str) -> None:
        share = self._sessions.pop(session)
        if share not in self._sessions.values() and not self._trunk_layers:  # a trunk waits for the trainer
            self._pools.pop(share, None)
        self._wake()  # the others may have waited for this one

    async def generate(self, prompt_ids: I32, sampling: Sampling, session: str) -> Completion:
        if session not in self._sessions:
            raise EngineError(f"session {session!r} is not open")
        if len(prompt_ids) == 0:
            raise EngineError("the prompt is empty")
        request = _Request(
            share=self._sessions[session],
            serial=int(session.rpartition("#")[2]),
            prompt=prompt_ids.tolist(),
            sampling=sampling,
            future=asyncio.get_running_loop().create_future(),
            started=time.monotonic(),
        )
        self.stats["tokens_asked"] += len(prompt_ids)
        self._running.append(request)
        self._wake()
        try:
            return await request.future
        finally:
            self._leave(request)  # also when the caller was cancelled

    def keep_trunk(self, layers: int) -> None:
        """From now on keeps what goes into layer `layers`, and the pools of finished groups with it, until
        weights are published (0: no longer)."""
        self._trunk_layers = layers
        self._shape = replace(self._shape, trunk=layers > 0)
        self._pools.clear()

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
        """What went into that layer for the first n of `token_ids` that a group's pool knows, [n, H]."""
        slots: list[int] = []
        pool = self._pools.get(share)
        if pool is None or not self._trunk_layers:
            return torch.empty(0, self._shape.hidden, dtype=self._shape.dtype, device=self._shape.device)
        pool.walk(token_ids.tolist(), slots)
        return pool.trunk(slots)

    def publish(self, version: int) -> None:
        """The weights have changed in place: what was computed with the old ones is dropped, and requests in
        progress go on from what they sampled."""
        self._version = version
        self._pools.clear()
        self._packed.forget()

    def take_stats(self) -> dict[str, float]:
        """What was done since the last call: tokens and seconds."""
        taken, self.stats = self.stats, dict.fromkeys(STATS, 0.0)
        return taken

    def _wake(self) -> None:
        if self._running and (self._driver is None or self._driver.done()):
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        """Steps for as long as there is something to decode.

        Only the computing is done in a thread. A step holds on to the pools it uses, so that sessions may close
        and weights be published while it goes on.
        """
        while batch := self._next_batch():
            try:
                started = time.monotonic()
                self._evict(batch)
                parts = self._plan(batch)
                await asyncio.to_thread(self._step, batch, parts, self._version)
                self.stats["seconds"] += time.monotonic() - started
            except Exception as error:  # every request of the batch is told
                failed = _failure(error)
                if failed is error:  # all get the same one, and none of them is its place
                    failed.add_note(f"in the engine, while {len(batch)} requests were sampled together")
                for request in batch:
                    self._leave(request)
                    if not request.future.done():
                        request.future.set_exception(failed)
                self._pools.clear()  # some slots were taken and never filled
                continue
            for request in batch:
                if request.finish is not None:
                    self._leave(request)
                    if not request.future.done():
                        request.future.set_result(self._completion(request))
            await asyncio.sleep(0)  # those who were answered may ask again before the next step

    def _leave(self, request: _Request) -> None:
        if request in self._running:
            self._running.remove(request)

    def _next_batch(self) -> list[_Request]:
        if self._deterministic:
            if len(self._running) < len(self._sessions):
                return []
            return sorted(self._running, key=lambda request: request.order)[: self._max_batch]
        return self._running[: self._max_batch]

    @torch.no_grad()
    def _step(self, batch: Sequence[_Request], parts: Sequence[Part], version: int) -> None:
        """One forward pass over what the requests still lack, then one token for each that lacks nothing."""
        with self._packed.used():
            self._compute(parts)
            ready = [request for request in batch if not request.pending]
            if ready:
                self._sample(ready, version)

    def _compute(self, parts: Sequence[Part]) -> None:
        """Keys, values and hidden states of the parts' tokens."""
        if not parts:
            return
        tokens = torch.tensor([t for part in parts for t in part.tokens], device=self._shape.device)
        positions = torch.tensor([p for part in parts for p in part.positions], device=self._shape.device)
        with captured(self._model, self._trunk_layers) as trunk:
            hidden = forward_hidden(self._model, tokens, positions, PoolLayout(parts))
        for part in parts:
            span = slice(part.at, part.at + len(part.tokens))
            part.pool.keep_hidden(part.begin, *(state[span] for state in (hidden, *trunk)))
        self.stats["tokens_computed"] += len(tokens)

    def _plan(self, batch: Sequence[_Request]) -> list[Part]:
        """Slots for the next tokens of each request, by pool; a history that a pool knows costs nothing."""
        parts: dict[str, Part] = {}
        budget = PREFILL_TOKENS
        for request in sorted(batch, key=lambda r: r.order):
            share = request.share
            if share not in self._pools:
                self._pools[share] = Pool(self._shape)
            pool = self._pools[share]
            pool.last_use = next(self._clock)
            if request.pool is not pool:  # it is new, or its pool was dropped
                request.enter(pool)
            known = pool.walk(request.pending, request.slots)
            del request.pending[:known]
            take = request.pending[: max(1, budget)]
            if not take:
                continue
            budget -= len(take)
            part = parts.setdefault(share, Part(pool, pool.used, 0))
            depth = len(request.slots)
            pool.grow(take, request.slots)
            path = np.array(request.slots)
            for i, token in enumerate(take):
                part.tokens.append(token)
                part.positions.append(depth + i)
                part.paths.append(path[: depth + i + 1])
            del request.pending[: len(take)]
        at = 0
        for part in parts.values():
            part.at = at
            at += len(part.tokens)
            part.seal()
        return list(parts.values())

    def _sample(self, ready: Sequence[_Request], version: int) -> None:
        """One token for each request, from the hidden state at the end of its path."""
        nodes: dict[tuple[str, int], int] = {}  # requests at the same place share one row of logits
        where = [nodes.setdefault((r.share, r.slots[-1]), len(nodes)) for r in ready]
        pools = {r.share: r.pool for r in ready if r.pool is not None}
        hidden = torch.cat([pools[share].hidden([slot]) for share, slot in nodes])
        logits = project(self._model, hidden)
        settings: dict[Sampling, list[int]] = {}
        for i, request in enumerate(ready):
            settings.setdefault(_plain(request.sampling), []).append(i)
        for sampling, members in settings.items():
            draws = [_uniform(ready[i].sampling.seed, len(ready[i].ids)) for i in members]
            rows = torch.tensor([where[i] for i in members], device=logits.device)
            for i, drawn in zip(members, _draw(logits, rows, sampling, draws), strict=True):
                self._append(ready[i], version, *drawn)

    def _append(self, request: _Request, version: int, token: int, logprob: float, entropy: float) -> None:
        request.ids.append(token)
        request.versions.append(version)
        request.logprobs.append(logprob)
        request.entropies.append(entropy)
        self.stats["tokens_sampled"] += 1
        if token in self._stop_ids or self._ends(request):
            request.finish = "stop"
        elif len(request.ids) >= request.sampling.max_tokens:
            request.finish = "length"
        else:
            request.pending.append(token)

    def _ends(self, request: _Request) -> bool:
        if not request.sampling.stop:
            return False
        text = self._tokenizer.decode(request.ids[-16:])
        return any(stop in text for stop in request.sampling.stop)

    def _completion(self, request: _Request) -> Completion:
        return Completion(
            token_ids=np.array(request.ids, np.int32),
            logprobs=np.array(request.logprobs, np.float32),
            entropies=np.array(request.entropies, np.float32),
            versions=np.array(request.versions, np.int32),
            sampling=request.sampling,
            finish=request.finish or "length",
            seconds=time.monotonic() - request.started,
        )

    def _evict(self, batch: Sequence[_Request]) -> None:
        """Drops the least recently used pools that this batch does not need, down to the memory allowed."""
        needed = {request.share for request in (*self._running, *batch)}
        idle = sorted((pool.last_use, share) for share, pool in self._pools.items() if share not in needed)
        total = sum(pool.bytes for pool in self._pools.values())
        for _, share in idle:
            if total <= self._memory:
                return
            total -= self._pools.pop(share).bytes
            self.stats["evicted"] += 1


STATS = ("tokens_asked", "tokens_computed", "tokens_sampled", "evicted", "seconds")


def _shape(model: PreTrainedModel) -> Shape:
    config: Any = model.config.get_text_config()
    heads = config.num_attention_heads
    return Shape(
        layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden=config.hidden_size,
        dtype=model.dtype,
        device=model.device,
    )


FAILURES = (
    torch.OutOfMemoryError,
    getattr(torch, "AcceleratorError", torch.OutOfMemoryError),  # not in every version
    MemoryError,
    FloatingPointError,
    OSError,
)
DEVICE = re.compile(r"\b(CUDA|cuDNN|HIP|MPS)\b.* (error|out of memory)\b|\bDefaultCPUAllocator\b")
"""What torch's plain RuntimeErrors say that are a device's: of the libraries it calls, and of the CPU's memory."""


def _failure(error: Exception) -> Exception:
    """What those who wait are told. What the device or the numbers did is the engine's failure, and may be tried
    again; anything else, like shapes that do not fit, is a fault of the program and stays what it is."""
    device = type(error) is RuntimeError and DEVICE.search(str(error))
    if not device and not isinstance(error, FAILURES):
        return error
    failed = EngineError(f"sampling failed: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


def _plain(sampling: Sampling) -> Sampling:
    """What decides the distribution: requests that agree on it are drawn together."""
    return Sampling(temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p)


def _uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on (seed, index) alone."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53


def _draw(logits: Tensor, rows: Tensor, sampling: Sampling, draws: Sequence[float]) -> list[tuple[int, float, float]]:
    """(token, log-probability, entropy) for each draw, out of row `rows[i]` of logits [R, V], by inversion."""
    if sampling.temperature == 0:
        best = logits.argmax(dim=-1)[rows]
        return [(int(token), 0.0, 0.0) for token in best.tolist()]
    logp = truncate(logits / sampling.temperature, sampling).log_softmax(dim=-1)
    p = logp.exp()
    entropy = -(p * logp.clamp(min=-1e4)).sum(dim=-1)
    cumulative = p.cumsum(dim=-1)
    total = cumulative[rows, -1]
    if not bool(total.isfinite().all()):
        raise FloatingPointError("the model gave logits that are not finite")
    target = torch.tensor(draws, dtype=p.dtype, device=p.device) * total
    target = target.minimum(total.nextafter(torch.zeros_like(total)))  # a draw may round up to 1: no token is there
    tokens = torch.searchsorted(cumulative[rows], target[:, None], right=True)[:, 0]
    chosen = logp[rows, tokens]
    return list(zip(tokens.tolist(), chosen.tolist(), entropy[rows].tolist(), strict=True))
