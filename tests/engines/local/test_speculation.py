"""Guesses at the next tokens: what they are learnt from, and that nothing but speed depends on them."""

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
from turnstile.engines.local import speculation as drafts
from turnstile.engines.local.layout import FEW
from turnstile.engines.local.speculation import LIKELY, UNTRIED, Guess, Speculator, digit_tokens
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.types import I32, Completion, Sampling

VOCABULARY = 40


def made(known: Speculator, path: list[int], most: int) -> list[int]:
    """The tokens that it would have computed."""
    guesses, likely = known.guess(path, most)
    return [guess.token for guess in guesses[:likely]]


def test_three_tokens_seen_once_are_gone_on_from() -> None:
    known = Speculator()
    known.observe([1, 2, 3, 4, 5, 6], 0)
    assert made(known, [9, 1, 2, 3], 2) == [4, 5]
    assert made(known, [9, 1, 2, 3], 9) == [4, 5, 6]  # nothing is known of what comes then
    assert made(known, [9, 2, 3], 9) == []  # two tokens must have gone on so twice
    known.observe([7, 2, 3, 4], 0)
    assert known.guess([9, 2, 3], 0) == ([Guess(4, (2, 2))], 0)


def test_a_context_that_went_on_otherwise_has_to_be_seen_again() -> None:
    known = Speculator()
    known.observe([1, 2, 3, 4], 0)
    known.observe([1, 2, 3, 5], 3)
    assert known.guess([1, 2, 3], 1) == ([], 0)
    known.observe([1, 2, 3, 5], 3)
    assert known.guess([1, 2, 3], 1) == ([Guess(5, (3, 1))], 1)


def test_six_tokens_tell_more_than_three() -> None:
    known = Speculator()
    for _ in range(2):
        known.observe([11, 12, 13, 1, 2, 3, 4], 0)
        known.observe([21, 22, 23, 1, 2, 3, 5], 0)
    assert made(known, [11, 12, 13, 1, 2, 3], 1) == [4]
    assert made(known, [21, 22, 23, 1, 2, 3], 1) == [5]
    assert made(known, [31, 32, 33, 1, 2, 3], 1) == []


def test_shorter_contexts_that_say_the_same_count_where_they_are_surer() -> None:
    known = Speculator()
    for begin in range(10, 60, 10):
        known.observe([begin, begin + 1, begin + 2, 1, 2, 3, 4], 0)
    path = [10, 11, 12, 1, 2, 3]
    doubted = Guess(4, (6, 1))
    assert known.guess(path, 1)[0] == [doubted]  # all kinds are as sure as one another
    known.judge([doubted], 0)
    assert known.guess(path, 1) == ([Guess(4, (3, 4))], 1)
    known.observe([7, 1, 2, 3, 5], 4)
    known.observe([7, 1, 2, 3, 5], 4)
    assert known._sure((3, 1)) > known._sure((6, 1))
    assert known.guess(path, 1)[0] == [doubted]  # three tokens say something else now


def test_numbers_go_on_by_their_length_and_frame() -> None:
    """Whatever their digits: {"line": 123, is told from {"day": 12}."""
    digits, line, day = set(range(10)), [10, 11, 12], [20, 21, 12]
    known = Speculator(digits=digits)
    known.observe([*line, 4, 5, 6, 30, *day, 1, 2, 31, *line, 7, 8, 9, 30, *day, 3, 0, 31], 0)
    known.observe([*line, 4, 5, 0, 30, *day, 1, 7, 31], 0)
    assert made(known, [*line, 9, 1, 3], 1) == [30]
    assert made(known, [*day, 9, 1], 1) == [31]
    assert made(known, [*day, 9, 1, 3], 1) == []
    assert made(known, [*line[1:], 9, 1, 3], 1) == []  # a frame is whole
    plain = Speculator()
    plain.observe([*line, 4, 5, 6, 30, *line, 7, 8, 9, 30], 0)
    assert made(plain, [*line, 9, 1, 3], 1) == []


def test_a_number_said_before_is_said_again() -> None:
    """Where another was said in the same frame since."""
    digits, line = set(range(10)), [10, 11, 12]
    known = Speculator(digits=digits)
    known.observe([*line, 4, 8, 1, 30, *line, 5, 0, 9, 30, *line, 7, 31], 0)
    assert made(known, [*line, 4], 9) == [8, 1, 30]
    assert made(known, [8, *line, 5], 9) == [0, 9, 30]
    known.observe([*line, 4, 8, 2, 30], 3)  # what a number goes on with after its frame may be any digit
    assert made(known, [*line, 6], 1) == []


