"""Pairs of nodes that fail to hand off: avoided for growing pauses, and tried again by one."""

from __future__ import annotations

import pytest

from common.ids import Incarnation
from router.core.known.pair_health import FIRST_PAUSE_S, MAX_PAIRS, MOST_PAUSE_S, PairHealth

P, D = Incarnation("p", 1), Incarnation("d", 1)
PAIR, OTHER = (P, D), (Incarnation("p", 2), D)


@pytest.mark.covers("F30")
def test_a_pair_that_failed_is_avoided_for_a_pause() -> None:
    pairs = PairHealth()
    assert pairs.avoided(0.0) == frozenset()
    assert pairs.on_failed(PAIR, 5.0) == (1, FIRST_PAUSE_S)
    assert pairs.avoided(5.0) == {PAIR}
    assert pairs.avoided(5.0 + FIRST_PAUSE_S) == frozenset()


def test_one_attempt_tries_it_and_the_others_wait_for_it() -> None:
    pairs = PairHealth()
    pairs.on_failed(PAIR, 0.0)
    pairs.on_placed(PAIR, FIRST_PAUSE_S)
    assert pairs.avoided(FIRST_PAUSE_S) == {PAIR}
    assert pairs.on_worked(PAIR)
    assert pairs.avoided(FIRST_PAUSE_S) == frozenset()
    assert len(pairs) == 0
    assert not pairs.on_worked(PAIR)


def test_a_try_of_which_nothing_is_heard_is_followed_by_another() -> None:
    pairs = PairHealth()
    pairs.on_failed(PAIR, 0.0)
    pairs.on_placed(PAIR, FIRST_PAUSE_S)
    assert pairs.avoided(2 * FIRST_PAUSE_S) == frozenset()


def test_the_pauses_grow_to_a_limit() -> None:
    pairs, now_s, pauses = PairHealth(), 0.0, []
    for _ in range(10):
        failed = pairs.on_failed(PAIR, now_s)
        assert failed is not None
        pauses.append(failed[1])
        now_s += failed[1]
        pairs.on_placed(PAIR, now_s)
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == MOST_PAUSE_S


def test_attempts_that_were_placed_before_count_as_one_failure() -> None:
    """Twenty answers run on the pair when it breaks."""
    pairs = PairHealth()
    first = [pairs.on_failed(PAIR, 0.1 * number) for number in range(20)]
    assert first == [(1, FIRST_PAUSE_S)] + 19 * [None]
    assert pairs.avoided(FIRST_PAUSE_S) == frozenset()


def test_an_attempt_within_the_pause_is_no_try() -> None:
    pairs = PairHealth()
    pairs.on_failed(PAIR, 0.0)
    pairs.on_placed(PAIR, FIRST_PAUSE_S / 2)
    assert pairs.avoided(FIRST_PAUSE_S) == frozenset()
    assert pairs.on_failed(PAIR, FIRST_PAUSE_S) is None


def test_other_pairs_of_the_nodes_are_not_avoided() -> None:
    pairs = PairHealth()
    pairs.on_failed(PAIR, 0.0)
    assert OTHER not in pairs.avoided(0.0)
    pairs.on_placed(OTHER, 0.0)
    assert len(pairs) == 1


def test_what_is_remembered_is_bounded() -> None:
    pairs = PairHealth()
    for number in range(MAX_PAIRS + 5):
        pairs.on_failed((P, Incarnation("d", number)), 0.0)
    assert len(pairs) == MAX_PAIRS
