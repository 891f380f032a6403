"""How likely the policy finds the answer, against a plain forward pass over what the agent held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from modelserver import tiny_engine, tiny_network
from plays import SCAFFOLD, TASK, FakeEnv, player
from turnstile.agents.base import Scaffold
from turnstile.agents.parsing.hermes import HermesParser
from turnstile.agents.renderer import ChatRenderer
from turnstile.config import make_recipe
from turnstile.engines.local.transformers import TransformersEngine
from turnstile.errors import ConfigError
from turnstile.rewards.base import Term
from turnstile.rewards.probabilities import AnswerProbabilities
from turnstile.rewards.shaping import information_gain
from turnstile.types import Group, Stage, Stop
from turnstile.wiring.graders import check_graders, make_graders

ASKED = replace(TASK, data={"answer": 42})


async def played(engine: TransformersEngine, scaffold: Scaffold = SCAFFOLD) -> Group:
    plays = player(FakeEnv, engine=engine, scaffold=scaffold)
    (group,) = await plays.groups([ASKED], 2, label="train/1", seed=0)
    return group


def grader(engine: Any, tokenizer: Any, scaffold: Scaffold = SCAFFOLD, **knobs: Any) -> AnswerProbabilities:
    return AnswerProbabilities(engine=engine, renderer=scaffold.renderer, tokenizer=tokenizer, **knobs)


@torch.no_grad()
def plainly(held: Sequence[int], tokenizer: Any) -> float:
    """Mean log-probability of the answer's bytes behind what was held, from one row."""
    lead, asked = (tokenizer.encode(part, add_special_tokens=False) for part in ("The answer is", " 42"))
    logits = tiny_network(tokenizer)(torch.tensor([[*held, *lead, *asked]])).logits[0, -len(asked) - 1 : -1]
    return float(logits.double().log_softmax(-1)[torch.arange(len(asked)), torch.tensor(asked)].mean())


async def test_the_answer_is_asked_for_before_the_first_turn_and_after_each(bytes_: Any) -> None:
    engine = tiny_engine(bytes_)
    group = await played(engine)
    (seen,) = await grader(engine, bytes_).grade([group], 1)
    for one in seen.trajectories:
        found = one.signals["answer_probabilities"]
        held, wanted = [], []
        for turn in one.turns:
            held += turn.context_ids.tolist()
            wanted.append(plainly(held, bytes_))
            held += turn.completion.token_ids.tolist()
        last = "" if "\n" in bytes_.decode(one.turns[-1].completion.token_ids.tolist()) else "\n"
        wanted.append(plainly(held + bytes_.encode(f"{last}ok\n"), bytes_))
        assert np.log(found) == pytest.approx(wanted, abs=1e-4)
        gained = information_gain(ASKED, one, last=True)
        assert gained == pytest.approx(np.diff(found), abs=1e-7)
        assert np.unique(np.log(found)).size > 1
    assert engine._sessions == {}


async def test_no_answer_is_asked_for_after_an_unanswered_turn(bytes_: Any) -> None:
    engine = tiny_engine(bytes_)
    group = await played(engine)
    one = group.trajectories[0]
    cut = replace(one, turns=(*one.turns[:-1], replace(one.turns[-1], observation=(), stage=Stage.DELIVERED)))
    whole, without = await grader(engine, bytes_).grade([group, replace(group, trajectories=(cut,))], 1)
    probabilities = whole.trajectories[0].signals["answer_probabilities"]
    (seen,) = without.trajectories
    assert seen.signals["answer_probabilities"] == pytest.approx(probabilities[:-1], abs=1e-6)
    term = Term(name="gain", function=partial(information_gain, last=True), scope="turn", level=0)
    assert term.values(ASKED, seen) == pytest.approx([*np.diff(probabilities)[:-1], 0.0], abs=1e-6)


