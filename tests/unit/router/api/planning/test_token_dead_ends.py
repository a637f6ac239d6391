"""A request that can draw nothing is refused; one that can draw something never is."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.request import SamplingParams
from common.token_rules import TokenRules
from router.api.planning.token_dead_ends import check_drawable

EOS = frozenset({0})
Words = tuple[tuple[int, ...], ...]
NARROW: Words = ((5, 5), (5, 7), (6, 5), (6, 6), (6, 7), (7, 6), (7, 7))


def is_drawable(
    allowed: tuple[int, ...], bad: Words = (), max_tokens: int = 9, **more: object
) -> bool:
    rules = TokenRules(allowed_token_ids=allowed, bad_words=bad)
    sampling = SamplingParams(max_tokens=max_tokens, rules=rules, **more)  # type: ignore[arg-type]
    try:
        check_drawable(sampling, sampling.max_tokens, EOS)
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (is_drawable((5,)), True),
        (is_drawable((5,), ((5, 5),)), False),
        (is_drawable((5,), ((5, 5),), max_tokens=1), True),
        (is_drawable((5,), ((5, 5, 5),), max_tokens=2), True),
        (is_drawable((5,), ((5, 5, 5),), max_tokens=3), False),
        (is_drawable((5, 6), ((5, 5), (6, 6))), True),
        (is_drawable((5, 6), ((5, 5), (6, 6), (5, 6))), False),
        (is_drawable((5, 0), ((5, 5),)), True),
        (is_drawable((5, 0), ((5, 5),), min_tokens=1), True),
        (is_drawable((5, 0), ((5, 5),), min_tokens=2), False),
        (is_drawable((0,)), True),
        (is_drawable((0,), min_tokens=1), False),
        (is_drawable((0,), min_tokens=1, ignore_eos=True), False),
        (is_drawable((7,), stop_token_ids=(7,)), True),
        (is_drawable((7,), stop_token_ids=(7,), min_tokens=1), False),
        (is_drawable((5, 6), ((5,), (6, 6))), False),
        (is_drawable((5, 6), ((5,), (6, 6, 5))), True),
        # Only 7, 5, 6 is left, and 5 cannot be followed by two tokens.
        (is_drawable((5, 6, 7), NARROW, max_tokens=3), True),
        (is_drawable((7, 6, 5), NARROW, max_tokens=3), True),
        (is_drawable((5, 6, 7), NARROW, max_tokens=4), False),
    ],
)
def test_cases(found: bool, wanted: bool) -> None:
    assert found is wanted


TOKENS = st.integers(0, 3)


@given(
    st.frozensets(TOKENS, min_size=1),
    st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=8),
    st.integers(1, 5),
    st.integers(0, 5),
    st.booleans(),
)
def test_it_is_what_trying_every_output_finds(
    allowed: frozenset[int], bad: list[tuple[int, ...]], most: int, least: int, ignores: bool
) -> None:
    least = min(least, most)
    if allowed <= {word[0] for word in bad if len(word) == 1}:
        return  # `TokenRules` refuses it

    def is_output(tokens: tuple[int, ...]) -> bool:
        for index, token_id in enumerate(tokens):
            if token_id == 0 and index < least:
                return False
            if any(tokens[max(0, index + 1 - len(word)) : index + 1] == word for word in bad):
                return False
            if token_id == 0 and not ignores:
                return True
        return True

    wanted = any(map(is_output, itertools.product(sorted(allowed), repeat=most)))
    found = is_drawable(tuple(allowed), tuple(bad), most, min_tokens=least, ignore_eos=ignores)
    assert found is wanted


@pytest.mark.parametrize("most", [2, 3, 4])
def test_no_output_near_its_end_is_overlooked(most: int) -> None:
    """Three tokens, with every set of pairs and some triples as bad words."""
    draw = random.Random(most)
    pairs = list(itertools.product((1, 2, 3), repeat=2))
    triples = list(itertools.product((1, 2, 3), repeat=3))
    for number in range(2 ** len(pairs)):
        bad = [pair for at, pair in enumerate(pairs) if number >> at & 1]
        bad += draw.sample(triples, number % 4)
        allowed = tuple(draw.sample((1, 2, 3), 3))

        def is_output(tokens: tuple[int, ...], bad: list[tuple[int, ...]] = bad) -> bool:
            return not any(
                tokens[at : at + len(word)] == word for word in bad for at in range(len(tokens))
            )

        wanted = any(map(is_output, itertools.product(allowed, repeat=most)))
        assert is_drawable(allowed, tuple(bad), most) is wanted, (allowed, bad)


def test_the_search_is_short() -> None:
    """128 words of 32 tokens: of any two tokens all sequences are refused, but one by one."""
    draw = random.Random(1)
    bad = tuple((*tuple(draw.choices((7, 8), k=31)), 7 + at % 2) for at in range(128))
    began_s = time.process_time()
    assert is_drawable((7, 8), bad, max_tokens=8192)
    assert not is_drawable((9,), ((9,) * 32,), max_tokens=8192)
    assert time.process_time() - began_s < 1.0


def test_many_tokens_and_ends_are_compared_once() -> None:
    eos, allowed = frozenset(range(300)), tuple(range(300, 16_684))
    rules = TokenRules(allowed_token_ids=allowed, bad_words=((300,),))
    began_s = time.process_time()
    check_drawable(SamplingParams(max_tokens=9, rules=rules), 9, eos)
    banned = tuple((one,) for one in allowed[:100])
    rules = TokenRules(allowed_token_ids=(*range(200), *allowed[:101]), bad_words=banned)
    check_drawable(SamplingParams(max_tokens=9, rules=rules), 9, eos)
    assert time.process_time() - began_s < 0.1
