"""Where the end of a text occurred before, against a search through all of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.speculation.own_text import OwnText
from engine.core.speculation.suffix_index import (
    LONGEST,
    MOST_POSITIONS,
    SEPARATOR,
    Match,
    SuffixIndex,
    longest_of,
)
from tests.support.engine.speculation_views import View, texts, tokens_of, view_of

ALL = 10**6


def search(text: list[int], context: list[int], run_length: int) -> list[Match]:
    """Every (length, position), latest first, found by comparing at every position."""
    found = []
    for position in range(len(text) - 1, 0, -1):
        length = 0
        while (
            length < min(position, len(context))
            and text[position - 1 - length] == context[-1 - length] != SEPARATOR
        ):
            length += 1
        if length >= run_length:
            found.append((min(length, LONGEST), position))
    return found


@given(texts, st.integers(1, 4))
def test_finding_is_a_search_through_the_whole_text(text: list[int], run_length: int) -> None:
    index = SuffixIndex(run_length, most_positions=ALL)
    for token in text:
        index.extend((token,))
    assert index.find(text) == search(text, text, run_length)


@given(texts, texts)
def test_appending_at_once_or_one_by_one_is_the_same(text: list[int], more: list[int]) -> None:
    at_once, one_by_one = SuffixIndex(2), SuffixIndex(2)
    at_once.extend([*text, *more])
    one_by_one.extend(text)
    for token in more:
        one_by_one.extend((token,))
    assert at_once.find([*text, *more]) == one_by_one.find([*text, *more])


@given(texts.filter(lambda text: len(text) > 2), st.integers(2, 8))
def test_following_finds_the_longest_matches_as_a_search_does(text: list[int], at: int) -> None:
    index = SuffixIndex(2, most_positions=ALL)
    index.extend(text[:at])
    matches = index.find(text[:at])
    for end, token in enumerate(text[at:], at + 1):
        matches = index.follow(matches, token)
        index.extend((token,))
        matches = matches or index.find(text[:end])
        expected, positions = longest_of(search(text[:end], text[:end], 2))
        length, found = longest_of(matches)
        if expected < LONGEST:
            assert (length, found) == (expected, positions)
        else:
            assert length >= expected


@pytest.mark.parametrize(
    ("text", "context", "expected"),
    [
        ("", "", []),
        ("a", "a", []),
        ("abcab", "abcab", [(2, 2)]),
        ("aaaa", "aaaa", [(3, 3), (2, 2)]),
        ("xabyab", "zab", [(2, 3)]),  # the end of the text itself has nothing behind it
        ("abcdabcd", "abcd", [(4, 4)]),
        ("abcd", "q", []),
    ],
)
def test_matches(text: str, context: str, expected: list[Match]) -> None:
    index = SuffixIndex(2)
    index.extend(tokens_of(text))
    assert index.find(tokens_of(context)) == expected


def test_lengths_are_counted_up_to_a_bound() -> None:
    text = list(range(LONGEST + 5))
    index = SuffixIndex(2)
    index.extend([*text, 1000])
    assert index.find(text) == [(LONGEST, len(text))]
    assert index.find(text[-3:]) == [(3, len(text))]


def test_only_the_latest_places_are_followed() -> None:
    index = SuffixIndex(2)
    index.extend(tokens_of("ab." * 100))
    found = index.find(tokens_of("ab"))
    assert len(found) == MOST_POSITIONS
    assert all(later[1] == earlier[1] + 3 for later, earlier in pairwise(found))
    assert found[0][1] == 299


def test_no_match_reaches_across_a_separator() -> None:
    index = SuffixIndex(2)
    index.extend([1, 2, SEPARATOR, 3, 4, 5, SEPARATOR])
    assert index.find([2, SEPARATOR]) == []
    assert index.find([SEPARATOR, 3]) == []
    assert index.find([1, 2, 3, 4]) == [(2, 5)]


@given(st.lists(texts, min_size=1, max_size=6), st.data())
def test_dropped_texts_are_never_found_and_leave_nothing(
    pieces: list[list[int]], data: st.DataObject
) -> None:
    index = SuffixIndex(2, most_positions=ALL)
    kept: list[int] = []
    for piece in pieces:
        index.extend([*piece, SEPARATOR])
        kept += [*piece, SEPARATOR]
    num_pieces = data.draw(st.integers(0, len(pieces)))
    dropped = sum(len(piece) + 1 for piece in pieces[:num_pieces])
    index.drop_oldest(dropped)
    kept = kept[dropped:]
    assert index.tokens == kept
    for context in ([0, 1], [1, 1], [2, 0, 0], [3, 2, 1, 0]):
        expected = [(length, position + dropped) for length, position in search(kept, context, 2)]
        assert index.find(context) == expected
    assert index.num_runs <= len(kept)
    matches = [(2, position) for position in range(dropped + len(kept))]
    assert [position for _, position in index.still_there(matches)] == [
        *range(dropped, dropped + len(kept))
    ]


@pytest.mark.parametrize(
    ("text", "position", "most", "expected"),
    [
        ("abcdef", 2, 3, "cde"),
        ("abcdef", 4, 2, "ef"),
        ("abab", 2, 5, "ababa"),  # what follows is shorter than asked: it repeats itself
        ("aaa", 2, 4, "aaaa"),
    ],
)
def test_what_follows_a_place(text: str, position: int, most: int, expected: str) -> None:
    index = SuffixIndex(2)
    index.extend(tokens_of(text))
    assert index.tokens_from(position, most) == tokens_of(expected)


def test_places_go_on_counting_after_a_drop() -> None:
    index = SuffixIndex(2)
    index.extend([1, 2, 3, SEPARATOR])
    matches = index.find([1, 2])
    index.extend([4, 5, 6, SEPARATOR])
    index.drop_oldest(4)
    assert index.follow(matches, 3) == []
    assert index.follow(matches, 6) == []  # where a position from before would now point
    index.extend([4, 5, 7, SEPARATOR])
    assert index.find([4, 5]) == [(2, 10), (2, 6)]
    assert index.follow(index.find([4, 5]), 7) == [(3, 11)]


def test_the_text_of_a_sequence_follows_a_match_for_as_long_as_it_goes() -> None:
    copied = list(range(100, 160))
    text = OwnText(View([*copied, 1, *copied[20:], 2]))
    for token in copied:
        text.take(token)
    assert text.matches == [
        (60, 60)
    ]  # the other position was one of 40 tokens, and it was followed too


def test_a_single_token_gives_way_to_every_place_of_two() -> None:
    text = OwnText(view_of("1ab5 2ab5 3ab6 4a"))
    assert text.matches == [(1, 12)]
    text.take(ord("b"))
    assert text.matches == [(2, 13), (2, 8), (2, 3)]
