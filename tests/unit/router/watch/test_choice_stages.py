"""Stages of the time to the first token: what counts where, and that they always add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.ids import AttemptId, Incarnation
from router.core.ttft_stages import Stage
from router.watch.choice_trace import ChoiceTrace
from router.watch.recent_placements import RecentPlacements
from router.watch.request_watch import RequestWatch

D0 = Incarnation("d0", 1)


class Timed(ChoiceTrace):
    """A choice's trace that is told of attempts by their number, and of no node."""

    def __init__(self, now_s: float) -> None:
        super().__init__(RequestWatch("completions", "m", now_s), "c", RecentPlacements(), now_s)

    def choosing(self, attempt: int, now_s: float) -> None:
        self.on_choosing(AttemptId("c", attempt), now_s, is_reserved=False, failure=None)

    def reserve_asked(self, attempt: int, now_s: float) -> None:
        self.on_reserve_asked(AttemptId("c", attempt), D0, now_s)

    def placed(self, attempt: int, now_s: float) -> None:
        self.on_placed(AttemptId("c", attempt), None, None, "", now_s)


def spans(watch: Timed, now_s: float, *, queue_s: float, compute_s: float) -> dict[str, float]:
    """The stages that took time: arrived 1 s before dispatch, with the client 2 s after it."""
    stages = watch.on_first_token(now_s, queue_s=queue_s, compute_s=compute_s)
    found = stages.to_client(stages.began_at_s - 1.0, now_s + 2.0)
    assert set(found) == set(Stage)
    assert sum(found.values()) == pytest.approx(now_s + 2.0 - (stages.began_at_s - 1.0))
    return {stage.value: span for stage, span in found.items() if span}


def test_a_handoff() -> None:
    watch = Timed(100.0)
    watch.choosing(1, 101.0)
    watch.reserve_asked(1, 101.0)
    watch.placed(1, 104.0)
    assert spans(watch, 120.0, queue_s=5.0, compute_s=7.0) == {
        "edge": 1.0,
        "placing": 1.0,
        "reserve": 3.0,
        "prefill_queue": 5.0,
        "prefill_compute": 7.0,
        "delivery": 6.0,
    }


def test_asking_a_node_that_refused_is_placing() -> None:
    watch = Timed(0.0)
    watch.choosing(1, 0.0)
    watch.reserve_asked(1, 0.0)
    watch.choosing(1, 10.0)  # the decode node refused
    watch.reserve_asked(1, 10.0)
    watch.placed(1, 11.0)
    watch.choosing(1, 31.0)  # the prefill node refused
    watch.placed(1, 31.0)
    assert spans(watch, 34.0, queue_s=0.0, compute_s=3.0) == {
        "edge": 1.0,
        "placing": 30.0,
        "reserve": 1.0,
        "prefill_compute": 3.0,
        "delivery": 2.0,
    }


def test_a_prompt_that_is_handed_to_nobody_reserves_nothing() -> None:
    watch = Timed(0.0)
    watch.choosing(1, 0.5)
    watch.placed(1, 0.5)
    found = spans(watch, 2.5, queue_s=0.0, compute_s=2.0)
    assert found == {"edge": 1.0, "placing": 0.5, "prefill_compute": 2.0, "delivery": 2.0}


@pytest.mark.parametrize("is_asked_first", [True, False])
def test_attempts_in_vain_are_retries(is_asked_first: bool) -> None:
    watch = Timed(0.0)
    watch.choosing(1, 1.0)
    watch.reserve_asked(1, 1.0)
    watch.placed(1, 2.0)
    if not is_asked_first:
        watch.choosing(2, 50.0)
    watch.reserve_asked(2, 50.0)
    watch.placed(2, 51.0)
    assert spans(watch, 52.0, queue_s=0.0, compute_s=1.0) == {
        "edge": 1.0,
        "reserve": 1.0,
        "prefill_compute": 1.0,
        "delivery": 2.0,
        "retries": 50.0,
    }


def test_a_token_that_overtakes_the_grant_took_what_its_node_says() -> None:
    watch = Timed(0.0)
    watch.choosing(1, 0.0)
    watch.reserve_asked(1, 0.0)
    assert spans(watch, 9.0, queue_s=2.0, compute_s=4.0) == {
        "edge": 1.0,
        "prefill_queue": 2.0,
        "prefill_compute": 4.0,
        "delivery": 5.0,
    }


@pytest.mark.parametrize(
    ("queue_s", "compute_s", "wanted"),
    [
        (8.0, 7.0, {"prefill_queue": 3.0, "prefill_compute": 7.0}),
        (1.0, 99.0, {"prefill_compute": 10.0}),
        (-5.0, -5.0, {}),
    ],
)
def test_no_node_can_claim_more_than_the_wait(
    queue_s: float, compute_s: float, wanted: dict[str, float]
) -> None:
    watch = Timed(0.0)
    watch.placed(1, 0.0)
    found = spans(watch, 10.0, queue_s=queue_s, compute_s=compute_s)
    assert {k: v for k, v in found.items() if k.startswith("prefill")} == wanted


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["choosing", "reserve_asked", "placed"]),
            st.integers(0, 1),
            st.floats(0, 100),
        ),
        max_size=20,
    ),
    st.floats(0, 1e9),
    st.floats(0, 1e9),
)
def test_whatever_happens_the_stages_add_up(
    events: list[tuple[str, int, float]], queue_s: float, compute_s: float
) -> None:
    now_s, attempt = 5000.0, 1
    watch = Timed(now_s)
    for name, more_attempts, after_s in events:
        now_s, attempt = now_s + after_s, attempt + more_attempts
        getattr(watch, name)(attempt, now_s)
    stages = watch.on_first_token(now_s + 1, queue_s=queue_s, compute_s=compute_s)
    found = stages.to_client(4990.0, now_s + 2)
    assert sum(found.values()) == pytest.approx(now_s + 2 - 4990.0, abs=1e-9)
    assert min(found.values()) >= 0