def test_a_frame_may_have_numbers_in_it_and_long_numbers_are_none() -> None:
    known = Speculator(digits=set(range(10)))
    known.observe([20, 4, 21, 5, 30, 20, 6, 21, 7, 30], 0)
    assert made(known, [20, 9, 21, 9], 1) == [30]
    most, frame, other = drafts.NEAR - drafts.FRAME, [20, 21, 22], [23, 24, 25]
    for digit in range(3):
        known.observe([*frame, *[digit] * most, 40, *other, *[digit] * (most + 1), 41], 0)
    assert made(known, [*frame, *[8] * most], 1) == [40]
    assert made(known, [*other, *[8] * (most + 1)], 1) == []


def test_what_numbers_are_written_with(bytes_: Any) -> None:
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
    assert engine._planner._drafts._digits == whose


def test_only_new_tokens_are_learnt() -> None:
    known = Speculator()
    known.observe([1, 2, 3, 4, 5], 4)
    assert made(known, [1, 2, 3], 1) == []
    assert made(known, [2, 3, 4], 1) == [5]


def test_a_kind_of_guess_that_was_often_wrong_is_not_made_until_it_would_have_been_right() -> None:
    known = Speculator()
    known.observe(list(range(20)), 0)
    for _ in range(4):
        assert made(known, [4, 5, 6], 1) == [7]
        known.judge(known.guess([4, 5, 6], 1)[0][:1], 0)
    assert made(known, [4, 5, 6], 1) == []
    assert known._right[3, 1][0] < LIKELY
    doubted, likely = known.guess([4, 5, 6], 1)
    assert (doubted, likely) == ([Guess(7, (3, 1))], 0)
    known.judge(doubted, 1)
    known.judge(doubted, 1)
    assert made(known, [4, 5, 6], 1) == [7]


def test_a_run_of_guesses_is_as_long_as_it_is_likely() -> None:
    known = Speculator()
    known.observe(list(range(30)), 0)
    guesses, first = known.guess([4, 5, 6], 20)
    assert first == 3  # .8, .64, .51
    assert len(guesses) == 4
    for _ in range(9):
        known.judge(guesses[:first], first)
    assert known.guess([4, 5, 6], 20)[1] > first


def test_a_run_of_guesses_ends_with_the_turn() -> None:
    known = Speculator({5})
    known.observe([1, 2, 3, 4, 5, 6, 7], 0)
    assert made(known, [9, 1, 2, 3], 9) == [4]
    assert known.guess([9, 2, 3, 4], 9) == ([Guess(5, (3, 1))], 0)  # is judged all the same


def test_of_what_is_known_a_turn_is_taken() -> None:
    known = Speculator({5})
    assert known.turn([1, 5, 2, 5]) == [1]
    assert known.turn([1, 2]) == [1, 2]
    assert known.turn([]) == []


def test_what_comes_after_the_first_wrong_guess_is_not_judged() -> None:
    known = Speculator()
    known.judge([Guess(1, (3, 1)), Guess(2, (2, 2)), Guess(3, (1, 4))], 1)
    assert known._right[3, 1][0] > UNTRIED[0] > known._right[2, 2][0]
    assert (1, 4) not in known._right


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "REMEMBERED", 50)
    known = Speculator()
    for begin in range(0, 1000, 100):
        known.observe(list(range(begin, begin + 102)), 0)
        assert len(known._new) + len(known._old) <= 2 * (50 + 5)
    assert made(known, [990, 991, 992], 1) == [993]
    assert made(known, [0, 1, 2], 1) == []


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    model = tiny_llama(VOCABULARY, context=512, seed=seed).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    return model


class Counted(TransformersEngine):
    """Counts its passes."""

    passes = 0

    def _step(self, *args: Any) -> None:
        self.passes += 1
        super()._step(*args)


async def talk(engine: TransformersEngine, number: int, turns: int, **knobs: Any) -> list[Completion]:
    """A conversation of some turns in which the environment's part is always one of two."""
    rng = np.random.default_rng(number)
    session, path, found = engine.open(f"g{number % 3}"), list(range(3, 20)), []
    for turn in range(turns):
        how = Sampling(max_tokens=20, seed=int(rng.integers(3)), **knobs)
        found.append(await engine.generate(np.array(path, np.int32), how, session))
        path += [*found[-1].token_ids.tolist(), *([20, 21, 22] if rng.integers(2) else [30, 31]), 5 + turn % 2]
    return found


