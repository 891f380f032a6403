"""Sampling in process from a transformers model: many sessions, one running batch, every prefix computed once.

Requests join the batch at every step and leave it when they are done; between its turns a session's keys and
values stay where they are; the sessions of one group share theirs for as long as their tokens agree. The
random numbers of a request depend on its own seed and the token's index alone.
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

from turnstile.engines.local.constraint import Constraint, Constraints, Given
from turnstile.engines.local.cpu.compiled import can_compute
from turnstile.engines.local.cpu.thread_pool import leave_torch_threads
from turnstile.engines.local.failures import failure
from turnstile.engines.local.inference import Inference
from turnstile.engines.local.kv_cache import Memory, shape_of
from turnstile.engines.local.plan import COUNTED, Planner
from turnstile.engines.local.requests import Request, Session
from turnstile.engines.local.sampling import draw, plain, uniform
from turnstile.engines.local.speculation import Speculator, digit_tokens
from turnstile.engines.local.step import Ready, Step
from turnstile.errors import ENGINE_NOTE, EngineError
from turnstile.models.attention import use_layouts
from turnstile.models.head import logits_at_once
from turnstile.types import F32, I32, Completion, Sampling

STATS = ("tokens_asked", "tokens_sampled", "seconds", *COUNTED)
"""What is counted: prompt tokens of the requests, tokens sampled, seconds of all steps, and what the planner counts."""


class TransformersEngine:
    """Obeys `engines.base.Engine` and `Scores`.

    `max_batch` bounds the requests decoded at once, `memory_mb` the keys and values kept (least recently used sessions
    go first, and are computed again when needed; requests that do not fit wait). With `deterministic` every pass takes
    `max_batch` tokens, real or not, and each is attended by itself: then what is sampled, to the last bit, does not
    depend on what else there is to compute. Otherwise up to `speculative_tokens` tokens that probably come next are
    computed along with what a request lacks, and kept as far as they are the ones that are drawn
    (`engines/local/speculation.py`). With `pack_weights` a CPU samples from reordered copies of the weights, which take
    as much memory again. `stop_ids` end a turn, as do a request's stop strings.
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
        self._constraints = Constraints(tokenizer, model.get_output_embeddings().weight.shape[0], self._stop_ids)
        self._window = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 2**20)
        self._planner = Planner(
            Memory(shape_of(model), memory_mb * 2**20),
            width=max_batch if deterministic else 0,
            drafts=Speculator(
                self._stop_ids, digit_tokens(tokenizer) if speculative_tokens and not deterministic else ()
            ),
            most=speculative_tokens,
            at_once=logits_at_once(model),
            window=self._window,
        )
        self._version = 0
        self._sessions: dict[str, Session] = {}
        self._running: list[Request] = []
        self._serial = itertools.count()
        self._driver: asyncio.Task[None] | None = None
        self._loads: list[tuple[Callable[[], int], asyncio.Future[int]]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")  # the same one: it keeps its own OpenMP team
        self._prepared = False  # whether kernels are compiled, if there are any
        self._counted: dict[str, float] = defaultdict(float)

    def open(self, share: str) -> str:
        name = f"{share}#{next(self._serial)}"
        self._sessions[name] = Session(share)
        return name

    def close(self, session: str) -> None:
        share = self._sessions.pop(session).share
        last = all(other.share != share for other in self._sessions.values())
        if last and not self._planner.trunk:  # a trunk waits for the trainer
            self._planner.close(share)

    async def generate(self, prompt_ids: I32, sampling: Sampling, session: str) -> Completion:
        self._counted["tokens_asked"] += len(prompt_ids)
        return await self._asked(prompt_ids, sampling, session, self._constraints.start(sampling))

    def window(self) -> int:
        """As of `engines.base.Scores`."""
        return self._window

    async def score(self, prompt_ids: I32, token_ids: I32, session: str) -> F32:
        """As of `engines.base.Scores`: the tokens are fed like sampled ones, beside all that is sampled; many at once,
        unless the engine is deterministic."""
        if len(token_ids) == 0:
            return np.zeros(0, np.float32)
        self._constraints.check(token_ids)
        given = self._constraints.given(token_ids)
        self._counted["tokens_asked"] += len(prompt_ids) + len(token_ids)
        found = await self._asked(prompt_ids, Sampling(max_tokens=len(token_ids)), session, given)
        return found.logprobs

    async def _asked(
        self, prompt_ids: I32, sampling: Sampling, session: str, constraint: Constraint | Given | None
    ) -> Completion:
        if session not in self._sessions:
            raise EngineError(f"session {session!r} is not open")
        if len(prompt_ids) == 0:
            raise EngineError("the prompt is empty")
        self._constraints.check(prompt_ids)  # in a pass that others share it would fail them all
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        own = self._sessions[session]
        request = Request(own, prompt_ids.tolist(), sampling, future, own.cursor.copy(), constraint)
        self._running.append(request)
        self._wake()
        try:
            return await future
        finally:
            self._leave(request)  # also when the caller was cancelled

    def keep_activations(self, layers: int) -> None:
        """From now on keeps what goes into layer `layers`, and what finished groups know of it, until weights are
        published (0: no longer)."""
        self._planner.keep_activations(layers)

    @contextmanager
    def without_activations(self) -> Iterator[None]:
        """Keeps no trunk for what is sampled inside: nobody will train on it."""
        layers = self._planner.trunk
        self.keep_activations(0)
        try:
            yield
        finally:
            self.keep_activations(layers)

    def trunk(self, share: str, token_ids: I32) -> Tensor:
        """What went into that layer for the first n of `token_ids` that a group knows, [n, H]."""
        return self._planner.states(share, token_ids.tolist() if self._planner.trunk else [], 1)

    def publish(self, version: int) -> None:
        """The weights have changed in place: what was computed with the old ones is dropped, and requests in
        progress go on from what they sampled."""
        self._version = version
        self._planner.forget()
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
        taken = {**dict.fromkeys(STATS, 0.0), **self._counted, **self._planner.counted}
        self._counted.clear()
        self._planner.counted.clear()
        return taken

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
            if batch := self._running[: self._max_batch]:
                await self._answer(batch)
                await asyncio.sleep(0)  # those who were answered may ask again before the next step
            if not self._running:
                await loop.run_in_executor(self._thread, leave_torch_threads)  # whoever computes now has the processors

    async def _answer(self, batch: Sequence[Request]) -> None:
        """One step for a batch; answers those whose turn is over."""
        try:
            started, loop = time.monotonic(), asyncio.get_running_loop()
            if not self._prepared:  # planning would have to wait for it, and with it all that goes on in this loop
                await loop.run_in_executor(self._thread, can_compute, self._planner.memory.shape.empty())
                self._prepared = True
            step = self._planner.plan(batch)
            leave_torch_threads()
            await loop.run_in_executor(self._thread, self._step, step, self._version)
            self._planner.settle(step, batch)
            self._counted["seconds"] += time.monotonic() - started
        except BaseException as error:  # every request of the batch is told
            self._planner.forget(keep=False)  # some places were taken and never filled, or not with numbers
            if not isinstance(error, Exception):
                raise
            failed = failure(error)
            if failed is error:  # all get the same one, and none of them is its place
                failed.add_note(f"{ENGINE_NOTE}while {len(batch)} requests were sampled together")
            for request in batch:
                self._leave(request)
                if not request.future.done():
                    request.future.set_exception(failed)
            return
        for request in batch:
            if request.finish is not None:
                self._leave(request)
                if not request.future.done():
                    request.future.set_result(request.completion())

    def _leave(self, request: Request) -> None:
        if request in self._running:
            self._running.remove(request)

    @torch.no_grad()
    def _step(self, step: Step, version: int) -> None:
        """One forward pass over what the requests still lack, then one token for each that lacks nothing."""
        if step.spans:
            device = self._planner.memory.shape.device
            tokens, positions = step.tokens().to(device), step.positions().to(device)
            step.keep(self._inference.hidden(tokens, positions, step.layout, step.trunk))
        if step.ready:
            self._sample(step, version)

    def _sample(self, step: Step, version: int) -> None:
        """One token for each request that is ready, from the hidden state at the end of its path."""
        hidden, wanted = step.hidden()
        logits = self._inference.logits(hidden)
        alike: dict[tuple[Sampling, bool], list[int]] = {}
        for i, (one, _, _) in enumerate(wanted):
            alike.setdefault((plain(one.request.sampling), one.request.constraint is not None), []).append(i)
        drawn: dict[tuple[Ready, int], tuple[int, float, float]] = {}
        forced: set[tuple[Ready, int]] = set()
        for (sampling, _), members in alike.items():
            chosen = [wanted[i] for i in members]
            draws = [uniform(one.request.sampling.seed, one.request.sampled + ahead) for one, ahead, _ in chosen]
            rows = torch.tensor([node for _, _, node in chosen], device=logits.device)
            own = logits
            if len(alike) > 1 and not step.width:  # with a width all is computed, whoever asks for what
                nodes, rows = rows.unique(return_inverse=True)
                own = logits[nodes]
            masks = [mask for one, ahead, _ in chosen if (mask := one.request.allowed(ahead)) is not None]
            if masks:
                forced |= {(one, ahead) for (one, ahead, _), mask in zip(chosen, masks, strict=True) if mask.sum() == 1}
            allowed = torch.from_numpy(np.stack(masks)).to(logits.device) if masks else None
            found = draw(own, rows, sampling, draws, allowed)
            drawn |= {(one, ahead): each for (one, ahead, _), each in zip(chosen, found, strict=True)}
        for one in step.ready:
            each = [(*drawn[one, ahead], (one, ahead) in forced) for ahead in range(1 + len(one.guesses))]
            self._take(one, each, version)

    def _take(self, ready: Ready, drawn: Sequence[tuple[int, float, float, bool]], version: int) -> None:
        """Adds to a request what was drawn for it (token, log-probability, entropy, whether there was no other), for as
        long as its guesses were right and it is not finished."""
        request = ready.request
        for (token, logprob, entropy, forced), guess in zip(drawn, [*ready.guesses, None], strict=True):
            request.append(token, logprob, entropy, version, forced=forced)
            self._finish(request, token)
            self._counted["tokens_sampled"] += not isinstance(request.constraint, Given)
            ready.sampled += 1
            if request.finish is not None or token != guess:
                break

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
        text = self._tokenizer.decode(request.last(tail))
        return any(stop in text for stop in stops)
