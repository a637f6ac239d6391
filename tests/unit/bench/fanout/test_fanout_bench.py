"""The simulated part of the fan-out benchmark, and one decode end on a real socket."""

from __future__ import annotations

from contextlib import closing

import pytest

from bench.fanout import __main__ as fanout
from bench.fanout.decode_ends import DecodeEnds
from bench.fanout.prefill_end import PrefillEnd
from bench.fanout.simulated import SimulatedFanout
from tests.support.clocks.lines_run import lines_run


def test_simulated_nodes_take_every_handoff() -> None:
    world = SimulatedFanout(3)
    assert world.hand_off(7) > 0.0
    assert [end.num_landed for end in world.ends.values()] == [3, 2, 2]
    assert world.idle(1.0) >= 0.0
    assert world.now_s == 1.0


@pytest.mark.covers("F120")
def test_a_handoff_costs_the_same_with_many_nodes() -> None:
    """Lines of Python of both machines, all of whose links are open."""

    def cost(num_ends: int) -> float:
        world = SimulatedFanout(num_ends)
        world.hand_off(num_ends)
        world.idle(1.0)
        return lines_run(lambda: world.hand_off(num_ends)) / num_ends

    assert cost(300) <= 1.05 * cost(4)


@pytest.mark.covers("F120")
def test_many_idle_links_cost_nothing() -> None:
    world = SimulatedFanout(300)
    world.hand_off(300)
    world.idle(1.0)
    # Less than one line per link in 10 s.
    assert lines_run(lambda: world.idle(10.0)) < 300


def test_handoffs_land_over_sockets() -> None:
    with closing(DecodeEnds(2, 5)) as decode, closing(PrefillEnd()) as prefill:
        assert prefill.hand_off(decode.reserve()) > 0.0
        decode.check_landed(5)
        with pytest.raises(RuntimeError, match="5 handoffs landed, not 6"):
            decode.check_landed(6)


class _NotMeasured:
    """Another process of the benchmark, and the machines alone: each takes what is written here."""

    def __init__(self, *_: object) -> None:
        pass

    def call(self, name: str, *_: object) -> float:
        return {"hand_off": 1.0, "idle": 0.002}.get(name, 0.0)

    def hand_off(self, num_handoffs: int) -> float:
        return 1e-3 * num_handoffs

    def idle(self, span_s: float) -> float:
        return 0.001

    def close(self) -> None:
        pass


def test_every_number_of_nodes_has_its_cost_and_its_idle_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 1,000 nodes those of the machine alone."""
    for name in ("Remote", "SimulatedFanout"):
        monkeypatch.setattr(fanout, name, _NotMeasured)
    found = fanout.run(num_rounds=1, idle_s=1.0)
    assert list(found) == ["n1", "n32", "n250", "n1000", "n250_over_n1"]
    machine = {"machine_us_per_handoff": 1000.0, "machine_idle_share": 0.001}
    real = {"cpu_ms_per_handoff": 2.0, "idle_cpu_share": 0.002, **machine}
    assert found["n1"] == found["n32"] == found["n250"] == real
    assert found["n1000"] == {"cpu_ms_per_handoff": 1.0, "idle_cpu_share": 0.001, **machine}
    assert found["n250_over_n1"] == 1.0
