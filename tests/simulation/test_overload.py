"""Load beyond what a node can take: requests wait, and throughput does not fall."""

from __future__ import annotations

import random
from functools import cache

import pytest

from bench.replay.load import speed_up_for
from bench.replay.replay import Replay, ReplaySetup
from bench.replay.rows import BY_NAME
from common.settings.config import SchedulingConfig
from simulator.step_cost import StepCost
from simulator.trace_file import TraceRequest
from tests.support.examples import everyday

NUM_REQUESTS = everyday(80, of=160)
MEAN_GAP_S = 0.5
MAX_SHARE_LOST = 0.05


def trace() -> list[TraceRequest]:
    rng = random.Random(5)
    arrival_s, requests = 0.0, []
    for _ in range(NUM_REQUESTS):
        arrival_s += rng.expovariate(1 / MEAN_GAP_S)
        requests.append(
            TraceRequest(arrival_s, rng.randrange(64, 1500), rng.randrange(16, 700), ())
        )
    return requests


@cache
def tokens_per_s(load: float, row: str) -> tuple[float, int]:
    """Output tokens per second until the last request ends, and the preemptions."""
    requests, cost = trace(), StepCost()
    setup = ReplaySetup(
        num_blocks=400,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        longest_context=4096,
        speed_up=speed_up_for(load, requests, cost),
    )
    result = Replay(requests, setup, BY_NAME[row], SchedulingConfig(), cost).run()
    assert result.num_overruns == result.num_starved == 0
    assert all(served.num_ends == 1 for served in result.served)
    num_tokens = sum(served.num_tokens for served in result.served)
    return num_tokens / result.completion_s, result.num_preemptions


@pytest.mark.covers("F93")
@pytest.mark.parametrize("row", ["learned", "global_ratio"])
def test_four_times_the_load_loses_no_throughput(row: str) -> None:
    at_capacity, _ = tokens_per_s(1.0, row)
    beyond, _ = tokens_per_s(4.0, row)
    assert beyond >= at_capacity * (1 - MAX_SHARE_LOST)


def test_without_a_reservation_the_same_load_preempts_all_the_time() -> None:
    _, num_preemptions = tokens_per_s(4.0, "vLLM-like")
    _, with_default = tokens_per_s(4.0, "learned")
    assert num_preemptions > 5 * max(with_default, 1)
