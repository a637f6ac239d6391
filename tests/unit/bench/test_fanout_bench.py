"""The simulated part of the fan-out benchmark, and one decode end on a real socket."""

from __future__ import annotations

from contextlib import closing

import pytest

from bench.fanout.decode_ends import DecodeEnds
from bench.fanout.prefill_end import PrefillEnd
from bench.fanout.simulated import SimulatedFanout


def test_simulated_nodes_take_every_handoff() -> None:
    world = SimulatedFanout(3)
    assert world.hand_off(7) > 0.0
    assert [end.num_landed for end in world._ends.values()] == [3, 2, 2]
    assert world.idle(1.0) >= 0.0
    assert world.now_s == 1.0


def test_handoffs_land_over_sockets() -> None:
    with closing(DecodeEnds(2, 5)) as decode, closing(PrefillEnd()) as prefill:
        assert prefill.hand_off(decode.reserve()) > 0.0
        decode.check_landed(5)
        with pytest.raises(RuntimeError, match="5 handoffs landed, not 6"):
            decode.check_landed(6)
