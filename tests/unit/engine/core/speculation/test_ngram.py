"""Prompt lookup: what it proposes, that it says the same however it was asked, what it keeps."""

from __future__ import annotations

import pytest
from hypothesis import given

from engine.core.speculation.ngram import NgramDrafter
from tests.support.engine.speculation_views import View, text_of, texts, view_of


@pytest.mark.parametrize(
    ("known", "most", "expected"),
    [
        ("", 4, ""),
        ("a", 4, ""),
        ("abcd", 4, ""),  # nothing occurs twice
        ("abcdefab", 3, "cde"),
        ("abcdefab", 8, "cdefabcd"),  # K is larger than what follows: the text repeats itself
        ("xaby abz ab", 2, "z "),  # of equally long matches the most recent
        ("cab1 xab2 cab", 1, "1"),  # a longer match before a more recent one
        ("ababab", 4, "abab"),  # a period of two
        ("aaaa", 3, "aaa"),  # a period of one
        ("abcabc", 0, ""),
        ("the cat sat. the cat", 5, " sat."),
        ("abxyab", 1, "x"),
        ("qab", 2, ""),  # the match would be the end of the text itself
        ("abxcb", 2, "xc"),  # a single token
        ("abxabyzb", 2, "yz"),  # the latest of several
    ],
)
def test_proposals(known: str, most: int, expected: str) -> None:
    proposal = NgramDrafter().propose(view_of(known), most)
    assert text_of(proposal.token_ids) == expected
    assert len(proposal.chances) == len(expected)


def brute_force(known: list[int], most: int) -> tuple[int, ...]:
    """The most recent of the longest matches, found by trying every suffix from the longest on."""
    for length in range(len(known) - 1, 0, -1):
        for end in range(len(known) - 1, length - 1, -1):
            if known[end - length : end] == known[-length:]:
                text = list(known)
                for position in range(end, end + most):
                    text.append(text[position])
                return tuple(text[len(known) :])
    return ()


@given(texts, texts)
def test_incremental_equals_brute_force(prompt: list[int], output: list[int]) -> None:
    # 16 tokens of a match are compared when it is found: short prompts stay below that.
    view, drafter = View(prompt[:16]), NgramDrafter()
    for token in output[:16]:
        assert drafter.propose(view, 4).token_ids == brute_force(view.known, 4)
        view.output_token_ids.append(token)
    assert drafter.propose(view, 4).token_ids == brute_force(view.known, 4)


@given(texts, texts)
def test_the_answer_does_not_depend_on_when_it_was_asked(
    prompt: list[int], output: list[int]
) -> None:
    view, rare = View(prompt[:16]), NgramDrafter()
    rare.propose(view, 4)
    view.output_token_ids += output[:16]
    assert rare.propose(view, 4).token_ids == brute_force(view.known, 4)
    assert rare.propose(view, 4) == rare.propose(view, 4)


def test_chances_fall_along_the_drafts_and_rise_with_the_match() -> None:
    drafter = NgramDrafter()
    short = drafter.propose(view_of("abcdefghijab", sequence_id=1), 4).chances
    long = drafter.propose(view_of("abcdefghijabcdefg", sequence_id=2), 4).chances
    assert 0 < short[-1] < short[0] < long[0] < 1
    assert list(short) == sorted(short, reverse=True)


def test_a_text_that_always_deceives_is_trusted_less_and_less() -> None:
    drafter, view = NgramDrafter(), view_of("")
    first = drafter.propose(view_of("abcab", sequence_id=9), 1).chances[0]
    for i in range(1000, 1300):  # the pair (7, 7) is followed by another token each time
        view.output_token_ids += [7, 7]
        drafter.propose(view, 1)
        view.output_token_ids.append(i)
        drafter.propose(view, 1)
    view.output_token_ids += [7, 7]
    assert drafter.propose(view, 1).chances[0] < 0.1 < first


def test_sequences_do_not_see_each_other() -> None:
    drafter = NgramDrafter()
    drafter.propose(view_of("abcdefgh", sequence_id=1), 4)
    assert drafter.propose(view_of("xyab", sequence_id=2), 4).token_ids == ()


def test_drafts_below_the_lowest_chance_are_left_out() -> None:
    view = view_of("abcdefghijabcd")
    chances = NgramDrafter().propose(view, 8).chances
    some = NgramDrafter().propose(view, 8, chances[2])
    assert text_of(some.token_ids) == "efg"
    assert some.chances == chances[:3]
    assert NgramDrafter().propose(view, 8, 0.99) == ((), ())


def test_a_forgotten_sequence_leaves_nothing() -> None:
    drafter, view = NgramDrafter(), view_of("abcab")
    drafter.propose(view, 4)
    assert drafter.num_sequences == 1
    drafter.forget(view)
    drafter.forget(view)  # unknown by now
    assert drafter.num_sequences == 0
