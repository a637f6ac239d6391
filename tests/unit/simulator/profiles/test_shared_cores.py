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
    cores = SharedCores(at_once, decode_slowdown=slowdown)
    steps = [cores.begin(1.0, lambda: None, 0.0) for _ in range(num_steps)]
    assert [cores.done_at_s(step) for step in steps] == pytest.approx([took_s] * num_steps)


def test_a_step_with_a_prompt_is_slowed_by_a_factor_of_its_own() -> None:
    cores = SharedCores(2, decode_slowdown=1.5, prompt_slowdown=1.25)
    prompt = cores.begin(1.0, lambda: None, 0.0, computes_prompts=True)
    decode = cores.begin(0.4, lambda: None, 0.0)
    assert cores.done_at_s(decode) == pytest.approx(0.6)
    assert cores.done_at_s(prompt) == pytest.approx(1.25)
    cores.end(decode, 0.6)
    assert cores.done_at_s(prompt) == pytest.approx(0.6 + 1.0 - 0.6 / 1.25)
