"""How long a node may be silent, by the ticks of somebody who listened."""

from __future__ import annotations

from router.dispatch.silence import (
    BUSY_TICKS,
    LOSS_TICKS,
    PROBE_TICKS,
    SUSPICION_TICKS,
    TICK_S,
    Silence,
    Verdict,
)


def verdicts(silence: Silence, num_ticks: int, *, is_answered: bool = False) -> dict[int, Verdict]:
    """The ticks, from 1, that brought a verdict; every probe gets an answer if `is_answered`."""
    seen: dict[int, Verdict] = {}
    for number in range(1, num_ticks + 1):
        verdict = silence.tick()
        if verdict is not Verdict.NONE:
            seen[number] = verdict
        if verdict is Verdict.PROBE and is_answered:
            silence.answered()
    return seen


def test_a_probe_comes_first_then_suspicion_then_the_loss_and_each_once() -> None:
    assert verdicts(Silence(), 10 * LOSS_TICKS) == {
        PROBE_TICKS: Verdict.PROBE,
        SUSPICION_TICKS: Verdict.SUSPECTED,
        LOSS_TICKS: Verdict.LOST,
    }


def test_a_busy_node_is_suspected_later_and_lost_as_soon() -> None:
    assert verdicts(Silence(), 10 * LOSS_TICKS, is_answered=True) == {
        **dict.fromkeys(range(PROBE_TICKS, BUSY_TICKS, PROBE_TICKS), Verdict.PROBE),
        BUSY_TICKS: Verdict.SUSPECTED,
        LOSS_TICKS: Verdict.LOST,
    }


def test_a_node_that_answers_no_more_is_suspected_as_soon_as_if_it_never_had() -> None:
    silence = Silence()
    verdicts(silence, PROBE_TICKS, is_answered=True)
    assert verdicts(silence, SUSPICION_TICKS) == {
        PROBE_TICKS: Verdict.PROBE,
        SUSPICION_TICKS: Verdict.SUSPECTED,
    }


def test_every_word_begins_it_anew() -> None:
    silence = Silence()
    for _ in range(30):
        assert verdicts(silence, SUSPICION_TICKS - 1) == {PROBE_TICKS: Verdict.PROBE}
        silence.heard()
    assert verdicts(silence, SUSPICION_TICKS)[SUSPICION_TICKS] is Verdict.SUSPECTED
    silence.heard()
    assert verdicts(silence, SUSPICION_TICKS)[SUSPICION_TICKS] is Verdict.SUSPECTED


def test_a_frozen_node_is_noticed_within_one_and_a_half_seconds_and_one_busy_for_two_is_not() -> (
    None
):
    """F80."""
    assert SUSPICION_TICKS * TICK_S <= 1.5
    assert BUSY_TICKS * TICK_S >= 2.5
