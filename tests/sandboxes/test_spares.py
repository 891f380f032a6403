from __future__ import annotations

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
    spares: Spares[str, int] = Spares(1)
    assert spares.ask("a") == []
    spares.put("a", 1)
    for _ in range(REMEMBERED - 1):
        assert spares.ask("b") == []
    assert spares.ask("b") == [1]
    assert spares.missing == 1
