"""Steps on cores that nodes share: equal shares, and the ends that follow from them."""

from __future__ import annotations

import pytest

from simulator.profiles.shared_cores import NO_SLOWDOWN, SharedCores, Slowdowns

SLOWDOWNS = Slowdowns(
    answers_beside_answers=1.2,
    answers_beside_prompts=1.5,
    prompts_beside_answers=1.25,
    prompts_beside_prompts=1.4,
)


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
    cores = SharedCores(at_once, NO_SLOWDOWN._replace(answers_beside_answers=slowdown))
    steps = [cores.begin(1.0, lambda: None, 0.0) for _ in range(num_steps)]
    assert [cores.done_at_s(step) for step in steps] == pytest.approx([took_s] * num_steps)


@pytest.mark.parametrize(("is_prompt", "beside", "slowdown"), [
    (False, [False], 1.2), (False, [True], 1.5), (True, [False], 1.25), (True, [True], 1.4),
])  # fmt: skip
def test_a_step_is_slowed_by_its_kind_and_by_what_runs_beside_it(
    is_prompt: bool, beside: list[bool], slowdown: float
) -> None:
    cores = SharedCores(2, SLOWDOWNS)
    step = cores.begin(1.0, lambda: None, 0.0, computes_prompts=is_prompt)
    for one in beside:
        cores.begin(9.0, lambda: None, 0.0, computes_prompts=one)
    assert cores.done_at_s(step) == pytest.approx(slowdown)


def test_each_moment_counts_by_what_runs_beside_a_step_then() -> None:
    """Half a second beside a prompt, half a second beside two others, then beside an answer."""
    cores, told = SharedCores(2, SLOWDOWNS), list[str]()
    decode = cores.begin(1.0, lambda: told.append("decode"), 0.0)
    prompt = cores.begin(9.0, lambda: None, 0.0, computes_prompts=True)
    other = cores.begin(9.0, lambda: None, 0.5)
    cores.end(prompt, 1.0)
    assert told == ["decode"] * 3
    done = 0.5 / 1.5 + 0.5 * (2 / 3) / ((1.5 + 1.2) / 2)
    assert cores.done_at_s(decode) == pytest.approx(1.0 + (1 - done) * 1.2)
    cores.end(other, 1.1)
    assert cores.done_at_s(decode) == pytest.approx(1.1 + 1 - done - 0.1 / 1.2), "alone again"


def test_prompts_that_have_ended_slow_nothing() -> None:
    cores = SharedCores(2, SLOWDOWNS)
    prompt = cores.begin(1.0, lambda: None, 0.0, computes_prompts=True)
    decode = cores.begin(0.4, lambda: None, 0.0)
    assert cores.done_at_s(decode) == pytest.approx(0.6)
    assert cores.done_at_s(prompt) == pytest.approx(1.25)
    cores.end(decode, 0.6)
    assert cores.done_at_s(prompt) == pytest.approx(0.6 + 1.0 - 0.6 / 1.25)
    cores.end(prompt, 1.12)
    first, second = (cores.begin(1.0, lambda: None, 2.0) for _ in range(2))
    assert cores.done_at_s(first) == cores.done_at_s(second) == pytest.approx(3.2)