async def all_talk(engine: TransformersEngine, **knobs: Any) -> list[Completion]:
    """Nine conversations in three groups, which outlast them."""
    for group in range(3):
        engine.open(f"g{group}")
    found = await asyncio.gather(*(talk(engine, number, 4, **knobs) for number in range(9)))
    return [completion for one in found for completion in one]


KNOBS = [{}, {"temperature": 0.2}, {"temperature": 0.0}, {"top_k": 3, "temperature": 0.7}, {"stop": ("e",)}]


@pytest.mark.parametrize("knobs", KNOBS)
async def test_what_is_sampled_is_what_it_was(bytes_: Any, knobs: dict[str, Any]) -> None:
    engines = [Counted(network(), bytes_, speculative_tokens=count, stop_ids=[7]) for count in (0, 8)]
    plain, guessed = [await all_talk(engine, **knobs) for engine in engines]
    for one, other in zip(plain, guessed, strict=True):
        assert other.token_ids.tolist() == one.token_ids.tolist()
        assert other.finish == one.finish
        np.testing.assert_allclose(other.logprobs, one.logprobs, atol=1e-6)
        np.testing.assert_allclose(other.entropies, one.entropies, atol=1e-6)
        assert other.versions.tolist() == one.versions.tolist()
    before, after = (engine.take_stats() for engine in engines)
    assert after["tokens_computed"] == before["tokens_computed"]  # a tree, computed once, whoever guessed what
    assert before["tokens_guessed"] == 0 < after["tokens_guessed_right"] < after["tokens_guessed"]
    assert engines[1].passes <= engines[0].passes


async def ask(engine: TransformersEngine, share: str, path: list[int], how: Sampling, later: int = 0) -> Completion:
    session = engine.open(share)
    await asyncio.sleep(0.002 * later)
    return await engine.generate(np.array(path, np.int32), how, session)


async def doomed(engine: TransformersEngine, share: str, path: list[int], how: Sampling, later: int) -> None:
    """Asks, and is cancelled before it is answered, or soon after."""
    asking = asyncio.create_task(ask(engine, share, path, how, later))
    await asyncio.sleep(0.01)
    asking.cancel()


@pytest.mark.parametrize("memory_mb", [64, 0])
@pytest.mark.slow
async def test_paths_that_run_through_anothers_guesses(bytes_: Any, memory_mb: int) -> None:
    """What one is asked next is what another is just guessing, for a while; and some who guess are cancelled."""
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
    assert engine.take_stats()["tokens_guessed_right"] > 100


async def test_wrong_guesses_leave_nothing_behind(bytes_: Any) -> None:
    engine = Counted(network(), bytes_)
    session, prompt = engine.open("g"), np.arange(3, 30, dtype=np.int32)
    paths = []
    for seed in range(12):
        found = await engine.generate(prompt, Sampling(max_tokens=20, seed=seed % 4, temperature=0.8), session)
        paths.append([*prompt.tolist(), *found.token_ids.tolist()])
    stats = engine.take_stats()
    assert stats["tokens_guessed_right"] < stats["tokens_guessed"]
    for row in engine._planner._groups["g"]._rows:
        assert any(row.tokens == path[: len(row.tokens)] for path in paths)
        assert row.computed == len(row.tokens)


async def test_guesses_are_learnt_across_groups(bytes_: Any) -> None:
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
async def test_nothing_is_guessed_beyond_the_end_of_a_turn(bytes_: Any, by: str) -> None:
    """Though what the environment says then is always the same."""
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
    assert stats["tokens_guessed"] == stats["tokens_guessed_right"] > 5


async def test_who_comes_later_gets_no_more_of_what_is_known_than_a_turn(bytes_: Any, monkeypatch: Any) -> None:
    """Nor are tokens sampled from where another attempt's next turns stand."""
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


