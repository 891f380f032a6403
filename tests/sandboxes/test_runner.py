from __future__ import annotations

import ast
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstile.sandboxes import runner
from turnstile.sandboxes.runner import Cut


def test_an_old_python_can_read_it() -> None:
    ast.parse(inspect.getsource(runner), feature_version=(3, 7))


def cut(data: bytes, limit: int, piece: int) -> str:
    made = Cut(limit)
    for start in range(0, len(data), piece):
        made.feed(data[start : start + piece])
    return made.text()


@given(st.text(max_size=60), st.integers(2, 40), st.integers(1, 30))
def test_head_and_tail_are_kept_and_the_rest_is_counted(text: str, limit: int, piece: int) -> None:
    found = cut(text.encode(errors="replace"), limit, piece)
    text = text.encode(errors="replace").decode()
    if len(text) <= limit:
        assert found == text
    else:
        tail = limit - limit // 2
        assert found == f"{text[: limit // 2]}\n[... {len(text) - limit} characters left out ...]\n{text[-tail:]}"


@pytest.mark.parametrize("piece", [1, 2, 100])
def test_what_is_no_text_is_shown_as_such(piece: int) -> None:
    assert cut(b"a\xff\xc3\xa9\xe2\x82", 100, piece) == "a\ufffdé\ufffd"
