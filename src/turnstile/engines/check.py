"""Does an engine keep its promises? For authors of engines: run it in a test and expect an empty list."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from turnstile.engines.base import Engine, Scores
from turnstile.errors import EngineError
from turnstile.types import I32, Completion, Sampling


async def check_engine(
    engine: Engine,
    prompts: Sequence[I32],
    *,
    decode: Callable[[I32], str] | None = None,
    max_tokens: int = 8,
    atol: float = 1e-3,
) -> list[str]:
    """Samples from `prompts` in several ways and returns what is wrong, a line each.

    Checked are: arrays of equal length with finite log-probabilities not above 0; the token limit and how it
    is told; that the same prompt and seed give the same tokens and log-probabilities (to `atol`), alone, all
    prompts at once, and as a session's second turn; that a distribution cut to one token has
    log-probability 0; stop strings, with `decode` (ids -> text); where the engine can tell how likely given tokens are
    (`Scores`), that those it sampled are as likely as it said; and that a session which is not open is an EngineError.
    Engines that only repeat bit by bit in some mode are checked in that mode.
    """
    sampling = Sampling(max_tokens=max_tokens, seed=1)
    problems: list[str] = []
    alone: list[Completion] = []
    for place, prompt in enumerate(prompts):
        found = await _once(engine, prompt, replace(sampling, seed=place))
        alone.append(found)
        problems += _shape_problems(found, max_tokens)
    problems += await _repeat_problems(engine, prompts, sampling, alone, atol)
    problems += await _session_problems(engine, prompts[0], sampling, atol)
    greedy = await _once(engine, prompts[0], replace(sampling, top_k=1))
    if np.any(np.abs(greedy.logprobs) > atol):
        problems.append("with top_k = 1 the log-probabilities are not 0: they are not of the distribution sampled from")
    short = await _once(engine, prompts[0], replace(sampling, max_tokens=1))
    if len(short.token_ids) != 1:
        problems.append(f"with max_tokens = 1 there are {len(short.token_ids)} tokens")
    if decode is not None:
        for place, prompt in enumerate(prompts):
            problems += await _stop_problems(engine, prompt, replace(sampling, seed=place), alone[place], decode)
    if isinstance(engine, Scores):
        problems += await _score_problems(engine, prompts, alone, atol)
    problems += await _closed_problems(engine, prompts[0], sampling)
    return list(dict.fromkeys(problems))


async def _once(engine: Engine, prompt: I32, sampling: Sampling, share: str = "check") -> Completion:
    session = engine.open(share)
    try:
        return await engine.generate(prompt, sampling, session)
    finally:
        engine.close(session)


def _shape_problems(found: Completion, max_tokens: int) -> Iterator[str]:
    if len(found.token_ids) == 0:
        yield "a completion has no token at all"
    if len(found.token_ids) > max_tokens:
        yield f"a completion of {len(found.token_ids)} tokens exceeds max_tokens = {max_tokens}"
    if found.finish == "length" and len(found.token_ids) != max_tokens:
        yield f"finish is 'length' after {len(found.token_ids)} of {max_tokens} tokens"
    if not np.all(np.isfinite(found.logprobs)) or np.any(found.logprobs > 0):
        yield f"log-probabilities must be finite and at most 0: {found.logprobs.tolist()}"
    if found.entropies is not None and not np.all(found.entropies >= 0):
        yield f"entropies must not be negative: {found.entropies.tolist()}"
    if np.any(np.diff(found.versions) < 0):
        yield f"versions go back within a completion: {found.versions.tolist()}"


async def _repeat_problems(
    engine: Engine, prompts: Sequence[I32], sampling: Sampling, alone: Sequence[Completion], atol: float
) -> list[str]:
    """The same requests again, one by one and then all at once in one share."""
    seeded = [replace(sampling, seed=place) for place in range(len(prompts))]
    again = [await _once(engine, prompt, each) for prompt, each in zip(prompts, seeded, strict=True)]
    jobs = [_once(engine, prompt, each) for prompt, each in zip(prompts, seeded, strict=True)]
    together = await asyncio.gather(*jobs)
    problems = []
    if not all(_same(one, other, atol) for one, other in zip(alone, again, strict=True)):
        problems.append("the same prompt and seed gave another completion; draw token i by (seed, i) alone")
    elif not all(_same(one, other, atol) for one, other in zip(alone, together, strict=True)):
        problems.append("requests made at the same time change each other's completions")
    return problems


async def _session_problems(engine: Engine, prompt: I32, sampling: Sampling, atol: float) -> list[str]:
    """A second turn in a session against the same prompt in a new one; then another prompt in that session."""
    session = engine.open("check")
    try:
        first = await engine.generate(prompt, sampling, session)
        longer = np.concatenate([prompt, first.token_ids, prompt])
        second = await engine.generate(longer, sampling, session)
        back = await engine.generate(prompt, sampling, session)
    finally:
        engine.close(session)
    problems = []
    if not _same(second, await _once(engine, longer, sampling, "other"), atol):
        problems.append("a session's second turn differs from the same prompt in a new session")
    if not _same(back, first, atol):
        problems.append("a session whose context was rewritten still answers to the old one")
    return problems


async def _stop_problems(
    engine: Engine, prompt: I32, sampling: Sampling, free: Completion, decode: Callable[[I32], str]
) -> list[str]:
    """Each character of a free completion as the stop string: it must be cut behind the first token with it."""
    ids, problems = free.token_ids, []
    for stop in dict.fromkeys(decode(ids)):
        length = next(n for n in range(1, len(ids) + 1) if stop in decode(ids[:n]))
        found = await _once(engine, prompt, replace(sampling, stop=(stop,)))
        if not np.array_equal(found.token_ids, ids[:length]) or found.finish != "stop":
            problems.append(
                f"stop string {stop!r} must end the turn behind the token that holds it ({length} tokens, 'stop'), "
                f"got {len(found.token_ids)} tokens, {found.finish!r}"
            )
    return problems


async def _score_problems(
    engine: Scores, prompts: Sequence[I32], alone: Sequence[Completion], atol: float
) -> list[str]:
    """What was sampled, asked after."""
    assert isinstance(engine, Engine)
    for prompt, found in zip(prompts, alone, strict=True):
        session = engine.open("check")
        try:
            logprobs = await engine.score(prompt, found.token_ids, session)
        finally:
            engine.close(session)
        if logprobs.shape != found.logprobs.shape or not np.allclose(logprobs, found.logprobs, rtol=0, atol=atol):
            return ["score gives tokens another log-probability than generate gave them when it sampled them"]
    return []


async def _closed_problems(engine: Engine, prompt: I32, sampling: Sampling) -> list[str]:
    session = engine.open("check")
    engine.close(session)
    try:
        await engine.generate(prompt, sampling, session)
    except EngineError:
        return []
    return ["generate in a closed session must raise EngineError"]


def _same(one: Completion, other: Completion, atol: float) -> bool:
    return (
        np.array_equal(one.token_ids, other.token_ids)
        and one.finish == other.finish
        and np.allclose(one.logprobs, other.logprobs, rtol=0, atol=atol)
    )
