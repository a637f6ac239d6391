"""Whether a node gets what it is sent, by the ticks of somebody who listens."""

from __future__ import annotations

import pytest

from router.dispatch.liveness.echoes import Echoes
from router.dispatch.liveness.pace import USUAL, WIDE, Pace
from router.dispatch.liveness.silence import TICK_S, Silence


def tick(echoes: Echoes, num_ticks: int, *, is_repeated: bool) -> list[bool]:
    """After each tick: whether the node is reached."""
    seen = []
    for _ in range(num_ticks):
        number = echoes.tick()
        if is_repeated:
            echoes.heard(number)
        seen.append(echoes.is_reached)
    return seen


def known(pace: Pace = USUAL, phase: int = 0) -> Echoes:
    """A node that repeats."""
    echoes = Echoes(phase)
    echoes.pace = pace
    tick(echoes, pace.echo_every, is_repeated=True)
    return echoes


def test_a_node_that_repeats_is_reached() -> None:
    assert all(tick(Echoes(), 100, is_repeated=True))


@pytest.mark.parametrize("phase", range(3))
@pytest.mark.parametrize("pace", [USUAL, WIDE])
def test_a_node_that_does_not_repeat_any_more_is_not_reached_within_two_seconds(
    pace: Pace, phase: int
) -> None:
    for num_before in range(1, 9):
        echoes = known(pace, phase)
        tick(echoes, num_before, is_repeated=True)
        seen = tick(echoes, 100, is_repeated=False)
        first = seen.index(False)
        assert not any(seen[first:])
        # What was lost first was sent after this moment; a tick may come late by one.
        assert first >= pace.unreached
        assert (first + 1) * TICK_S <= 2.0


def test_it_is_reached_again_when_it_has_the_latest_number() -> None:
    echoes = known()
    tick(echoes, 20, is_repeated=False)
    echoes.heard(USUAL.echo_every)
    assert not echoes.is_reached, "an old number"
    assert all(tick(echoes, 20, is_repeated=True)[1:])


def test_a_node_of_an_earlier_release_is_not_judged() -> None:
    assert all(tick(Echoes(), 100, is_repeated=False))


def test_a_new_stream_begins_anew() -> None:
    echoes = known()
    tick(echoes, 20, is_repeated=False)
    echoes.restart()
    assert all(tick(echoes, 100, is_repeated=False)), "it may be an earlier release"


def test_what_was_sent_before_a_silence_is_not_waited_for() -> None:
    echoes = known()
    tick(echoes, 20, is_repeated=False)
    echoes.forgive()
    seen = tick(echoes, 20, is_repeated=False)
    assert seen.index(False) >= USUAL.unreached


def test_numbers_that_were_never_sent_excuse_nothing() -> None:
    echoes = known()
    echoes.heard(2**60)
    assert not all(tick(echoes, 20, is_repeated=False))


def test_a_stream_that_becomes_slower_is_still_judged() -> None:
    for num_before in range(1, 9):
        echoes = known()
        tick(echoes, num_before, is_repeated=True)
        echoes.pace = WIDE
        assert all(tick(echoes, 30, is_repeated=True))
        seen = tick(echoes, 30, is_repeated=False)
        assert (seen.index(False) + 1) * TICK_S <= 2.0


def test_the_numbers_of_many_nodes_are_sent_in_different_ticks() -> None:
    all_echoes = [known(WIDE, phase) for phase in range(WIDE.echo_every)]
    for _ in range(12):
        assert sum(bool(echoes.tick()) for echoes in all_echoes) == 1


@pytest.mark.covers("F121")
@pytest.mark.parametrize("is_cut_for_good", [False, True])
@pytest.mark.parametrize("busy_ms", [0, 900, 1400, 2900])
@pytest.mark.parametrize("spoken_ms", [50, WIDE.beat_ms + 20], ids=["tokens", "idle"])
def test_of_many_nodes_one_that_is_cut_off_is_noticed_and_one_that_is_busy_is_not(
    is_cut_for_good: bool, busy_ms: int, spoken_ms: int
) -> None:
    """What `NodeClient.tick` does, every 10 ms: the node speaks when asked, or by itself."""
    tick_ms = round(1000 * TICK_S)
    for cut_at_ms in range(5000, 5000 + WIDE.echo_every * tick_ms, 10):
        echoes, silence = known(WIDE), Silence()
        silence.pace = WIDE
        there = said_at_ms = 0
        noticed_at_ms = None
        for now_ms in range(0, cut_at_ms + 6000, 10):
            is_busy = cut_at_ms <= now_ms < cut_at_ms + busy_ms
            is_cut = is_cut_for_good and now_ms >= cut_at_ms
            if now_ms % tick_ms == 0:
                number = echoes.tick()
                silence.tick(is_running=True)
                if silence.has_begun:
                    echoes.forgive()
                elif not echoes.is_reached and noticed_at_ms is None:
                    noticed_at_ms = now_ms
                if number and not is_cut:
                    there, said_at_ms = number, 0  # answered at once
            if not is_busy and now_ms - said_at_ms >= spoken_ms:
                said_at_ms = now_ms
                echoes.heard(there)
                silence.heard()
        if is_cut_for_good:
            assert noticed_at_ms is not None
            assert noticed_at_ms <= cut_at_ms + busy_ms + 2000
        else:
            assert noticed_at_ms is None
