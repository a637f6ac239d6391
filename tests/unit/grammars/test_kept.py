"""What is kept of compiled grammars is bounded by what it weighs."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import Overloaded
from common.grammar import Grammar, GrammarKind
from grammars import kept as kept_module
from grammars.kept import FOLLOWED_BYTES, KeptGrammars

MATCHER: Any = object()


def regex(number: int) -> Grammar:
    return Grammar(GrammarKind.REGEX, f"a{number}")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "MAX_KEPT_BYTES", 100_000)


def test_the_last_used_are_kept_while_there_is_room() -> None:
    kept = KeptGrammars()
    for number in range(3):
        kept.keep(regex(number), MATCHER, 40_000)
        assert kept.get(regex(0)) is MATCHER, "it is used all the time"
        assert kept.num_bytes <= 100_000
    assert kept.get(regex(1)) is None
    assert kept.get(regex(2)) is MATCHER


def test_what_is_held_stays_and_nothing_more_than_the_bound_is_held() -> None:
    kept, first, second = KeptGrammars(), regex(1), regex(2)
    kept.keep(regex(1), MATCHER, 40_000)
    kept.keep(regex(2), MATCHER, 40_000)
    assert kept.hold(first)
    assert kept.hold(second)
    with pytest.raises(Overloaded, match="requests in progress"):
        kept.keep(regex(3), MATCHER, 40_000)
    assert kept.num_bytes == 80_000
    del second
    kept.keep(regex(3), MATCHER, 40_000)
    assert kept.get(regex(1)) is MATCHER
    assert kept.get(regex(2)) is None
    assert not kept.hold(regex(2))


def test_one_that_is_held_twice_is_kept_until_both_end() -> None:
    kept, one, other = KeptGrammars(), regex(1), regex(1)
    kept.keep(regex(1), MATCHER, 90_000)
    assert kept.hold(one)
    assert kept.hold(other)
    del one
    with pytest.raises(Overloaded):
        kept.keep(regex(2), MATCHER, 90_000)
    del other
    kept.keep(regex(2), MATCHER, 90_000)
    assert kept.num_bytes == 90_000


def test_a_grammar_grows_while_it_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "MAX_GROWTH_BYTES", 50 * FOLLOWED_BYTES)
    kept = KeptGrammars()
    kept.keep(regex(1), MATCHER, 1000)
    kept.count_followed(regex(1), 10)
    assert kept.num_bytes == kept.bytes_of(regex(1)) == 1000 + 10 * FOLLOWED_BYTES
    kept.count_followed(regex(1), 1000)
    assert kept.num_bytes == 1000 + 50 * FOLLOWED_BYTES
    kept.count_followed(regex(2), 10)
    kept.keep(regex(3), MATCHER, 90_000)
    assert kept.num_bytes == 90_000, "what it grew by went with it"


def test_what_grows_beyond_the_bound_is_told_when_nothing_else_can_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_module, "USUAL_GROWTH_BYTES", 40_000)
    kept, one, other = KeptGrammars(), regex(1), regex(2)
    kept.keep(one, MATCHER, 40_000)
    kept.hold(one)
    kept.keep(regex(2), MATCHER, 40_000)
    kept.grow(one, 30_000)
    assert kept.get(other) is None, "nobody holds it"
    assert kept.num_bytes == 70_000
    kept.keep(other, MATCHER, 20_000)
    kept.hold(other)
    with pytest.raises(Overloaded, match="this one grows"):
        kept.grow(regex(1), 20_000)
    kept.grow(regex(3), 1)  # is not kept
    kept.grow(other, 40_000)  # is usual
    kept.forget(one)
    del one
    assert kept.num_bytes == 60_000
    kept.grow(other, 20_000)


def test_a_forgotten_one_weighs_as_long_as_it_is_held() -> None:
    kept, one = KeptGrammars(), regex(1)
    kept.keep(one, MATCHER, 40_000)
    kept.hold(one)
    kept.forget(one)
    assert kept.get(one) is None
    assert not kept.hold(regex(1)), "a new request compiles it anew"
    assert kept.get(one, is_held=True) is MATCHER
    kept.keep(regex(1), object(), 10_000)  # type: ignore[arg-type]
    assert kept.num_bytes == 50_000
    del one
    assert kept.num_bytes == 10_000
    kept.forget(regex(1))
    assert (len(kept), kept.num_bytes) == (0, 0)