@pytest.mark.parametrize(("lacking", "whole"), [(10, 42), (50, FEW), (FEW, FEW), (70, 102)])
async def test_guesses_do_not_part_a_request_from_the_others(
    bytes_: Any, monkeypatch: pytest.MonkeyPatch, lacking: int, whole: int
) -> None:
    """What is attended to beside others' tokens still is with guesses behind it; a long run gets as many as it may."""
    engine = Counted(network(), bytes_)
    sizes, plan = [], engine._planner.plan

    def planned(batch: Any) -> Any:
        step = plan(batch)
        sizes.extend(span.size for span in step.spans)
        return step

    monkeypatch.setattr(engine._planner, "plan", planned)
    monkeypatch.setattr(Speculator, "guess", lambda _, path, most: ([Guess(5, (3, 1))] * most, most))
    await ask(engine, "g", [3 + i % 36 for i in range(lacking)], Sampling(max_tokens=40, temperature=0.0))
    assert sizes[0] == whole


async def test_right_guesses_are_learnt_from_too(bytes_: Any) -> None:
    """So that what is said again and again is known the better, and not forgotten."""
    engine = Counted(network(), bytes_)
    prompt, how = np.arange(3, 30, dtype=np.int32), Sampling(max_tokens=30, seed=1)
    for group in range(6):
        found = await engine.generate(prompt, how, engine.open(f"g{group}"))
    path = [*prompt.tolist(), *found.token_ids.tolist()]
    known = engine._planner._drafts._known(tuple(path[-7:-1]))
    assert known == (path[-1], 6)


async def test_in_float32_they_are_as_likely_as_a_stock_model_finds_them(bytes_: Any) -> None:
    """By the fused pass, many rows with several tokens at once."""
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
    assert engine._inference._fused is not None
    assert engine.take_stats()["tokens_guessed_right"] > 0


async def test_given_tokens_go_through_together(bytes_: Any) -> None:
    engine = Counted(network(), bytes_)
    prompt, said = np.arange(3, 12, dtype=np.int32), np.arange(12, 32, dtype=np.int32)
    alone = Counted(network(), bytes_, deterministic=True, max_batch=4)
    found = [await one.score(prompt, said, one.open("g")) for one in (engine, alone)]
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    assert engine.passes == 1
    assert alone.passes > 20
    stats = engine.take_stats()
    assert stats["tokens_sampled"] == stats["tokens_guessed"] == 0
    assert stats["tokens_computed"] == len(prompt) + len(said) - 1


async def test_given_tokens_beside_others_and_after_other_answers(bytes_: Any) -> None:
    """More than go through at once, in a step that long prompts have filled; where the tree knows another answer; and
    where it knows a part of this one."""
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


async def test_hardly_likely_tokens_have_a_finite_log_probability(bytes_: Any) -> None:
    model = network(dtype=torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(100)
    engine = Counted(model, bytes_)
    found = await engine.score(np.arange(3, 9, dtype=np.int32), np.arange(20, 30, dtype=np.int32), engine.open("g"))
    assert np.isfinite(found).all()
    assert found.min() < -200


async def test_expressions_are_held_beside_guesses(bytes_: Any) -> None:
    """Also at a temperature at which what they allow is all but impossible."""
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
    assert engine.take_stats()["tokens_guessed_right"] > 0


async def test_deterministic_engines_do_not_guess(bytes_: Any) -> None:
    engine = Counted(network(), bytes_, deterministic=True, max_batch=4)
    for group in range(3):
        await engine.generate(np.arange(3, 9, dtype=np.int32), Sampling(max_tokens=9, seed=1), engine.open(f"g{group}"))
    assert engine.take_stats()["tokens_guessed"] == 0


async def test_a_trunk_knows_no_wrong_guess(bytes_: Any) -> None:
    engines = [Counted(network(), bytes_, speculative_tokens=count) for count in (0, 8)]
    for engine in engines:
        engine.keep_activations(1)
    found = [await all_talk(engine, temperature=0.5) for engine in engines]
    assert engines[1].take_stats()["tokens_guessed"] > 0
    path: I32 = np.array([*range(3, 20), *found[0][0].token_ids.tolist()], np.int32)
    one, other = (engine.trunk("g0", path) for engine in engines)
    assert len(one) >= len(path) - 1
    torch.testing.assert_close(other, one, rtol=0, atol=1e-9)


async def test_memory_stays_bounded_with_guesses(bytes_: Any) -> None:
    engine, plain = (Counted(network(), bytes_, speculative_tokens=count, memory_mb=0) for count in (8, 0))
    for one, other in zip(await all_talk(engine), await all_talk(plain), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
