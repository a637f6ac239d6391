"""A choice's attempts as spans: each ends once, whatever ends it, and a retry is an event."""

from __future__ import annotations

from common.errors import NodeLost
from common.ids import AttemptId, Incarnation
from common.observing.tracing import NO_SPAN
from router.watch.choice_trace import ChoiceTrace
from router.watch.recent_placements import RecentPlacements
from router.watch.request_watch import MAX_SHOWN_CHOICES, MAX_SHOWN_NODES, RequestWatch
from tests.support.engine.build import make_request
from tests.support.observing.recorded_tracing import RecordedTracing

D1, D2, P1 = (Incarnation(name, 1) for name in ("d1", "d2", "p1"))
FIRST, SECOND = AttemptId("c", 1), AttemptId("c", 2)


def traced() -> tuple[RecordedTracing, RequestWatch, ChoiceTrace]:
    tracing = RecordedTracing()
    watch = RequestWatch("completions", "m", 0.0)
    watch.span = tracing.span("request", 0.0, parent="")
    return tracing, watch, ChoiceTrace(watch, "c", RecentPlacements(), 0.0)


def test_refused_once_then_handed_off() -> None:
    tracing, watch, choice = traced()
    choice.on_choosing(FIRST, 1.0, is_reserved=False, failure=None)
    choice.on_reserve_asked(FIRST, D1, 1.5)
    choice.on_choosing(FIRST, 2.0, is_reserved=False, failure=None)
    choice.on_reserve_asked(FIRST, D2, 2.5)
    choice.on_placed(FIRST, D2, P1, "why", 3.0)
    choice.on_placed(FIRST, D2, P1, "why", 3.5)
    choice.on_end("stop", FIRST, 5, 9.0)
    assert tracing.shown()[1:] == [
        ("attempt", "request", 1.0, 9.0, ""),
        ("reserve", "attempt", 1.5, 2.0, "refused"),
        ("reserve", "attempt", 2.5, 3.0, ""),
    ]
    attempt = tracing.spans[1]
    assert attempt.attributes["pdserve.decode_node"] == "d2"
    assert attempt.attributes["pdserve.prefill_node"] == "p1"
    assert attempt.attributes["pdserve.placement_reason"] == "why"
    assert list(watch.nodes) == ["p1", "d2"]
    assert watch.num_retries == 0


def test_a_reservation_whose_prefill_node_refused_was_granted() -> None:
    tracing, _, choice = traced()
    choice.on_choosing(FIRST, 1.0, is_reserved=False, failure=None)
    choice.on_reserve_asked(FIRST, D1, 1.5)
    choice.on_choosing(FIRST, 2.0, is_reserved=True, failure=None)
    choice.on_end("overloaded", FIRST, 0, 3.0)
    assert tracing.shown()[1:] == [
        ("attempt", "request", 1.0, 3.0, "overloaded"),
        ("reserve", "attempt", 1.5, 2.0, ""),
    ]


def test_a_retry_is_a_second_attempt_and_an_event() -> None:
    tracing, watch, choice = traced()
    choice.on_choosing(FIRST, 1.0, is_reserved=False, failure=None)
    choice.on_placed(FIRST, D1, None, "", 2.0)
    choice.on_choosing(SECOND, 3.0, is_reserved=False, failure=NodeLost("gone"))
    choice.on_reserve_asked(SECOND, D2, 3.5)
    choice.on_end("node_lost", SECOND, 0, 4.0)
    assert tracing.shown()[1:] == [
        ("attempt", "request", 1.0, 3.0, "node_lost"),
        ("attempt", "request", 3.0, 4.0, "node_lost"),
        ("reserve", "attempt", 3.5, 4.0, "node_lost"),
    ]
    request = tracing.spans[0]
    retry = {"pdserve.attempt": 2, "error.type": "node_lost"}
    assert request.events == [("retry", 3.0, retry)]
    assert watch.num_retries == 1


def test_a_local_attempt_after_every_prefill_node_refused() -> None:
    tracing, _, choice = traced()
    choice.on_choosing(FIRST, 1.0, is_reserved=False, failure=None)
    choice.on_reserve_asked(SECOND, D1, 2.0)
    choice.on_end("abort", SECOND, 0, 3.0)
    names = [(name, end, error) for name, _, _, end, error in tracing.shown()[1:]]
    assert names == [("attempt", 2.0, "refused"), ("attempt", 3.0, ""), ("reserve", 3.0, "")]


def test_what_goes_to_a_node_names_the_attempt() -> None:
    tracing, _, choice = traced()
    choice.on_choosing(FIRST, 1.0, is_reserved=False, failure=None)
    request = make_request(4)
    assert choice.asks(request).traceparent == tracing.spans[1].traceparent
    untraced = ChoiceTrace(RequestWatch("completions", "m", 0.0), "c", RecentPlacements(), 0.0)
    untraced.on_choosing(FIRST, 1.0, is_reserved=False, failure=None)
    assert untraced.asks(request) is request


def test_what_is_shown_is_bounded() -> None:
    watch = RequestWatch("completions", "m", 0.0, span=NO_SPAN)
    for number in range(100):
        choice = ChoiceTrace(watch, f"c{number}", RecentPlacements(), 0.0)
        choice.on_placed(FIRST, Incarnation(f"d{number}", 1), None, "", 1.0)
    assert len(watch.nodes) == MAX_SHOWN_NODES
    assert (len(watch.choices), watch.num_choices) == (MAX_SHOWN_CHOICES, 100)
