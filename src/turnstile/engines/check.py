"""Check that an engine follows the `Engine` protocol. Authors of engines run this in a test and expect []."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from turnstile.engines.base import Engine, ScoringEngine
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
    """Sample from `prompts` in several ways and return the problems found, one line each.

    Checks that completions are not empty, their log-probabilities are finite and at most 0, their entropies are not
    negative and their versions do not decrease; that the token limit holds and is reported; that the same prompt and
    seed give the same tokens and log-probabilities (to `atol`) one by one, all at once, and as a later turn of a
    session; that a distribution cut to one token has log-probability 0; that stop strings end a turn, if `decode` (ids
    -> text) is given; that a `ScoringEngine` scores its own samples as it reported them; and that a session that is not
    open raises EngineError. If an engine is bitwise reproducible only in some mode, check it in that mode.
    """
    sampling = Sampling(max_tokens=max_tokens, seed=1)
    problems: list[str] = []
    baseline: list[Completion] = []
    for index, prompt in enumerate(prompts):
        completion = await _sample_once(engine, prompt, replace(sampling, seed=index))
        baseline.append(completion)
        problems += _shape_problems(completion, max_tokens)
    problems += await _repeat_problems(engine, prompts, sampling, baseline, atol)
    problems += await _session_problems(engine, prompts[0], sampling, atol)
    greedy = await _sample_once(engine, prompts[0], replace(sampling, top_k=1))
    if np.any(np.abs(greedy.logprobs) > atol):
        problems.append("with top_k = 1 the log-probabilities are not 0: return those of the truncated distribution")
    short = await _sample_once(engine, prompts[0], replace(sampling, max_tokens=1))
    if len(short.token_ids) != 1:
        problems.append(f"with max_tokens = 1 there are {len(short.token_ids)} tokens")
    if decode is not None:
        for index, prompt in enumerate(prompts):
            problems += await _stop_problems(engine, prompt, replace(sampling, seed=index), baseline[index], decode)
    if isinstance(engine, ScoringEngine):
        problems += await _score_problems(engine, prompts, baseline, atol)
    problems += await _closed_problems(engine, prompts[0], sampling)
    return list(dict.fromkeys(problems))


async def _sample_once(engine: Engine, prompt: I32, sampling: Sampling, share: str = "check") -> Completion:
    session = engine.open(share)
    try:
        return await engine.generate(prompt, sampling, session)
    finally:
        engine.close(session)


def _shape_problems(completion: Completion, max_tokens: int) -> Iterator[str]:
    if len(completion.token_ids) == 0:
        yield "a completion has no token at all"
    if len(completion.token_ids) > max_tokens:
        yield f"a completion of {len(completion.token_ids)} tokens exceeds max_tokens = {max_tokens}"
    if completion.finish == "length" and len(completion.token_ids) != max_tokens:
        yield f"finish is 'length' after {len(completion.token_ids)} of {max_tokens} tokens"
    if not np.all(np.isfinite(completion.logprobs)) or np.any(completion.logprobs > 0):
        yield f"log-probabilities must be finite and at most 0: {completion.logprobs.tolist()}"
    if completion.entropies is not None and not np.all(completion.entropies >= 0):
        yield f"entropies must not be negative: {completion.entropies.tolist()}"
    if np.any(np.diff(completion.versions) < 0):
        yield f"versions go back within a completion: {completion.versions.tolist()}"


async def _repeat_problems(
    engine: Engine, prompts: Sequence[I32], sampling: Sampling, baseline: Sequence[Completion], atol: float
) -> list[str]:
    """Return the problems found by sampling the same requests again, one by one, then all at once in one share."""
    seeded = [replace(sampling, seed=index) for index in range(len(prompts))]
    repeated = [await _sample_once(engine, prompt, each) for prompt, each in zip(prompts, seeded, strict=True)]
    requests = [_sample_once(engine, prompt, each) for prompt, each in zip(prompts, seeded, strict=True)]
    concurrent = await asyncio.gather(*requests)
    problems = []
    if not all(_same_completion(left, right, atol) for left, right in zip(baseline, repeated, strict=True)):
        problems.append("the same prompt and seed gave another completion; draw token i by (seed, i) alone")
    elif not all(_same_completion(left, right, atol) for left, right in zip(baseline, concurrent, strict=True)):
        problems.append("requests made at the same time change each other's completions")
    return problems


async def _session_problems(engine: Engine, prompt: I32, sampling: Sampling, atol: float) -> list[str]:
    """Return the problems found in a session's second turn and in its return to the first prompt."""
    session = engine.open("check")
    try:
        first = await engine.generate(prompt, sampling, session)
        longer = np.concatenate([prompt, first.token_ids, prompt])
        second = await engine.generate(longer, sampling, session)
        first_again = await engine.generate(prompt, sampling, session)
    finally:
        engine.close(session)
    problems = []
    if not _same_completion(second, await _sample_once(engine, longer, sampling, "other"), atol):
        problems.append("a session's second turn differs from the same prompt in a new session")
    if not _same_completion(first_again, first, atol):
        problems.append("a session whose context was rewritten still answers to the old one")
    return problems


async def _stop_problems(
    engine: Engine, prompt: I32, sampling: Sampling, unstopped: Completion, decode: Callable[[I32], str]
) -> list[str]:
    """Return the problems found by using each character of an unstopped completion as the stop string."""
    ids, problems = unstopped.token_ids, []
    for stop in dict.fromkeys(decode(ids)):
        length = next(n for n in range(1, len(ids) + 1) if stop in decode(ids[:n]))
        completion = await _sample_once(engine, prompt, replace(sampling, stop=(stop,)))
        if not np.array_equal(completion.token_ids, ids[:length]) or completion.finish != "stop":
            problems.append(
                f"stop string {stop!r} must end the turn behind the token that holds it ({length} tokens, 'stop'), "
                f"got {len(completion.token_ids)} tokens, {completion.finish!r}"
            )
    return problems


async def _score_problems(
    engine: ScoringEngine, prompts: Sequence[I32], baseline: Sequence[Completion], atol: float
) -> list[str]:
    """Return the problems found by comparing scores of sampled tokens with the log-probabilities from `generate`."""
    assert isinstance(engine, Engine)
    for prompt, completion in zip(prompts, baseline, strict=True):
        session = engine.open("check")
        try:
            logprobs = await engine.score(prompt, completion.token_ids, session)
        finally:
            engine.close(session)
        if logprobs.shape != completion.logprobs.shape or not np.allclose(
            logprobs, completion.logprobs, rtol=0, atol=atol
        ):
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


def _same_completion(left: Completion, right: Completion, atol: float) -> bool:
    return (
        np.array_equal(left.token_ids, right.token_ids)
        and left.finish == right.finish
        and np.allclose(left.logprobs, right.logprobs, rtol=0, atol=atol)
    )
