"""When the KV connector's thread counts as hung."""

from __future__ import annotations

from node.flow.step_progress import TICK_S
from node.life.connector_watch import MOST_TURN_S, TurnWatch

NUM_LOOKS = round(MOST_TURN_S / TICK_S)


def test_a_thread_hangs_when_no_turn_ends_for_the_limit() -> None:
    watch = TurnWatch()
    watch.look(7)
    for _ in range(NUM_LOOKS):
        watch.look(7)
        assert not watch.is_hung
    watch.look(7)
    assert watch.is_hung


def test_each_turn_starts_the_time_anew() -> None:
    watch = TurnWatch()
    for turn in range(5):
        for _ in range(NUM_LOOKS):
            watch.look(turn)
        assert not watch.is_hung
    watch.look(turn)
    assert not watch.is_hung
    watch.look(turn)
    assert watch.is_hung, "the last turn has its own whole limit"
