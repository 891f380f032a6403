"""Questions to a judge, and what is read of its answers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from turnstile.errors import ConfigError, EngineError
from turnstile.rewards.judges.ask import Asker, UnreadableError, checked_fraction, form_of, object_in
from turnstile.types import Message


class Model:
    """Says what `answers` says to the conversation so far; counts how many are asked at once."""

    def __init__(self, answers: Callable[[Sequence[Message]], str]) -> None:
        self.answers = answers
        self.talks: list[Sequence[Message]] = []
        self.now = self.most = 0

    async def write(self, messages: Sequence[Message], seed: int, regex: str = "") -> str:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        self.talks.append(messages)
        return self.answers(messages)


FORM = form_of({"reason": "...", "score": [0, 10], "more": {"met": [True, False], 'a "b"': ["x.y"]}})


def score(said: str) -> float:
    return checked_fraction(object_in(said, "score")["score"], 10, "score")


async def test_a_question_asked_before_is_not_asked_again(tmp_path: Path) -> None:
    model = Model(lambda messages: f'{{"score": {len(messages[0].content)}}}')
    kept = tmp_path / "verdicts.jsonl"
    asker = Asker(model.write, identity="m", kept=kept, concurrent=2)
    found = await asyncio.gather(*(asker.ask(question, score, FORM) for question in ("a", "bbbb", "a", "cc", "ddd")))
    assert found == [0.1, 0.4, 0.1, 0.2, 0.3]
    assert (len(model.talks), asker.asked, asker.questions, model.most) == (4, 4, 5, 2)
    again = Asker(model.write, identity="m", kept=kept)
    assert [await again.ask("bbbb", score, FORM), again.asked] == [0.4, 0]
    other = Asker(model.write, identity="another", kept=kept)
    assert [await other.ask("bbbb", score, FORM), other.asked] == [0.4, 1]


async def test_an_answer_that_cannot_be_read_is_asked_for_again_with_the_reason() -> None:
    model = Model(lambda messages: '{"score": 7}' if len(messages) > 1 else '{"score": 77}')
    asker = Asker(model.write, identity="m")
    assert await asker.ask("how good?", score, FORM) == 0.7
    assert [(message.role, message.content) for message in model.talks[1]] == [
        ("user", "how good?"),
        ("assistant", '{"score": 77}'),
        ("user", "That cannot be read: score is 77, not from 0 to 10. Answer again, with nothing but the JSON object."),
    ]
    assert asker.failures == []


async def test_a_missing_verdict_is_none_and_noted(tmp_path: Path) -> None:
    asker = Asker(Model(lambda _: "I would say it is good.").write, identity="m", tries=3)
    assert await asker.ask("?", score, FORM) is None
    assert asker.failures == [("it holds no JSON object with 'score'", False)]

    def dead(_: Sequence[Message]) -> str:
        raise EngineError("the server is gone")

    gone = Asker(Model(dead).write, identity="m", kept=tmp_path / "kept.jsonl")
    assert await gone.ask("?", score, FORM) is None
    assert gone.failures == [("the server is gone", True)]
    assert not (tmp_path / "kept.jsonl").exists()  # a failure is not an answer

    def wrong(_: Sequence[Message]) -> str:
        raise ConfigError("the key is wrong")

    with pytest.raises(ConfigError, match="the key is wrong"):
        await Asker(Model(wrong).write, identity="m").ask("?", score, FORM)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ('Fine {not json} but {"score": 3}', 0.3),
        ('first {"score": 1}, no: ```json\n{"reason": "{}", "score": 8.5}\n``` done', 0.85),
        ('{"inner": {"score": 2}, "score": 4}', 0.4),
        ('{"other": 1} {"score": 0} {"unfinished": ', 0.0),
    ],
)
def test_the_last_object_counts(said: str, expected: float) -> None:
    assert score(said) == expected


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("", "no JSON object with 'score'"),
        ('{"score": NaN}', "score is nan, not a number"),
        ('{"score": Infinity}', "score is inf, not a number"),
        ('{"score": "8"}', "score is '8', not a number"),
        ('{"score": true}', "score is True, not a number"),
        ('{"score": -1}', "score is -1, not from 0 to 10"),
        ("{" * 2000, "no JSON object"),
    ],
)
def test_an_unreadable_answer_says_why(said: str, why: str) -> None:
    with pytest.raises(UnreadableError) as caught:
        score(said)
    assert why in str(caught.value)


def test_a_form_matches_objects_like_the_example() -> None:
    for said, fits in (
        ('{"reason": "so it is", "score": 10, "more": {"met": true, "a \\"b\\"": "x.y"}}', True),
        ('{"reason": "so it is", "score": 5, "more": {"met": true, "a \\"b\\"": "x.y"}}', False),
        ('{"reason": "so "it" is", "score": 0, "more": {"met": true, "a \\"b\\"": "x.y"}}', False),
        ('{"reason": "so it is", "score": 0, "more": {"met": true, "a \\"b\\"": "xxy"}}', False),
    ):
        assert bool(re.fullmatch(FORM, said)) is fits, said
        if fits:
            assert json.loads(said)["more"] == {"met": True, 'a "b"': "x.y"}
