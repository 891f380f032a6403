"""Conversations as code points and marks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile.agents.renderer_messages import MessagesRenderer
from turnstile.engines.text_codec import END, ROLES, Spelling, conversation, spelled, text_of, written
from turnstile.types import Message, ToolSpec

TALKS = st.lists(st.tuples(st.sampled_from(ROLES), st.text(st.characters())), min_size=1)


@given(TALKS)
def test_what_is_written_is_read(talk: list[tuple[str, str]]) -> None:
    joined: list[tuple[str, str]] = []
    for role, text in talk:
        if joined and joined[-1][0] == role:
            text = f"{joined.pop()[1]}\n\n{text}"
        joined.append((role, text))
    assert conversation(written(talk)) == joined
    assert conversation(written(talk, head=True)) == joined


@given(st.text(st.characters()))
def test_texts_and_their_ends(text: str) -> None:
    ids = spelled(text)
    assert text_of(ids) == text_of(np.append(ids, [END, *ids])) == Spelling().decode(ids.tolist()) == text
    assert Spelling().encode(text) == ids.tolist()


def test_ids_of_a_tokenizer_are_refused() -> None:
    for ids in ([], [5, 6], [END]):
        with pytest.raises(ValueError, match="ids of a tokenizer"):
            conversation(np.array(ids, np.int32))


def test_a_turn_that_was_cut_is_ended_before_what_follows() -> None:
    renderer = MessagesRenderer()
    tool = ToolSpec(name="look", description="Look.", schema={"type": "object", "properties": {}})
    prompt = renderer.prompt([Message(role="user", content="Go.")], [tool])
    cut, whole = spelled("I lo"), renderer.completion("I look.")
    new = [Message(role="tool", content="seen")]
    for sampled, text in ((cut, "I lo"), (whole, "I look.")):
        context = renderer.observation([], new, [tool], sampled)
        assert not context.fresh
        told = conversation(np.concatenate([prompt, sampled, context.ids]))
        assert told[1:] == [("assistant", text), ("user", "seen")]
        assert renderer.text(sampled) == text
    assert told[0][1].startswith("Go.\n\n")
    assert "look" in told[0][1]
