"""Drafts of the next tokens: what they are learnt from, and that only speed depends on them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from helpers import tiny_llama
from modelserver import tiny_engine
from turnstile.engines.local import speculation as speculation
from turnstile.engines.local.layout import SHORT_SPAN
from turnstile.engines.local.speculation import MIN_LIKELIHOOD, PRIOR, Draft, Speculator, digit_tokens
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.types import I32, Completion, Sampling

VOCABULARY = 40


def speculated(speculator: Speculator, path: list[int], most: int) -> list[int]:
    """Return the tokens that would be computed."""
    guesses, likely = speculator.propose(path, most)
    return [guess.token for guess in guesses[:likely]]


def test_three_token_context_seen_once_is_used() -> None:
    speculator = Speculator()
    speculator.observe([1, 2, 3, 4, 5, 6], 0)
    assert speculated(speculator, [9, 1, 2, 3], 2) == [4, 5]
    assert speculated(speculator, [9, 1, 2, 3], 9) == [4, 5, 6]  # nothing is known of what comes then
    assert speculated(speculator, [9, 2, 3], 9) == []  # two tokens must have gone on so twice
    speculator.observe([7, 2, 3, 4], 0)
    assert speculator.propose([9, 2, 3], 0) == ([Draft(4, (2, 2))], 0)


def test_context_with_another_continuation_must_be_seen_again() -> None:
    speculator = Speculator()
    speculator.observe([1, 2, 3, 4], 0)
    speculator.observe([1, 2, 3, 5], 3)
    assert speculator.propose([1, 2, 3], 1) == ([], 0)
    speculator.observe([1, 2, 3, 5], 3)
    assert speculator.propose([1, 2, 3], 1) == ([Draft(5, (3, 1))], 1)


def test_six_token_context_precedes_three() -> None:
    speculator = Speculator()
    for _ in range(2):
        speculator.observe([11, 12, 13, 1, 2, 3, 4], 0)
        speculator.observe([21, 22, 23, 1, 2, 3, 5], 0)
    assert speculated(speculator, [11, 12, 13, 1, 2, 3], 1) == [4]
    assert speculated(speculator, [21, 22, 23, 1, 2, 3], 1) == [5]
    assert speculated(speculator, [31, 32, 33, 1, 2, 3], 1) == []


def test_agreeing_shorter_context_counts_if_accepted_more_often() -> None:
    speculator = Speculator()
    for begin in range(10, 60, 10):
        speculator.observe([begin, begin + 1, begin + 2, 1, 2, 3, 4], 0)
    path = [10, 11, 12, 1, 2, 3]
    doubted = Draft(4, (6, 1))
    assert speculator.propose(path, 1)[0] == [doubted]  # all kinds are as sure as one another
    speculator.record_outcome([doubted], 0)
    assert speculator.propose(path, 1) == ([Draft(4, (3, 4))], 1)
    speculator.observe([7, 1, 2, 3, 5], 4)
    speculator.observe([7, 1, 2, 3, 5], 4)
    assert speculator._acceptance_rate((3, 1)) > speculator._acceptance_rate((6, 1))
    assert speculator.propose(path, 1)[0] == [doubted]  # three tokens say something else now


def test_numbers_continue_by_length_and_frame() -> None:
    """Whatever their digits: {"line": 123, is distinguished from {"day": 12}."""
    digits, line, day = set(range(10)), [10, 11, 12], [20, 21, 12]
    speculator = Speculator(digits=digits)
    speculator.observe([*line, 4, 5, 6, 30, *day, 1, 2, 31, *line, 7, 8, 9, 30, *day, 3, 0, 31], 0)
    speculator.observe([*line, 4, 5, 0, 30, *day, 1, 7, 31], 0)
    assert speculated(speculator, [*line, 9, 1, 3], 1) == [30]
    assert speculated(speculator, [*day, 9, 1], 1) == [31]
    assert speculated(speculator, [*day, 9, 1, 3], 1) == []
    assert speculated(speculator, [*line[1:], 9, 1, 3], 1) == []  # a frame is whole
    plain = Speculator()
    plain.observe([*line, 4, 5, 6, 30, *line, 7, 8, 9, 30], 0)
    assert speculated(plain, [*line, 9, 1, 3], 1) == []


def test_known_number_is_repeated() -> None:
    """Even if another number has followed the same frame since."""
    digits, line = set(range(10)), [10, 11, 12]
    speculator = Speculator(digits=digits)
    speculator.observe([*line, 4, 8, 1, 30, *line, 5, 0, 9, 30, *line, 7, 31], 0)
    assert speculated(speculator, [*line, 4], 9) == [8, 1, 30]
    assert speculated(speculator, [8, *line, 5], 9) == [0, 9, 30]
    speculator.observe([*line, 4, 8, 2, 30], 3)  # what a number goes on with after its frame may be any digit
    assert speculated(speculator, [*line, 6], 1) == []


def test_frames_may_contain_numbers_and_long_numbers_are_ignored() -> None:
    speculator = Speculator(digits=set(range(10)))
    speculator.observe([20, 4, 21, 5, 30, 20, 6, 21, 7, 30], 0)
    assert speculated(speculator, [20, 9, 21, 9], 1) == [30]
    most, frame, other = speculation.MAX_CONTEXT - speculation.FRAME, [20, 21, 22], [23, 24, 25]
    for digit in range(3):
        speculator.observe([*frame, *[digit] * most, 40, *other, *[digit] * (most + 1), 41], 0)
    assert speculated(speculator, [*frame, *[8] * most], 1) == [40]
    assert speculated(speculator, [*other, *[8] * (most + 1)], 1) == []


def test_digit_tokens_of_a_vocabulary(bytes_: Any) -> None:
    assert {bytes_.decode([token]) for token in digit_tokens(bytes_)} == set("0123456789")
    texts = ["7", "12", "\u0120120", "\u25819", " 3", "a1", "1a", "", "\u0120", "-1", "1.5", "\u00b2"]
    words = WordLevel({text: number for number, text in enumerate(texts)}, unk_token="")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
    assert digit_tokens(tokenizer) == set(range(5))


@pytest.mark.parametrize(
    ("how", "whose"), [({}, set(range(15, 25))), ({"speculative_tokens": 0}, ()), ({"deterministic": True}, ())]
)
async def test_engines_know_their_digits(bytes_: Any, how: dict[str, Any], whose: Any) -> None:
    engine = Counted(network(), bytes_, max_batch=4, **how)
    assert engine._planner._speculator._digits == whose


def test_only_new_tokens_are_observed() -> None:
    speculator = Speculator()
    speculator.observe([1, 2, 3, 4, 5], 4)
    assert speculated(speculator, [1, 2, 3], 1) == []
    assert speculated(speculator, [2, 3, 4], 1) == [5]


def test_rejected_kind_pauses_until_it_would_be_accepted() -> None:
    speculator = Speculator()
    speculator.observe(list(range(20)), 0)
    for _ in range(4):
        assert speculated(speculator, [4, 5, 6], 1) == [7]
        speculator.record_outcome(speculator.propose([4, 5, 6], 1)[0][:1], 0)
    assert speculated(speculator, [4, 5, 6], 1) == []
    assert speculator._accepted[3, 1][0] < MIN_LIKELIHOOD
    doubted, likely = speculator.propose([4, 5, 6], 1)
    assert (doubted, likely) == ([Draft(7, (3, 1))], 0)
    speculator.record_outcome(doubted, 1)
    speculator.record_outcome(doubted, 1)
    assert speculated(speculator, [4, 5, 6], 1) == [7]


def test_run_of_drafts_ends_when_unlikely() -> None:
    speculator = Speculator()
    speculator.observe(list(range(30)), 0)
    guesses, first = speculator.propose([4, 5, 6], 20)
    assert first == 3  # .8, .64, .51
    assert len(guesses) == 4
    for _ in range(9):
        speculator.record_outcome(guesses[:first], first)
    assert speculator.propose([4, 5, 6], 20)[1] > first


def test_run_of_drafts_ends_with_the_turn() -> None:
    speculator = Speculator({5})
    speculator.observe([1, 2, 3, 4, 5, 6, 7], 0)
    assert speculated(speculator, [9, 1, 2, 3], 9) == [4]
    assert speculator.propose([9, 2, 3, 4], 9) == ([Draft(5, (3, 1))], 0)  # is judged all the same


def test_known_tokens_are_cut_at_a_stop() -> None:
    speculator = Speculator({5})
    assert speculator.cut_at_stop([1, 5, 2, 5]) == [1]
    assert speculator.cut_at_stop([1, 2]) == [1, 2]
    assert speculator.cut_at_stop([]) == []


def test_drafts_after_the_first_rejected_one_are_not_counted() -> None:
    speculator = Speculator()
    speculator.record_outcome([Draft(1, (3, 1)), Draft(2, (2, 2)), Draft(3, (1, 4))], 1)
    assert speculator._accepted[3, 1][0] > PRIOR[0] > speculator._accepted[2, 2][0]
    assert (1, 4) not in speculator._accepted


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "MAX_CONTEXTS", 50)
    speculator = Speculator()
    for begin in range(0, 1000, 100):
        speculator.observe(list(range(begin, begin + 102)), 0)
        assert len(speculator._recent) + len(speculator._older) <= 2 * (50 + 5)
    assert speculated(speculator, [990, 991, 992], 1) == [993]
    assert speculated(speculator, [0, 1, 2], 1) == []


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    model = tiny_llama(VOCABULARY, context=512, seed=seed).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return model


class Counted(TransformersEngine):
    """An engine that counts its passes."""

    passes = 0

    def _step(self, *args: Any) -> None:
        self.passes += 1
        super()._step(*args)


async def talk(engine: TransformersEngine, number: int, turns: int, **knobs: Any) -> list[Completion]:
    """Hold a conversation in which the environment's answer is always one of two."""
    rng = np.random.default_rng(number)
    session, path, found = engine.open(f"g{number % 3}"), list(range(3, 20)), []
    for turn in range(turns):
        how = Sampling(max_tokens=20, seed=int(rng.integers(3)), **knobs)
        found.append(await engine.generate(np.array(path, np.int32), how, session))
        path += [*found[-1].token_ids.tolist(), *([20, 21, 22] if rng.integers(2) else [30, 31]), 5 + turn % 2]
    return found


async def all_talk(engine: TransformersEngine, **knobs: Any) -> list[Completion]:
    """Hold nine conversations in three groups that outlive them."""
    for group in range(3):
        engine.open(f"g{group}")
    found = await asyncio.gather(*(talk(engine, number, 4, **knobs) for number in range(9)))
    return [completion for one in found for completion in one]


KNOBS = [{}, {"temperature": 0.2}, {"temperature": 0.0}, {"top_k": 3, "temperature": 0.7}, {"stop": ("e",)}]


@pytest.mark.parametrize("knobs", KNOBS)
async def test_speculation_does_not_change_samples(bytes_: Any, knobs: dict[str, Any]) -> None:
    engines = [Counted(network(), bytes_, speculative_tokens=count, stop_ids=[7]) for count in (0, 8)]
    plain, speculating = [await all_talk(engine, **knobs) for engine in engines]
    for one, other in zip(plain, speculating, strict=True):
        assert other.token_ids.tolist() == one.token_ids.tolist()
        assert other.finish == one.finish
        np.testing.assert_allclose(other.logprobs, one.logprobs, atol=1e-6)
        np.testing.assert_allclose(other.entropies, one.entropies, atol=1e-6)
        assert other.versions.tolist() == one.versions.tolist()
    before, after = (engine.take_stats() for engine in engines)
    assert after["tokens_computed"] == before["tokens_computed"]  # a tree, computed once, whoever guessed what
    assert before["tokens_speculated"] == 0 < after["tokens_accepted"] < after["tokens_speculated"]
    assert engines[1].passes <= engines[0].passes


async def ask(engine: TransformersEngine, share: str, path: list[int], how: Sampling, later: int = 0) -> Completion:
    session = engine.open(share)
    await asyncio.sleep(0.002 * later)
    return await engine.generate(np.array(path, np.int32), how, session)


async def doomed(engine: TransformersEngine, share: str, path: list[int], how: Sampling, later: int) -> None:
    """Submit a request and cancel it before it is answered, or soon after."""
    asking = asyncio.create_task(ask(engine, share, path, how, later))
    await asyncio.sleep(0.01)
    asking.cancel()


@pytest.mark.parametrize("memory_mb", [64, 0])
@pytest.mark.slow
async def test_requests_along_another_requests_drafts(bytes_: Any, memory_mb: int) -> None:
    """A request's prompt is what another request is drafting, for a while; some drafting requests are cancelled."""
    engine, plain = (Counted(network(), bytes_, speculative_tokens=count, memory_mb=memory_mb) for count in (8, 0))
    prompt, greedy = list(range(3, 20)), Sampling(max_tokens=40, temperature=0.0)
    said = (await ask(plain, "g", prompt, greedy)).token_ids.tolist()
    for group in range(3):
        await ask(engine, f"before {group}", prompt, greedy)
    rng = np.random.default_rng(0)
    for share in ("one", "two", "three"):
        cuts = rng.integers(1, 40, 6).tolist()
        paths = [prompt[:9], prompt, *([*prompt, *said[:cut], 21 + i] for i, cut in enumerate(cuts))]
        paths += [[*prompt, *said[:10], 30, *said[10 : 10 + i]] for i in range(3)]
        hows = [replace(greedy, seed=i, temperature=float(rng.choice([0.0, 0.4]))) for i in range(len(paths))]
        asked = [(share, path, how) for path, how in zip(paths, hows, strict=True)]
        cancelled = [doomed(engine, *each, number % 4) for number, each in enumerate(asked) if number % 3 == 0]
        answers = [ask(engine, *each, number % 4) for number, each in enumerate(asked)]
        found = await asyncio.gather(*answers, *cancelled)
        for one, each in zip(found, asked, strict=False):
            alone = await ask(plain, *each)
            assert one is not None
            assert one.token_ids.tolist() == alone.token_ids.tolist()
            np.testing.assert_allclose(one.logprobs, alone.logprobs, atol=1e-6)
    assert engine.take_stats()["tokens_accepted"] > 100


async def test_rejected_drafts_leave_nothing_behind(bytes_: Any) -> None:
    engine = Counted(network(), bytes_)
    session, prompt = engine.open("g"), np.arange(3, 30, dtype=np.int32)
    paths = []
    for seed in range(12):
        found = await engine.generate(prompt, Sampling(max_tokens=20, seed=seed % 4, temperature=0.8), session)
        paths.append([*prompt.tolist(), *found.token_ids.tolist()])
    stats = engine.take_stats()
    assert stats["tokens_accepted"] < stats["tokens_speculated"]
    for row in engine._planner._groups["g"]._rows:
        assert any(row.tokens == path[: len(row.tokens)] for path in paths)
        assert row.computed == len(row.tokens)


async def test_drafts_are_learnt_across_groups(bytes_: Any) -> None:
    engine = Counted(network(), bytes_)
    prompt = np.arange(3, 30, dtype=np.int32)
    how = Sampling(max_tokens=30, seed=1)
    passes = []
    for group in range(4):
        engine.passes = 0
        await engine.generate(prompt, how, engine.open(f"g{group}"))
        passes.append(engine.passes)
    assert passes[0] > 20
    assert passes[-1] <= 8


@pytest.mark.parametrize("by", ["token", "text"])
async def test_nothing_is_speculated_beyond_the_end_of_a_turn(bytes_: Any, by: str) -> None:
    """Although the environment's answer is always the same."""
    prompt, greedy = list(range(3, 30)), Sampling(max_tokens=20, temperature=0.0)
    plain = Counted(network(), bytes_, speculative_tokens=0)
    said = (await ask(plain, "g", prompt, greedy)).token_ids.tolist()
    end = next(token for i, token in enumerate(said) if i > 8 and token not in said[:i])
    how = replace(greedy, stop=(bytes_.decode([end]),)) if by == "text" else greedy
    engine = Counted(network(), bytes_, stop_ids=[end] if by == "token" else [])
    for group in range(6):
        session = engine.open(f"g{group}")
        engine.take_stats()
        turn = await engine.generate(np.array(prompt, np.int32), how, session)
        stats = engine.take_stats()
        answer = np.array([*prompt, *turn.token_ids, *range(20, 36)], np.int32)
        await engine.generate(answer, replace(how, max_tokens=1), session)
    assert turn.finish == "stop"
    assert turn.token_ids[-1] == end
    assert stats["tokens_speculated"] == stats["tokens_accepted"] > 5


async def test_later_request_takes_one_turn_of_the_known_tokens(bytes_: Any, monkeypatch: Any) -> None:
    """No token is sampled from positions of another attempt's next turns."""
    prompt, greedy = list(range(3, 30)), Sampling(max_tokens=20, temperature=0.0)
    said = (await ask(Counted(network(), bytes_, speculative_tokens=0), "g", prompt, greedy)).token_ids.tolist()
    end = next(token for i, token in enumerate(said) if i > 4 and token not in said[:i])
    engine = Counted(network(), bytes_, stop_ids=[end])
    first = engine.open("g")
    turn = await engine.generate(np.array(prompt, np.int32), greedy, first)
    await engine.generate(np.array([*prompt, *turn.token_ids, *range(20, 36)], np.int32), greedy, first)
    rows, project = [], engine._inference.logits
    monkeypatch.setattr(engine._inference, "logits", lambda hidden: rows.append(len(hidden)) or project(hidden))
    later = await ask(engine, "g", prompt, greedy)
    assert later.token_ids.tolist() == turn.token_ids.tolist()
    assert rows == [len(turn.token_ids)]


@pytest.mark.parametrize(("lacking", "whole"), [(10, 42), (50, SHORT_SPAN), (SHORT_SPAN, SHORT_SPAN), (70, 102)])
async def test_drafts_keep_short_spans_short(
    bytes_: Any, monkeypatch: pytest.MonkeyPatch, lacking: int, whole: int
) -> None:
    """A short span stays short with its drafts; a long one gets as many as it may."""
    engine = Counted(network(), bytes_)
    sizes, plan = [], engine._planner.plan

    def planned(batch: Any) -> Any:
        step = plan(batch)
        sizes.extend(span.size for span in step.spans)
        return step

    monkeypatch.setattr(engine._planner, "plan", planned)
    monkeypatch.setattr(Speculator, "propose", lambda _, path, most: ([Draft(5, (3, 1))] * most, most))
    await ask(engine, "g", [3 + i % 36 for i in range(lacking)], Sampling(max_tokens=40, temperature=0.0))
    assert sizes[0] == whole


async def test_accepted_drafts_are_observed(bytes_: Any) -> None:
    """So that frequent text is remembered, and not forgotten."""
    engine = Counted(network(), bytes_)
    prompt, how = np.arange(3, 30, dtype=np.int32), Sampling(max_tokens=30, seed=1)
    for group in range(6):
        found = await engine.generate(prompt, how, engine.open(f"g{group}"))
    path = [*prompt.tolist(), *found.token_ids.tolist()]
    speculator = engine._planner._speculator._lookup(tuple(path[-7:-1]))
    assert speculator == (path[-1], 6)


async def test_float32_logprobs_match_a_stock_model(bytes_: Any) -> None:
    """With the fused decoder, and many rows of several tokens at once."""
    model = network(dtype=torch.float32)
    engine = Counted(model, bytes_)
    prompt, stock = np.arange(3, 30, dtype=np.int32), network()
    for temperature in (0.3, 1.0):
        sessions = [engine.open("g") for _ in range(6)]
        found = await asyncio.gather(*(
            engine.generate(prompt, Sampling(max_tokens=40, seed=seed % 4, temperature=temperature), session)
            for seed, session in enumerate(sessions)
        ))  # fmt: skip
        for each in found:
            row = torch.from_numpy(np.concatenate([prompt, each.token_ids])).long()
            with torch.no_grad():
                logits = stock(row[None]).logits[0, len(prompt) - 1 : -1] / temperature
            logp = logits.log_softmax(-1)
            wanted = logp.gather(1, row[len(prompt) :, None])[:, 0]
            np.testing.assert_allclose(each.logprobs, wanted.numpy(), atol=2e-5)
            np.testing.assert_allclose(each.entropies, -(logp.exp() * logp).sum(-1).numpy(), atol=2e-5)
    assert engine._inference._decoder is not None
    assert engine.take_stats()["tokens_accepted"] > 0


async def test_scored_tokens_take_one_pass(bytes_: Any) -> None:
    engine = Counted(network(), bytes_)
    prompt, said = np.arange(3, 12, dtype=np.int32), np.arange(12, 32, dtype=np.int32)
    alone = Counted(network(), bytes_, deterministic=True, max_batch=4)
    found = [await one.score(prompt, said, one.open("g")) for one in (engine, alone)]
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    assert engine.passes == 1
    assert alone.passes > 20
    stats = engine.take_stats()
    assert stats["tokens_sampled"] == stats["tokens_speculated"] == 0
    assert stats["tokens_computed"] == len(prompt) + len(said) - 1


async def test_scored_tokens_beside_other_requests(bytes_: Any) -> None:
    """More than fit into a pass, in a step filled by long prompts, and with other completions in the tree."""
    engine = Counted(network(), bytes_, speculative_tokens=4)
    prompt = np.arange(3, 12, dtype=np.int32)
    rng = np.random.default_rng(0)
    said = [rng.integers(3, VOCABULARY, 150).astype(np.int32) for _ in range(2)]
    said.append(np.concatenate([said[0][:70], said[1][:50]]))
    most = 0
    layout = engine._planner.plan

    def plan(batch: Any) -> Any:
        nonlocal most
        step = layout(batch)
        most = max(most, sum(span.size for span in step.spans))
        return step

    engine._planner.plan = plan  # type: ignore[method-assign]
    session = engine.open("g")
    first = await engine.score(prompt, said[0], session)
    long = rng.integers(3, VOCABULARY, 480).astype(np.int32)
    others = [engine.generate(long, Sampling(max_tokens=5, seed=seed), engine.open(f"h{seed}")) for seed in range(4)]
    found = await asyncio.gather(*(engine.score(prompt, each, engine.open("g")) for each in said), *others)
    plain = Counted(network(), bytes_, speculative_tokens=0, deterministic=True, max_batch=8)
    for each, scores in zip(said, found, strict=False):
        np.testing.assert_allclose(scores, await plain.score(prompt, each, plain.open("g")), atol=1e-6)
    np.testing.assert_allclose(first, found[0], atol=1e-6)
    assert most <= 512 + 8


async def test_unlikely_tokens_have_a_finite_logprob(bytes_: Any) -> None:
    model = network(dtype=torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(100)
    engine = Counted(model, bytes_)
    found = await engine.score(np.arange(3, 9, dtype=np.int32), np.arange(20, 30, dtype=np.int32), engine.open("g"))
    assert np.isfinite(found).all()
    assert found.min() < -200


async def test_constraints_hold_beside_speculation(bytes_: Any) -> None:
    """Also at a temperature at which the allowed tokens are all but impossible."""
    engine = tiny_engine(bytes_, deterministic=False)
    prompt, how = np.arange(5, 20, dtype=np.int32), Sampling(max_tokens=20, seed=1, temperature=0.05)
    for group in range(2):
        free = await engine.generate(prompt, how, engine.open(f"g{group}"))
    held = engine.generate(prompt, replace(how, regex="[0-9]{6}"), engine.open("g"))
    one, again = await asyncio.gather(held, engine.generate(prompt, how, engine.open("g")))
    assert bytes_.decode(one.token_ids).isdigit()
    assert np.isfinite(one.logprobs).all()
    assert one.logprobs.min() < -20
    assert again.token_ids.tolist() == free.token_ids.tolist()
    assert engine.take_stats()["tokens_accepted"] > 0


async def test_deterministic_engines_do_not_speculate(bytes_: Any) -> None:
    engine = Counted(network(), bytes_, deterministic=True, max_batch=4)
    for group in range(3):
        await engine.generate(np.arange(3, 9, dtype=np.int32), Sampling(max_tokens=9, seed=1), engine.open(f"g{group}"))
    assert engine.take_stats()["tokens_speculated"] == 0


async def test_activations_contain_no_rejected_draft(bytes_: Any) -> None:
    engines = [Counted(network(), bytes_, speculative_tokens=count) for count in (0, 8)]
    for engine in engines:
        engine.keep_activations(1)
    found = [await all_talk(engine, temperature=0.5) for engine in engines]
    assert engines[1].take_stats()["tokens_speculated"] > 0
    path: I32 = np.array([*range(3, 20), *found[0][0].token_ids.tolist()], np.int32)
    one, other = (engine.activations("g0", path) for engine in engines)
    assert len(one) >= len(path) - 1
    torch.testing.assert_close(other, one, rtol=0, atol=1e-9)


async def test_memory_stays_bounded_with_speculation(bytes_: Any) -> None:
    engine, plain = (Counted(network(), bytes_, speculative_tokens=count, memory_mb=0) for count in (8, 0))
    for one, other in zip(await all_talk(engine), await all_talk(plain), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
