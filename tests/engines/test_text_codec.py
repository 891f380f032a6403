"""Conversations as code points and markers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile.agents.renderer_messages import MessagesRenderer
from turnstile.engines.text_codec import (
    END_ID,
    ROLES,
    TextTokenizer,
    decode_messages,
    decode_text,
    encode_messages,
    encode_text,
)
from turnstile.types import Message, ToolSpec

TALKS = st.lists(st.tuples(st.sampled_from(ROLES), st.text(st.characters())), min_size=1)


@given(TALKS)
def test_decodes_encoded_messages(talk: list[tuple[str, str]]) -> None:
    joined: list[tuple[str, str]] = []
    for role, text in talk:
        if joined and joined[-1][0] == role:
            text = f"{joined.pop()[1]}\n\n{text}"
        joined.append((role, text))
    assert decode_messages(encode_messages(talk)) == joined
    assert decode_messages(encode_messages(talk, head=True)) == joined


@given(st.text(st.characters()))
def test_texts_and_end_markers(text: str) -> None:
    ids = encode_text(text)
    assert (
        decode_text(ids) == decode_text(np.append(ids, [END_ID, *ids])) == TextTokenizer().decode(ids.tolist()) == text
    )
    assert TextTokenizer().encode(text) == ids.tolist()


def test_rejects_ids_of_a_tokenizer() -> None:
    for ids in ([], [5, 6], [END_ID]):
        with pytest.raises(ValueError, match="a tokenizer's ids"):
            decode_messages(np.array(ids, np.int32))


def test_truncated_turn_is_ended_before_the_next_message() -> None:
    renderer = MessagesRenderer()
    tool = ToolSpec(name="look", description="Look.", schema={"type": "object", "properties": {}})
    prompt = renderer.prompt([Message(role="user", content="Go.")], [tool])
    cut, whole = encode_text("I lo"), renderer.completion("I look.")
    new = [Message(role="tool", content="seen")]
    for sampled, text in ((cut, "I lo"), (whole, "I look.")):
        context = renderer.observation([], new, [tool], sampled)
        assert not context.fresh
        told = decode_messages(np.concatenate([prompt, sampled, context.ids]))
        assert told[1:] == [("assistant", text), ("user", "seen")]
        assert renderer.text(sampled) == text
    assert told[0][1].startswith("Go.\n\n")
    assert "look" in told[0][1]
