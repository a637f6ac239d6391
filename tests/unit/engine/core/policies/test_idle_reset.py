"""A scheduler resets what its reservation has learnt exactly when nothing is left to do."""

from __future__ import annotations

import pytest

from tests.support.engine.build import Engine, make_request


@pytest.mark.covers("E61")
def test_a_sequence_in_flight_keeps_the_ratio() -> None:
    engine = Engine(reservation_policy="token_ratio")
    engine.add(make_request(4, max_tokens=6, ignore_eos=True))
    receiving = engine.add(make_request(4, seed=1), has_remote_kv=True)
    engine.run()
    worn = engine.scheduler.reservation.ratio
    assert worn == 0.7 - 5 * 0.001
    assert list(engine.scheduler.receiving.values()) == [receiving]
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    engine.plan()
    assert engine.scheduler.reservation.ratio == worn
    engine.scheduler.finish(receiving)
    engine.plan()
    assert engine.scheduler.reservation.ratio == 0.7
