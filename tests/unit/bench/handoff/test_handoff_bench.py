"""What the handoff benchmark makes of its measurements."""

from __future__ import annotations

import time

import numpy as np

from bench.handoff.figures import Handoff, figures, worst_of
from bench.handoff.paced_runner import LAYOUT_8B, PacedRunner
from bench.handoff.prefill_end import Case
from bench.handoff.slow_nodes import NUM_BLOCKS, SlowNodes
from common.request import SamplingParams
from engine.core.runner_contract import SampleInput, ScheduledSequence
from tests.support.engine.hash_runner import layout as hash_layout

MB = 1_000_000


def handoff(hidden: int = 90, exposed_s: float = 0.01, ttft_s: float = 1.0) -> Handoff:
    return Handoff(
        num_bytes=100 * MB,
        hidden_bytes=hidden * MB,
        exposed_s=exposed_s,
        ttft_s=ttft_s,
        sender_cpu_s=0.05,
        receiver_cpu_s=0.02,
    )


def test_figures_are_over_all_bytes_and_all_time() -> None:
    found = figures([handoff(), handoff(hidden=100, exposed_s=0.03, ttft_s=3.0)])
    assert found == {
        "hidden_share": 0.95,
        "exposed_ms_p50": 20.0,
        "exposed_ms_p99": 29.8,
        "exposed_over_ttft": 0.01,
        "cpu_s_per_gb_sender": 0.5,
        "cpu_s_per_gb_receiver": 0.2,
        "ttft_ms_p50": 2000.0,
        "mb_per_handoff": 100.0,
        "handoffs": 2,
    }


def test_a_transport_is_as_good_as_its_worse_layout() -> None:
    good, bad = figures([handoff(hidden=99)]), figures([handoff(hidden=50, exposed_s=0.5)])
    worst = worst_of({"demo": good, "synthetic_8b": bad})
    assert worst["hidden_share"] == 0.5
    assert worst["exposed_ms_p99"] == 500.0
    assert worst == worst_of({"demo": bad, "synthetic_8b": good})
    assert "ttft_ms_p50" not in worst


def test_the_paced_runner_takes_its_time_layer_by_layer() -> None:
    runner = PacedRunner(tokens_per_s=10_000, num_blocks=2, host_memory=lambda *_: None)
    assert runner.kv_bytes.shape == (36, 2, 2, LAYOUT_8B.piece_bytes)
    sample = SampleInput(SamplingParams(max_tokens=2), 0, [], [])
    batch = [
        ScheduledSequence(1, range(400), 0, [0], None),
        ScheduledSequence(2, range(100), 0, [1], sample),
    ]
    at_s: list[float] = []
    began_at_s = time.monotonic()
    first, second = runner.execute(batch, lambda layer: at_s.append(time.monotonic()))
    assert first is None
    assert second is not None
    assert len(at_s) == 36
    # Never early, whatever the machine does meanwhile.
    due_s = began_at_s + np.arange(1, 37) * 0.05 / 36
    assert (np.array(at_s) >= due_s).all()


def test_slow_nodes_open_one_landing_each_for_tokens_of_their_own() -> None:
    case = Case(layout="synthetic_8b", transport="zmq", tokens_per_s=4000.0)
    slow = SlowNodes(case, hash_layout(4), 2)
    try:
        tickets = slow.reserve()
    finally:
        slow.close()
    assert len({ticket.kv_endpoint for ticket in tickets}) == 2
    assert len({ticket.lease_token for ticket in tickets}) == 2
    assert all(len(ticket.target_block_ids) == NUM_BLOCKS for ticket in tickets)
