"""What the router remembers of its last placements: every attempt, and what came of it."""

from __future__ import annotations

from common.ids import AttemptId, Incarnation
from router.watch.choice_trace import ChoiceTrace
from router.watch.recent_placements import NUM_RECENT_PLACEMENTS, RecentPlacements
from router.watch.request_watch import RequestWatch
from tests.support.observing.live_readings import placed

D1, D2, P1, P2 = (Incarnation(name, 1) for name in ("d1", "d2", "p1", "p2"))
FIRST, SECOND = AttemptId("c", 1), AttemptId("c", 2)


def traced(recent: RecentPlacements) -> ChoiceTrace:
    watch = RequestWatch("completions", "m", 0.0, request_id="http-7")
    return ChoiceTrace(watch, "c", recent, 1.0)


def told(recent: RecentPlacements) -> list[tuple[int, str, int, float | None]]:
    return [(one.attempt.attempt, one.outcome, one.num_tokens, one.duration_s) for one in recent]


def test_a_placement_is_found_before_and_after_its_end() -> None:
    recent = RecentPlacements()
    choice = traced(recent)
    choice.on_placed(FIRST, D1, P1, "why", 2.0)
    (entry,) = recent
    assert (entry.request_id, entry.decode, entry.prefill) == ("http-7", D1, P1)
    assert (entry.reason, entry.at_s) == ("why", 2.0)
    assert told(recent) == [(1, "", 0, None)]
    choice.on_end("length", FIRST, 12, 5.0)
    assert told(recent) == [(1, "length", 12, 4.0)]


def test_of_two_attempts_the_one_that_answered_has_the_outcome() -> None:
    for answering, outcomes in ((FIRST, ["stop", "retried"]), (SECOND, ["retried", "stop"])):
        recent = RecentPlacements()
        choice = traced(recent)
        choice.on_placed(FIRST, D1, None, "", 2.0)
        choice.on_placed(SECOND, D2, None, "", 3.0)
        choice.on_end("stop", answering, 5, 4.0)
        assert [one.outcome for one in recent] == outcomes
        assert [one.num_tokens for one in recent] == [5 * (o == "stop") for o in outcomes]


def test_an_attempt_that_failed_before_it_was_placed_leaves_its_error_to_the_last_one() -> None:
    recent = RecentPlacements()
    choice = traced(recent)
    choice.on_placed(FIRST, D1, None, "", 2.0)
    choice.on_end("node_lost", SECOND, 0, 4.0)
    assert told(recent) == [(1, "node_lost", 0, 3.0)]


def test_a_prefill_node_that_refused_is_a_placement_of_its_own() -> None:
    recent = RecentPlacements()
    choice = traced(recent)
    choice.on_placed(FIRST, D1, P1, "", 2.0)
    choice.on_placed(FIRST, D1, P2, "", 3.0)
    assert told(recent) == [(1, "refused", 0, 2.0), (1, "", 0, None)]
    choice.on_end("stop", FIRST, 5, 4.0)
    assert told(recent) == [(1, "refused", 0, 2.0), (1, "stop", 5, 3.0)]


def test_changes_are_told_once_and_in_order() -> None:
    recent = RecentPlacements()
    one, two = placed(recent, "r1", D1), placed(recent, "r2", D2)
    assert recent.changed_since(0) == [one, two]
    seen = recent.num_changes
    assert recent.changed_since(seen) == []
    recent.end(one, "stop", duration_s=1.0)
    assert recent.changed_since(seen) == [one]


def test_only_the_last_ones_are_kept() -> None:
    recent = RecentPlacements()
    first = placed(recent, "r", D1)
    for number in range(NUM_RECENT_PLACEMENTS):
        placed(recent, f"r{number}", D1)
    assert len(recent) == NUM_RECENT_PLACEMENTS
    recent.end(first, "stop", duration_s=1.0)  # without effect on what is kept
    assert first not in list(recent)
