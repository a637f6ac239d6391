"""Suffix decoding: the most frequent way on, in the request's own text and in recent outputs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.speculation.suffix import SuffixDrafter, most_frequent_path
from engine.core.speculation.suffix_index import SEPARATOR
from tests.support.engine.speculation_views import View, text_of, texts, tokens_of, view_of


def remember(drafter: SuffixDrafter, output: str, sequence_id: int = 100) -> None:
    """A request with this output ran and ended."""
    view = view_of("?", output, sequence_id=sequence_id)
    drafter.propose(view, 1)
    drafter.forget(view)


@pytest.mark.parametrize(
    ("known", "most", "expected"),
    [
        ("", 4, ""),
        ("abcd", 4, ""),
        ("abcdefab", 3, "cde"),
        ("abab", 5, "ababa"),
        ("aaaa", 3, "aaa"),
        ("abcab", 0, ""),
        ("pab1 qab2 rab3 sab2 tab", 1, "2"),  # the most frequent child
        ("pab1 qab2 rab", 1, "2"),  # equally frequent: the most recent
        ("cab1 ab2 ab2 cab", 1, "1"),  # the longest suffix decides, not the frequent shorter one
    ],
)
def test_proposals_from_the_own_text(known: str, most: int, expected: str) -> None:
    proposal = SuffixDrafter().propose(view_of(known), most)
    assert text_of(proposal.token_ids) == expected
    assert len(proposal.chances) == len(expected)


@pytest.mark.parametrize(
    ("outputs", "known", "expected"),
    [
        (["hello world"], "xhel", "lo w"),
        (["hello world"], "he", ""),  # two tokens are too little to follow others
        (["hello world"], "xworld", ""),  # the output ended there
        (["world", "hell"], "xorl", "d"),  # no match and no path reaches into the next output
        (["thing one", "thing two", "thing two"], "thing ", "two"),
        (["hello world"], "elp hel", "lo w"),  # three from an output before two of its own
        (["help me"], "help you, hel", "p yo"),  # equally long: the request's own text
    ],
)
def test_proposals_from_recent_outputs(outputs: list[str], known: str, expected: str) -> None:
    drafter = SuffixDrafter()
    for i, output in enumerate(outputs):
        remember(drafter, output, 100 + i)
    assert text_of(drafter.propose(view_of(known), 4).token_ids) == expected


@pytest.mark.parametrize(
    ("branches", "path", "shares"),
    [
        ([], "", ()),
        (["abc"], "abc", (1, 1, 1)),
        (["abc", "abc"], "abc", (1, 1, 1)),
        (["abc", "abd", "xyz", "abd"], "abd", (0.75, 0.75, 0.5)),
        (["ab", "cd"], "ab", (0.5, 0.5)),
    ],
)
def test_the_path_follows_the_most_leaves(
    branches: list[str], path: str, shares: tuple[float, ...]
) -> None:
    found = most_frequent_path([tokens_of(branch) for branch in branches])
    assert found == (tokens_of(path), shares)


def test_a_path_ends_at_a_separator() -> None:
    assert most_frequent_path([(5, SEPARATOR, 7)]) == ((5,), (1.0,))
    assert most_frequent_path([(SEPARATOR, 6), (SEPARATOR, 7)]) == ((), ())
    assert most_frequent_path([(1, SEPARATOR, 6), (2, 3, 4), (1, SEPARATOR, 7)])[0] == (1,)


def brute_force_length(known: list[int]) -> int:
    """Tokens of the longest suffix that occurred before."""
    for length in range(len(known) - 1, 0, -1):
        if any(known[e - length : e] == known[-length:] for e in range(length, len(known))):
            return length
    return 0


@given(texts, texts)
def test_incremental_equals_a_fresh_look(prompt: list[int], output: list[int]) -> None:
    view, drafter = View(prompt[:10]), SuffixDrafter()
    for token in output[:10]:
        drafter.propose(view, 4)
        view.output_token_ids.append(token)
    proposal = drafter.propose(view, 4)
    assert proposal.token_ids == SuffixDrafter().propose(View(view.known), 4).token_ids
    assert bool(proposal.token_ids) == (brute_force_length(view.known) > 0)
    assert list(proposal.chances) == sorted(proposal.chances, reverse=True)


def test_disagreeing_places_are_trusted_less() -> None:
    drafter = SuffixDrafter()
    agreed = drafter.propose(view_of("pab1 qab1 rab", sequence_id=1), 1).chances
    torn = drafter.propose(view_of("pab1 qab2 rab", sequence_id=2), 1).chances
    assert torn[0] == pytest.approx(agreed[0] / 2)


def test_an_unlikely_path_is_cut() -> None:
    drafter = SuffixDrafter()
    known = "".join(f"{chr(300 + i)}ab{chr(400 + i)}" for i in range(16)) + "ab"
    view = view_of(known)
    assert len(drafter.propose(view, 4).token_ids) == 4
    assert drafter.propose(view, 4, 0.1).token_ids == ()


@given(st.lists(st.tuples(st.integers(1, 5), texts), max_size=30))
def test_recent_outputs_are_bounded_and_dropped_as_a_whole(
    requests: list[tuple[int, list[int]]],
) -> None:
    most = 64
    drafter = SuffixDrafter(most_recent_tokens=most)
    remembered: list[list[int]] = []
    for i, (first, output) in enumerate(requests):
        view = View([first], output, sequence_id=i)
        drafter.propose(view, 4)
        drafter.forget(view)
        if len(output) >= 3:
            remembered.append(output)
        while sum(len(kept) + 1 for kept in remembered) > most:
            remembered.pop(0)
        assert drafter.num_recent_tokens == sum(len(kept) + 1 for kept in remembered)
    assert drafter.num_sequences == 0


def test_an_output_longer_than_all_room_is_not_remembered() -> None:
    drafter = SuffixDrafter(most_recent_tokens=8)
    remember(drafter, "abcdef")
    remember(drafter, "0123456789")
    assert drafter.num_recent_tokens == 7


def test_recent_outputs_are_looked_up_again_when_the_text_went_another_way() -> None:
    drafter = SuffixDrafter()
    remember(drafter, "hello world")
    view = view_of("xhel", sequence_id=1)
    assert text_of(drafter.propose(view, 4).token_ids) == "lo w"
    for token in tokens_of("p a wor"):
        view.output_token_ids.append(token)
        drafter.propose(view, 4)
    assert text_of(drafter.propose(view, 4).token_ids) == "ld"


def test_of_two_matches_the_one_that_was_dropped_meanwhile_counts_no_more() -> None:
    drafter = SuffixDrafter(most_recent_tokens=12)
    remember(drafter, "abcx")
    remember(drafter, "abcy")
    asked = view_of("zabc", sequence_id=1)
    torn = drafter.propose(asked, 1)
    remember(drafter, "012")
    alone = drafter.propose(asked, 1)
    assert text_of(alone.token_ids) == "y"
    assert alone.chances[0] == pytest.approx(2 * torn.chances[0])


def test_a_match_in_an_output_that_was_dropped_meanwhile_is_given_up() -> None:
    drafter = SuffixDrafter(most_recent_tokens=12)
    remember(drafter, "hello world")
    asked, unasked = view_of("xwo r wor", sequence_id=1), view_of("hell", sequence_id=2)
    assert text_of(drafter.propose(asked, 4).token_ids) == "ld"
    assert text_of(drafter.propose(unasked, 4).token_ids) == "o wo"
    remember(drafter, "0123456789")
    assert text_of(drafter.propose(asked, 4).token_ids) == " wor"  # the last letter's own position
    unasked.output_token_ids.append(ord("o"))
    assert drafter.propose(unasked, 4).token_ids == ()


def test_forgetting_one_that_never_decoded_here_remembers_nothing() -> None:
    drafter = SuffixDrafter()
    drafter.forget(view_of("abc", "secret words"))
    assert drafter.num_recent_tokens == 0
