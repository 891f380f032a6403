from __future__ import annotations

import pytest

from turnstile.sandboxes.spares import REMEMBERED, Spares


def test_only_one_of_the_kind_is_taken_and_the_oldest() -> None:
    spares: Spares[str, int] = Spares(3)
    for kind, member in (("a", 1), ("b", 2), ("a", 3)):
        spares.put(kind, member)
    assert (len(spares), spares.missing) == (3, 0)
    assert [spares.take("a"), spares.take("a"), spares.take("a")] == [1, 3, None]
    assert spares.missing == 2
    assert spares.empty() == [2]
    assert len(spares) == 0


def test_a_kind_that_is_not_asked_for_any_more_makes_room() -> None:
    spares: Spares[str, int] = Spares(2)
    assert spares.ask("a") == []
    spares.put("a", 1)
    for _ in range(2 * REMEMBERED - 1):
        assert spares.ask("b") == []
    assert spares.ask("b") == [1]
    assert spares.missing == 2


def test_a_kind_without_any_takes_the_place_of_the_one_asked_for_longest_ago() -> None:
    spares: Spares[str, int] = Spares(2)
    for kind, member in (("a", 1), ("b", 2)):
        assert spares.ask(kind) == []
        spares.put(kind, member)
    spares.ask("a")
    assert spares.ask("c") == [2]
    spares.put("c", 3)
    assert (spares.take("a"), spares.take("c")) == (1, 3)
    assert spares.ask("b") == []  # there is room


def hits(kinds: str, most: int) -> int:
    """How many requests found a spare, where each is followed by a refill with its kind, as the sandboxes do."""
    spares: Spares[str, object] = Spares(most)
    found = 0
    for kind in kinds:
        spares.ask(kind)
        found += spares.take(kind) is not None
        for _ in range(spares.missing):
            spares.put(kind, object())
        assert len(spares) == most
    return found


@pytest.mark.parametrize(
    ("kinds", "misses"),
    [
        ("a" * 480, 1),
        ("ab" * 240, 2),
        ("".join(kind * 8 for kind in "abcdef" * 10), 60),  # the first of each group of attempts
        ("abc" * 160, 480),  # more kinds in turn than there are places
    ],
)
def test_how_many_find_one_ready(kinds: str, misses: int) -> None:
    assert hits(kinds, 2) == len(kinds) - misses
    assert hits(kinds, 0) == 0
