"""Steps on cores that nodes share: equal shares, and the ends that follow from them."""

from __future__ import annotations

import pytest

from simulator.profiles.shared_cores import SharedCores


def test_a_step_alone_takes_its_time() -> None:
    cores = SharedCores(1)
    step = cores.begin(2.0, lambda: None, 5.0)
    assert cores.done_at_s(step) == 7.0
    assert cores.done_at_s(step, 0.25) == 5.5


def test_steps_that_are_too_many_get_equal_shares_from_then_on() -> None:
    cores, told = SharedCores(1), list[str]()
    first = cores.begin(2.0, lambda: told.append("first"), 0.0)
    second = cores.begin(0.5, lambda: told.append("second"), 1.0)
    assert told == ["first"], "the one that begins knows its end"
    assert cores.done_at_s(second) == 2.0
    assert cores.done_at_s(first) == 3.0
    cores.end(second, 2.0)
    assert told == ["first", "first"]
    assert cores.done_at_s(first) == 2.5
    assert cores.done_at_s(first, 0.5) == 2.0, "that share was done before"


@pytest.mark.parametrize(("at_once", "slowdown", "num_steps", "took_s"), [
    (2, 1.0, 2, 1.0), (2, 1.2, 1, 1.0), (2, 1.2, 2, 1.2), (2, 1.2, 3, 1.8), (1, 1.2, 2, 2.0),
    (1, 2.5, 2, 2.0),
])  # fmt: skip
def test_others_slow_a_step_down_by_caches_and_by_cores(
    at_once: int, slowdown: float, num_steps: int, took_s: float
) -> None:
    """On the cores of one node nothing runs beside a step, whatever two nodes at once measured."""
    cores = SharedCores(at_once, slowdown)
    steps = [cores.begin(1.0, lambda: None, 0.0) for _ in range(num_steps)]
    assert [cores.done_at_s(step) for step in steps] == pytest.approx([took_s] * num_steps)
