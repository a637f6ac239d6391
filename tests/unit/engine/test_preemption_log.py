"""The lines of the log about preemptions: what they say, and how many there are."""

from __future__ import annotations

import logging

import pytest

from engine.core.blocks.block_pool import BlockCounts
from engine.core.step.step_in_flight import Preempted
from engine.preemption_log import LOG_EVERY_S, PreemptionLog
from tests.support.engine.build import STRICT, Engine, make_request


def preempted(
    *, blocks: int = 1, priority: int = 0, lost: int = 10, ratio: float = 0.1
) -> Preempted:
    return Preempted(
        num_for_blocks=blocks,
        num_for_priority=priority,
        num_lost_tokens=lost,
        ratio_before=ratio,
        ratio_after=ratio + 0.2,
        blocks=BlockCounts(free=1, cached=2, running=3, reserved=4, receiving=5, quarantined=6),
        num_running=7,
        num_waiting=8,
    )


@pytest.mark.covers("S58")
def test_a_line_says_how_many_and_why_what_was_lost_and_how_the_pool_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="pdserve.engine")
    PreemptionLog().on_step(preempted(blocks=2, priority=1, lost=345), 100.0)
    assert caplog.messages == [
        "preempted 3 sequences, 2 for blocks and 1 for more urgent requests: 345 computed tokens "
        "lost their KV; new_token_ratio 0.100 -> 0.300; 7 sequences run and 8 wait; "
        "blocks: 1 free, 2 cached, 3 running, 4 reserved, 5 receiving, 6 quarantined"
    ]


@pytest.mark.covers("S58")
def test_steps_within_some_seconds_share_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pdserve.engine")
    log = PreemptionLog()
    log.on_step(preempted(), 100.0)
    for count in range(1, 5):
        log.on_step(preempted(lost=count, ratio=0.1 * count), 100.0 + count)
    assert len(caplog.messages) == 1
    # The next line comes when it is due, with or without another preemption.
    log.on_step(None, 100.0 + LOG_EVERY_S)
    assert len(caplog.messages) == 2
    assert caplog.messages[1].startswith("preempted 4 sequences, 4 for blocks")
    assert "10 computed tokens" in caplog.messages[1]
    assert "new_token_ratio 0.100 -> 0.600" in caplog.messages[1]
    log.on_step(None, 200.0)
    assert len(caplog.messages) == 2
    log.on_step(preempted(lost=7), 300.0)
    assert "7 computed tokens" in caplog.messages[2]


def test_the_scheduler_says_what_a_step_preempted() -> None:
    engine = Engine(
        num_blocks=6,
        seats=2,
        caching=False,
        enable_priority_scheduling=True,
        **{**STRICT, "reservation_policy": "global_ratio", "init_new_token_ratio": 0.01},
    )
    for seed in (1, 2):
        engine.add(make_request(8, seed=seed, max_tokens=12, ignore_eos=True))
    step = engine.plan()
    assert step.preempted is None
    engine.apply(step)
    engine.add(make_request(2, seed=3, max_tokens=2, priority=1))
    step = engine.plan()
    found = step.preempted
    assert found is not None
    assert (found.num_for_blocks, found.num_for_priority, found.num_lost_tokens) == (0, 1, 8)
    assert (found.num_running, found.num_waiting) == (2, 1)
    assert found.blocks == engine.scheduler.pool.counts()
    engine.apply(step)
    found = None
    while found is None:
        step = engine.plan()
        found = step.preempted
        engine.apply(step)
    assert (found.num_for_blocks, found.num_for_priority) == (1, 0)
    assert found.ratio_before <= found.ratio_after == engine.scheduler.reservation.ratio
