"""What the programs beside the tests say of exceptions."""

from __future__ import annotations

import pytest

from turnstile.swe.in_sandbox.channel import LONGEST, first_line


def raised(source: str) -> BaseException:
    with pytest.raises(BaseException) as caught:
        exec(source)
    return caught.value


def test_first_line_is_that_of_the_exception() -> None:
    noted = ValueError("no\nsecond line")
    if hasattr(noted, "add_note"):
        noted.add_note("ValueError: a note")
        noted.add_note("in the loop")
    assert first_line(noted) == "ValueError: no"
    assert first_line(raised("x = = 1")) == "SyntaxError: invalid syntax"
    assert first_line(raised("1 / 0")) == "ZeroDivisionError: division by zero"
    assert first_line(KeyError()) == "KeyError"
    assert "UsageError: yyy" in first_line(pytest.UsageError("y" * 10_000))
    assert len(first_line(pytest.UsageError("y" * 10_000))) == LONGEST