async def test_the_sum_and_another_form_are_knobs(bytes_: Any) -> None:
    engine = tiny_engine(bytes_)
    group = await played(engine)
    (mean,) = await grader(engine, bytes_, form="{answer}").grade([group], None)
    (total,) = await grader(engine, bytes_, form="{answer}", mean=False).grade([group], None)
    means, sums = (np.log(one.trajectories[0].signals["answer_probabilities"]) for one in (mean, total))
    assert sums == pytest.approx(2 * means, rel=1e-5)  # "42" is two bytes


async def test_a_chat_template_gives_the_context_after_the_last_turn(bytes_: Any) -> None:
    engine, chat = tiny_engine(bytes_), Scaffold(ChatRenderer(bytes_), HermesParser())
    group = await played(engine, chat)
    (seen,) = await grader(engine, bytes_, chat).grade([group], 1)
    one = seen.trajectories[0]
    held = [i for turn in one.turns for i in [*turn.context_ids.tolist(), *turn.completion.token_ids.tolist()]]
    end = bytes_.convert_tokens_to_ids("<|im_end|>")
    behind = "\n<|im_start|>user\nok<|im_end|>\n<|im_start|>assistant\n"
    held += [end] * (held[-1] != end) + bytes_.encode(behind, add_special_tokens=False)
    assert np.log(one.signals["answer_probabilities"][-1]) == pytest.approx(plainly(held, bytes_), abs=1e-4)


async def test_the_signal_is_none_if_there_is_nothing_to_ask(bytes_: Any) -> None:
    engine = tiny_engine(bytes_)
    group = await played(engine)
    broken, empty = group.trajectories
    broken, empty = replace(broken, stop=Stop.ERROR), replace(empty, turns=())
    (seen,) = await grader(engine, bytes_).grade([replace(group, trajectories=(broken, empty))], 1)
    assert [one.signals["answer_probabilities"] for one in seen.trajectories] == [None, None]
    (unasked,) = await grader(None, None).grade([group], None)  # a policy that is not a model plays
    assert unasked.trajectories[0].signals["answer_probabilities"] is None
    assert not information_gain(ASKED, unasked.trajectories[0]).any()


async def test_a_probability_beyond_the_window_is_none(bytes_: Any) -> None:
    engine = tiny_engine(bytes_)
    group = await played(engine)
    (whole,) = await grader(engine, bytes_).grade([group], 1)
    one = whole.trajectories[0]
    *first, last = one.signals["answer_probabilities"]
    longest = sum(len(turn.context_ids) + len(turn.completion.token_ids) for turn in one.turns)
    engine._window = longest  # an episode that filled it
    (seen,) = await grader(engine, bytes_).grade([replace(group, trajectories=(one,))], 1)
    found = seen.trajectories[0].signals["answer_probabilities"]
    assert found[-1] is None
    assert last is not None
    kept = [(a, b) for a, b in zip(found, first, strict=False) if a is not None]
    assert kept
    assert all(a == pytest.approx(b, rel=1e-4) for a, b in kept)
    assert information_gain(ASKED, seen.trajectories[0], last=True)[-1] == 0.0


async def test_bad_input_is_one_clear_error(bytes_: Any) -> None:
    engine = tiny_engine(bytes_)
    group = await played(engine)
    with pytest.raises(ConfigError, match="task 't' has no 'answers' in its data \\(there: answer\\)"):
        await grader(engine, bytes_, key="answers").grade([group], 1)
    with pytest.raises(ConfigError, match=r"wants \{answer\} once in its form, got 'It is'"):
        grader(engine, bytes_, form="It is")
    with pytest.raises(ConfigError, match="only a model in this process tells, and FakeEnv does not"):
        grader(FakeEnv(), bytes_)


def test_a_server_is_refused_before_anything_is_played() -> None:
    sections = {"graders": ["answer_probabilities"]}
    served = make_recipe({**sections, "engine": {"kind": "openai", "url": "http://127.0.0.1:9/v1"}})
    with pytest.raises(ConfigError, match=r"which engine\.kind = 'openai' cannot tell: play with engine\.kind"):
        check_graders(served)
    check_graders(make_recipe(sections))
    (made,) = make_graders(make_recipe(sections), None, None).values()
    assert isinstance(made, AnswerProbabilities)
