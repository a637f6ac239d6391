"""The share kept back for outputs in a running scheduler: decode steps, preemptions, idle times."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.sequences.status import SequenceStatus
from tests.support.engine.build import STRICT, Engine, make_request, status_of

LEARNING: dict[str, Any] = {
    **STRICT,
    "reservation_policy": "token_ratio",
    "init_new_token_ratio": 0.3,
}
"""So little is kept back that two sequences collide."""


def ratio(engine: Engine) -> float:
    return engine.scheduler.statistics().new_token_ratio


@pytest.mark.covers("C17", "S30")
def test_the_ratio_falls_once_per_decode_step() -> None:
    engine = Engine(num_blocks=64, block_size=16, reservation_policy="token_ratio")
    engine.add(make_request(10, max_tokens=40, ignore_eos=True))
    engine.step()
    assert ratio(engine) == 0.7, "the step that computed the prompt decoded nobody"
    num_table_extensions = 0
    for decoded in range(1, 31):
        before = len(engine.scheduler.running[0].block_table)
        engine.step()
        num_table_extensions += len(engine.scheduler.running[0].block_table) > before
        assert ratio(engine) == pytest.approx(0.7 - 0.001 * decoded)
    assert num_table_extensions == 2
    # Upstream counts rounds that scheduled something: a lone decode is scheduled when its table is
    # extended, once in 128 tokens, and takes 600 such rounds to the lowest ratio.
    assert 600 * 2 * 64 == 76_800


@pytest.mark.covers("C17")
def test_many_decodes_in_one_step_are_one_step() -> None:
    engine = Engine(num_blocks=64, seats=8, reservation_policy="token_ratio")
    for seed in range(8):
        engine.add(make_request(3, seed=seed, max_tokens=12, ignore_eos=True))
    engine.step()
    for _ in range(10):
        engine.step()
    assert ratio(engine) == pytest.approx(0.69)


@pytest.mark.covers("S30")
def test_steps_without_a_decode_do_not_lower_it() -> None:
    engine = Engine(num_blocks=64, budget=4, reservation_policy="token_ratio")
    landing = engine.add(make_request(4, seed=1), has_remote_kv=True)
    engine.add(make_request(40, max_tokens=3, ignore_eos=True))
    for _ in range(10):
        engine.step()
    assert ratio(engine) == 0.7, "chunks of a prompt"
    engine.run()
    assert ratio(engine) == pytest.approx(0.698), "two decode steps"
    assert status_of(landing) is SequenceStatus.WAITING_FOR_KV
    for _ in range(5):
        engine.step()
    assert ratio(engine) == pytest.approx(0.698), "nothing to compute"


@pytest.mark.covers("S28")
def test_a_preemption_raises_it_and_its_step_does_not_lower_it() -> None:
    engine = Engine(num_blocks=6, seats=2, caching=False, **LEARNING)
    ratios = [ratio(engine)]
    for seed in (1, 2):
        engine.add(make_request(4, seed=seed, max_tokens=16, ignore_eos=True))
    while engine.num_preemptions == 0:
        engine.step()
        ratios.append(ratio(engine))
        assert len(ratios) < 50
    assert min(ratios) < 0.3
    assert ratios[-1] == 0.3
    engine.step()
    assert ratio(engine) < 0.3


@pytest.mark.covers("E61", "S32")
@pytest.mark.parametrize("policy", ["token_ratio", "global_ratio"])
def test_it_starts_anew_when_nothing_is_left(policy: str) -> None:
    engine = Engine(num_blocks=64, reservation_policy=policy)
    engine.add(make_request(3, max_tokens=8, ignore_eos=True))
    landing = engine.add(make_request(4, seed=1, max_tokens=8, ignore_eos=True), has_remote_kv=True)
    for _ in range(12):
        engine.step()
    # Nothing runs or waits, but one is in flight.
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert list(engine.scheduler.receiving.values()) == [landing]
    assert ratio(engine) < 0.7
    engine.scheduler.finish(landing)
    engine.plan()
    assert ratio(engine) == 0.7


@pytest.mark.covers("S32")
def test_not_while_a_victim_or_anybody_else_waits() -> None:
    engine = Engine(num_blocks=6, seats=2, caching=False, **LEARNING, retract_extra_tokens=0)
    old, young = (
        engine.add(make_request(4, seed=seed, max_tokens=16, ignore_eos=True)) for seed in (1, 2)
    )
    engine.run_until(lambda: engine.num_preemptions > 0)
    engine.step()
    engine.step()
    assert list(engine.scheduler.waiting) == [young]
    before = ratio(engine)
    assert before < 0.3
    engine.scheduler.finish(old)
    assert ratio(engine) == before
    engine.plan()
    assert ratio(engine) == before
    engine.scheduler.finish(young)
    engine.plan()
    assert ratio(engine) == 0.3
