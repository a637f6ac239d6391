"""Stop strings: found wherever they are cut, and never shown in part."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.output.stop_strings import StopStrings, without_marks


def shown_by(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopStrings(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.is_stopped:
            return shown, True
    return shown + matcher.flush(), False


def reference(stops: list[str], text: str, first_end: int = 1) -> tuple[str, bool]:
    """The stop that ends first, the longest of those; by looking at every prefix."""
    for end in range(first_end, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "is_stopped"),
    [
        ([], ["a", "b"], "ab", False),
        (["END"], ["text E", "N", "D more"], "text ", True),
        (["END"], ["EN", "EN", "D"], "EN", True),
        (["END"], ["the EN"], "the EN", False),
        (["aab"], ["a", "a", "a", "b"], "a", True),
        (["b", "abc"], ["abc"], "a", True),
        (["cd", "bcd"], ["abcd"], "a", True),
        (["\n\n"], ["one\n", "\ntwo"], "one", True),
        (["🙂"], ["ok 🙂"], "ok ", True),
    ],
)
def test_examples(stops: list[str], pieces: list[str], shown: str, is_stopped: bool) -> None:
    assert shown_by(stops, pieces) == (shown, is_stopped)


@pytest.mark.covers("T04")
@settings(deadline=None, derandomize=True)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_cuts_never_matter(stops: list[str], pieces: list[str]) -> None:
    assert shown_by(stops, pieces) == reference(stops, "".join(pieces))


@pytest.mark.covers("T04")
@settings(deadline=None, derandomize=True)
@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3), st.text("abc"))
def test_no_more_is_held_than_may_become_a_stop(stops: list[str], text: str) -> None:
    matcher = StopStrings(stops)
    shown = ""
    for place, char in enumerate(text):
        shown += matcher.push(char)
        if matcher.is_stopped:
            return
        held = text[len(shown) : place + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_may_begin_inside_one_that_did_not_count() -> None:
    matcher = StopStrings(["aba"])
    assert matcher.push("xaba", can_stop=False) == "xab"
    assert matcher.push("ba") == ""
    assert matcher.is_stopped


@settings(deadline=None, derandomize=True)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    early=st.text("ab", max_size=12),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_a_stop_that_ends_where_none_may_is_text(
    stops: list[str], early: str, pieces: list[str]
) -> None:
    matcher = StopStrings(stops)
    shown = matcher.push(early, can_stop=False)
    assert early.startswith(shown)
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.is_stopped:
            break
    else:
        shown += matcher.flush()
    wanted = reference(stops, early + "".join(pieces), len(early) + 1)
    assert (shown, matcher.is_stopped) == wanted


NAMED = {"<x>": 5, "<x><y>": 6}
Units = list[str]
"""Characters, and special tokens: the names of these."""


def units_of(stop: str) -> Units:
    """A stop string whose special tokens are tokens, the longest names first."""
    units: Units = []
    while stop:
        found = next((name for name in ("<x><y>", "<x>") if stop.startswith(name)), stop[0])
        units.append(found)
        stop = stop[len(found) :]
    return units


def reference_of_units(stops: list[str], units: Units) -> tuple[str, str | None]:
    """What is shown, and the stop string that ends first, spelled or not: by every prefix."""
    patterns = {tuple(units_of(stop)): stop for stop in stops} | {tuple(one): one for one in stops}
    for end in range(1, len(units) + 1):
        ended = [one for one in patterns if tuple(units[:end][-len(one) :]) == one]
        if ended:
            longest = max(ended, key=lambda one: len(patterns[one]))
            return shown_of(units[: end - len(longest)]), patterns[longest]
    return shown_of(units), None


def shown_of(units: Units) -> str:
    return "".join(unit for unit in units if len(unit) == 1)


@pytest.mark.covers("T24")
@settings(deadline=None, derandomize=True)
@given(
    stops=st.lists(
        st.lists(st.sampled_from(["a", "<", "x", "<x>", "<x><y>"]), min_size=1, max_size=3).map(
            "".join
        ),
        max_size=3,
    ),
    units=st.lists(st.sampled_from(["a", "<", "x", ">", "y", "<x>", "<x><y>"]), max_size=16),
)
def test_special_tokens_that_are_named_are_found_and_not_shown(
    stops: list[str], units: Units
) -> None:
    named = {name: at for name, at in NAMED.items() if any(name in units_of(one) for one in stops)}
    matcher = StopStrings(stops, named_tokens=named)
    shown = ""
    for unit in units:
        token_id = NAMED.get(unit)
        text = unit if token_id is None else matcher.mark_of.get(token_id, "")
        shown += matcher.push(text)
        if matcher.is_stopped:
            break
    else:
        shown += matcher.flush()
    known = [unit for unit in units if len(unit) == 1 or unit in named]
    assert (without_marks(shown), matcher.found) == reference_of_units(stops, known)


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
    matcher = StopStrings(["a"])
    matcher.push("a")
    with pytest.raises(ValueError, match="after"):
        matcher.push("b")
