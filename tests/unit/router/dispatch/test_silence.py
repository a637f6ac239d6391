"""How long a node may be silent, by the ticks of somebody who listened."""

from __future__ import annotations

from router.dispatch.silence import LOSS_TICKS, SUSPICION_TICKS, TICK_S, Silence, Verdict


def verdicts(silence: Silence, num_ticks: int) -> dict[int, Verdict]:
    """The ticks, from 1, that brought a verdict."""
    ticks = {tick: silence.tick() for tick in range(1, num_ticks + 1)}
    return {tick: verdict for tick, verdict in ticks.items() if verdict is not Verdict.NONE}


def test_suspicion_comes_first_then_the_loss_and_each_once() -> None:
    assert verdicts(Silence(), 10 * LOSS_TICKS) == {
        SUSPICION_TICKS: Verdict.SUSPECTED,
        LOSS_TICKS: Verdict.LOST,
    }


def test_every_word_begins_it_anew() -> None:
    silence = Silence()
    for _ in range(30):
        assert verdicts(silence, SUSPICION_TICKS - 1) == {}
        silence.heard()
    assert verdicts(silence, SUSPICION_TICKS) == {SUSPICION_TICKS: Verdict.SUSPECTED}


def test_a_frozen_node_is_noticed_within_one_and_a_half_seconds() -> None:
    assert SUSPICION_TICKS * TICK_S <= 1.5
