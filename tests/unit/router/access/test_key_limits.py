"""A key's token bucket and its requests at once."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.access.key_limits import KeyLimits, Limit, Refusal


def limits(rate: int = 0, at_once: int = 0, now_s: float = 0.0) -> KeyLimits:
    return KeyLimits(requests_per_minute=rate, max_concurrent=at_once, now_s=now_s)


UNLIMITED = 10_000
"""As many requests as are tried."""


def take_all(state: KeyLimits, now_s: float) -> int:
    """How many requests get in at once, each ending at once."""
    for count in range(UNLIMITED):
        if state.take(now_s) is not None:
            return count
        state.release()
    return UNLIMITED


def test_without_limits_everything_gets_in() -> None:
    assert take_all(limits(), 100.0) == UNLIMITED


def test_a_quiet_minute_may_be_used_at_once_and_no_more_than_a_minute_is_kept() -> None:
    state = limits(rate=30)
    assert take_all(state, 100.0) == 30
    assert take_all(state, 160.0) == 30
    assert take_all(state, 10_000.0) == 30


def test_a_client_that_waits_as_long_as_it_is_told_gets_in_and_not_before() -> None:
    state = limits(rate=7)
    assert take_all(state, 100.0) == 7
    assert state.take(100.0) == Refusal(Limit.RATE, 9)
    assert state.take(108.5) == Refusal(Limit.RATE, 1)
    assert state.take(109.0) is None


def test_refusals_use_nothing_up() -> None:
    state = limits(rate=1)
    assert state.take(0) is None
    for _ in range(100):
        assert state.take(30.0) == Refusal(Limit.RATE, 30)
    assert state.take(60.0) is None

    state = limits(rate=2, at_once=1)
    assert state.take(0) is None
    assert state.take(0) == Refusal(Limit.CONCURRENCY, 1)
    state.release()
    assert state.take(0) is None


def test_requests_at_once() -> None:
    state = limits(at_once=2)
    assert [state.take(0), state.take(0)] == [None, None]
    assert state.num_running == 2
    assert state.take(1e6) == Refusal(Limit.CONCURRENCY, 1)
    state.release()
    assert state.take(1e6) is None


def test_what_was_used_stays_used_when_limits_change() -> None:
    state = limits(rate=10)
    for _ in range(8):
        assert state.take(0) is None
    state.change(requests_per_minute=9, max_concurrent=8, now_s=0)
    assert state.take(0) == Refusal(Limit.CONCURRENCY, 1)
    state.release()
    assert state.take(0) is None
    state.release()
    assert state.take(0) == Refusal(Limit.RATE, 7)
    state.change(requests_per_minute=0, max_concurrent=0, now_s=0)
    assert take_all(state, 0) == UNLIMITED
    state.change(requests_per_minute=5, max_concurrent=0, now_s=0)
    assert take_all(state, 0) == 5


def test_a_lower_limit_than_what_was_used_is_not_a_debt() -> None:
    state = limits(rate=1000)
    assert take_all(state, 0) == 1000
    state.change(requests_per_minute=6, max_concurrent=0, now_s=0)
    assert state.take(0) == Refusal(Limit.RATE, 10)
    assert state.take(10) is None


@pytest.mark.parametrize("rate", [1, 7, 60, 999, 1_000_000])
@given(start_s=st.floats(0, 1e7), gaps=st.lists(st.floats(0, 90), min_size=1, max_size=40))
@example(start_s=8e-8, gaps=[0.0, 0.0, 0.0, 1.0481336793683909, 0.088, 0.0, 0.0])
def test_in_any_span_no_more_than_a_bucket_and_its_refill(
    rate: int, start_s: float, gaps: list[float]
) -> None:
    state = limits(rate=rate, now_s=start_s)
    now_s, accepted = start_s, 0
    for gap_s in gaps:
        now_s += gap_s
        refusal = state.take(now_s)
        if refusal is None:
            accepted += 1
            state.release()
        else:
            later = now_s + refusal.retry_after_s
            assert 1 <= refusal.retry_after_s <= 60
            assert state.take(later) is None, "who waits as told gets in"
            state.release()
            now_s, accepted = later, accepted + 1
        assert accepted <= rate + (now_s - start_s) * rate / 60 + 1e-3
