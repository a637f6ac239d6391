"""How long a node may be silent, by the ticks of somebody who listened."""

from __future__ import annotations

import pytest

from router.dispatch.liveness.pace import USUAL, WIDE, Pace
from router.dispatch.liveness.silence import (
    BUSY_TICKS,
    LOSS_TICKS,
    TICK_S,
    Silence,
    SilenceVerdict,
)


def verdicts(
    silence: Silence, num_ticks: int, *, is_running: bool = False
) -> dict[int, SilenceVerdict]:
    """The ticks, from 1, that brought a verdict."""
    seen = {number: silence.tick(is_running=is_running) for number in range(1, num_ticks + 1)}
    return {
        number: verdict for number, verdict in seen.items() if verdict is not SilenceVerdict.NONE
    }


def test_suspicion_comes_first_then_the_loss_and_each_once() -> None:
    assert verdicts(Silence(), 10 * LOSS_TICKS) == {
        USUAL.suspicion: SilenceVerdict.SUSPECTED,
        LOSS_TICKS: SilenceVerdict.LOST,
    }


def test_a_busy_node_is_suspected_later_and_lost_as_soon() -> None:
    assert verdicts(Silence(), 10 * LOSS_TICKS, is_running=True) == {
        BUSY_TICKS: SilenceVerdict.SUSPECTED,
        LOSS_TICKS: SilenceVerdict.LOST,
    }


def test_a_busy_node_that_stops_is_suspected_at_once() -> None:
    silence = Silence()
    assert verdicts(silence, BUSY_TICKS - 2, is_running=True) == {}
    assert verdicts(silence, 2) == {1: SilenceVerdict.SUSPECTED}


def test_the_reason_says_whether_the_process_runs() -> None:
    silence = Silence()
    verdicts(silence, BUSY_TICKS, is_running=True)
    assert silence.reason == "nothing was heard for 3.0 s, although its process runs"
    verdicts(silence, LOSS_TICKS - BUSY_TICKS)
    assert silence.reason == "nothing was heard for 5.0 s"


def test_every_word_begins_it_anew() -> None:
    silence = Silence()
    for _ in range(30):
        assert verdicts(silence, USUAL.suspicion - 1) == {}
        silence.heard()
    assert verdicts(silence, USUAL.suspicion)[USUAL.suspicion] is SilenceVerdict.SUSPECTED
    silence.heard()
    assert verdicts(silence, USUAL.suspicion)[USUAL.suspicion] is SilenceVerdict.SUSPECTED


@pytest.mark.covers("F80")
def test_a_frozen_node_is_noticed_within_one_and_a_half_seconds_and_one_busy_for_two_is_not() -> (
    None
):
    assert USUAL.suspicion * TICK_S <= 1.5
    assert BUSY_TICKS * TICK_S >= 2.5


def test_a_node_of_many_may_be_silent_for_longer_and_no_more_than_two_seconds() -> None:
    silence = Silence()
    silence.pace = WIDE
    assert verdicts(silence, LOSS_TICKS) == {
        WIDE.suspicion: SilenceVerdict.SUSPECTED,
        LOSS_TICKS: SilenceVerdict.LOST,
    }
    assert WIDE.suspicion * TICK_S <= 2.0


@pytest.mark.parametrize("pace", [USUAL, WIDE])
def test_a_pace_leaves_room_for_a_late_message(pace: Pace) -> None:
    beat_s = max(pace.beat_ms / 1000, 0.25)
    assert beat_s < pace.late * TICK_S, "a node in order is never silent for long"
    assert beat_s + 0.75 <= (pace.suspicion - 1) * TICK_S + 0.25
    assert pace.late < pace.unreached, "a node that is busy is not taken for one that is cut off"
    assert pace.beat_ms == 0 or pace.echo_every * TICK_S < beat_s, "answers are beats"
