"""Whole clusters: everybody is answered, nothing is left, and jumps change nothing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, astuple, replace
from itertools import product
from typing import Any

import pytest

from common.errors import InternalError
from common.nodes import Role
from common.observing.latency import LatencyTargets
from common.settings.config import EngineConfig, HandoffConfig, SchedulingConfig
from engine.core.blocks.block_pool import BlockUse
from placement.store import LiveNode
from simulator.cluster import ClusterSetup, SimulatedCluster
from simulator.node import SimulatedNode
from simulator.profile import facts_of
from simulator.profiles.beside_steps import BesideSteps
from simulator.profiles.shared_cores import NO_SLOWDOWN, Slowdowns
from simulator.served import ServedRequest, latency_figures
from simulator.trace_file import TraceRequest
from tests.support.examples import everyday
from tests.unit.simulator.clusters import (
    BLOCK,
    COST,
    MIXED,
    PROFILE,
    D,
    P,
    clients_of,
    setup_of,
    trace,
)


def statistics_of(node: SimulatedNode) -> dict[str, Any]:
    """What a node has done; times of steps that are added up differently are rounded."""
    found = asdict(node.scheduler.statistics())
    for name in ("prompt_steps_s", "decode_steps_s"):
        found["counters"][name] = round(found["counters"][name], 9)
    return found


def run(setup: ClusterSetup, requests: list[TraceRequest]) -> SimulatedCluster:
    cluster = SimulatedCluster(setup)
    cluster.run(clients_of(cluster, requests))
    return cluster


def outcome(one: ServedRequest) -> tuple[object, ...]:
    return (*astuple(one)[1:],)


def test_requests_that_come_one_by_one_end_as_those_that_are_all_known() -> None:
    whole = run(setup_of({P: 1, D: 1}), trace())
    cluster = SimulatedCluster(setup_of({P: 1, D: 1}))
    ended: list[ServedRequest] = []
    cluster.serve_each(iter(clients_of(cluster, trace())), ended.append)
    assert cluster.served == []
    assert [one.last_at_s for one in ended] == sorted(one.last_at_s for one in ended)
    ended.sort(key=lambda one: one.client.index)
    assert [outcome(one) for one in ended] == [outcome(one) for one in whole.served]


def test_a_handoff_shows_how_quick_pulls_will_be() -> None:
    cluster = run(setup_of({P: 1, D: 1}), [])
    flow = cluster.nodes[0].flow
    guessed_s = flow.pulls.cost.expected_s(8192)
    cluster = run(setup_of({P: 1, D: 1}), trace())
    flow = cluster.nodes[0].flow
    assert flow.pulls.cost.expected_s(8192) < guessed_s / 5


def test_a_router_reads_one_listing_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = SimulatedCluster(setup_of({P: 1, D: 1}))
    listed_at_s: list[float] = []
    on_listing = cluster.router.on_listing

    def listed(nodes: Sequence[LiveNode]) -> None:
        listed_at_s.append(cluster.timeline.now_s())
        on_listing(nodes)

    monkeypatch.setattr(cluster.router, "on_listing", listed)
    cluster.run(clients_of(cluster, trace(gap_s=0.5)))
    assert len(listed_at_s) > 5
    assert len(set(listed_at_s)) == len(listed_at_s)


def num_steps(cluster: SimulatedCluster) -> int:
    return sum(node.scheduler.statistics().counters.num_steps for node in cluster.nodes)


def num_runs(cluster: SimulatedCluster) -> int:
    return sum(node.execution.num_runs for node in cluster.nodes)


SHAPES: list[dict[Role, int]] = [{P: 1, D: 1}, {P: 2, D: 3}, {MIXED: 1}, {P: 1, D: 1, MIXED: 1}]


@pytest.mark.parametrize("num_nodes", SHAPES, ids=str)
def test_every_request_is_answered_in_its_length_and_nothing_is_left(
    num_nodes: dict[Role, int],
) -> None:
    cluster = run(setup_of(num_nodes), trace())
    for one in cluster.served:
        assert (one.outcome, one.num_tokens) == ("stop", one.client.trace.num_output)
        assert one.arrived_at_s < one.first_at_s <= one.last_at_s
    for node in cluster.nodes:
        has_sent = node.scheduler.statistics().counters.num_steps > 0
        assert has_sent, f"{node.me} had nothing to do"
    handed_off = cluster.network.num_bytes > 0
    assert handed_off == (P in num_nodes)


SCHEDULING: dict[str, dict[str, object]] = {
    "learned": {},
    "global_ratio": {"reservation_policy": "global_ratio"},
    "fixed_blocks": {"reservation_policy": "fixed_blocks"},
    "swap": {"preemption_mode": "swap", "reservation_policy": "none"},
    "preempting": {"reservation_policy": "none"},
}


@pytest.mark.parametrize(
    ("scheduling", "num_nodes"), [*product(SCHEDULING, SHAPES)][:: everyday(5, of=1)], ids=str
)
def test_runs_of_equal_steps_give_what_each_step_by_itself_gives(
    num_nodes: dict[Role, int], scheduling: str
) -> None:
    config = SchedulingConfig(**SCHEDULING[scheduling])  # type: ignore[arg-type]
    at_once = setup_of(num_nodes, num_blocks=120, scheduling=config)
    requests = trace(seed=len(scheduling))
    fast, slow = (run(replace(at_once, may_repeat=jumps), requests) for jumps in (True, False))
    assert [outcome(one) for one in fast.served] == [outcome(one) for one in slow.served]
    for node, other in zip(fast.nodes, slow.nodes, strict=True):
        assert statistics_of(node) == statistics_of(other)
        assert node.execution.busy_s == pytest.approx(other.execution.busy_s, rel=1e-12)
    assert num_steps(fast) == num_steps(slow) == num_runs(slow)
    assert num_runs(fast) < num_steps(fast)
    if scheduling in ("preempting", "swap") and P not in num_nodes:
        assert fast.nodes[0].scheduler.statistics().counters.num_preemptions > 0


def test_a_run_goes_on_at_full_blocks_which_others_find_from_then_on() -> None:
    """The prompt fills 15 blocks, and the 299 tokens of the decode node five more."""
    setup = setup_of({P: 1, D: 1})
    cluster = run(setup, [TraceRequest(0.0, 1000, 300)])
    _, decode = cluster.nodes
    assert (num_runs(cluster), num_steps(cluster)) == (2, 300)
    apart = run(replace(setup, may_repeat=False), [TraceRequest(0.0, 1000, 300)])
    assert cluster.router.num_reports == apart.router.num_reports
    assert len(decode.scheduler.pool.prefix_cache) == 20


def test_one_request_alone_takes_what_the_profile_says() -> None:
    """A prompt in one step, its KV behind it, and a step for every further token."""
    cluster = run(setup_of({P: 1, D: 1}), [TraceRequest(1.0, 1000, 5)])
    (served,) = cluster.served
    cost, message_s = COST, 0.5e-3
    prefill_s = cost.seconds(1000, 0, 1000 * 1001 // 2)
    # To the decode node and back, and to the prefill node and back.
    assert served.first_at_s == pytest.approx(1.0 + 4 * message_s + prefill_s)
    kv_s = 16 * BLOCK / 4 / PROFILE.network_bytes_per_s  # the last layer leaves at the step's end
    steps_s = [cost.seconds(1, 1000 + index) for index in range(1, 5)]
    # The output of a step leaves when it ends; the router hears of token 0 one message later too.
    last_s = 1.0 + 3 * message_s + prefill_s + kv_s + PROFILE.network_latency_s + sum(steps_s)
    assert served.last_at_s == pytest.approx(last_s + message_s)
    assert served.tpot_s == pytest.approx((served.last_at_s - served.first_at_s) / 4)
    assert served.longest_gap_s == pytest.approx(
        kv_s + PROFILE.network_latency_s + steps_s[0], rel=1e-6
    )


def test_a_prefix_is_computed_once_and_goes_where_it_is_held() -> None:
    ids = tuple(range(8))
    requests = [TraceRequest(2.0 * index, 4096, 20, ids) for index in range(6)]
    cluster = run(setup_of({P: 2, D: 2}), requests)
    num_computed = sum(n.scheduler.statistics().counters.num_chunk_tokens for n in cluster.nodes)
    # The last token is always computed, so the last block is; few tokens are computed by decoders.
    assert 4096 <= num_computed <= 4096 + 5 * 64
    first, *others = [one.ttft_s for one in cluster.served]
    assert max(others) < first / 4
    assert [one.num_cached_tokens for one in cluster.served[1:]] == [4032] * 5


def test_a_prefill_node_that_lacks_a_prefix_pulls_it_from_one_that_has_it() -> None:
    ids = tuple(range(16))
    requests = [TraceRequest(0.0, 512 * 16, 5, ids)]
    for index in range(1, 9):
        own = tuple(100 * index + number for number in range(16))
        requests.append(TraceRequest(5.0 + index * 1e-3, 512 * 32, 5, ids + own))
    setup = setup_of({P: 2, D: 2}, num_blocks=2000)
    # Nodes expect 0.5 GB/s of the first pull: computing must be slow for that to pay.
    slow = replace(setup.profile, step=replace(COST, token_s=1e-3))
    cluster = run(replace(setup, profile=slow), requests)
    counters = [node.scheduler.statistics().counters for node in cluster.nodes]
    assert sum(one.num_pulled_tokens for one in counters) > 0
    assert all(one.outcome == "stop" for one in cluster.served)


def test_host_memory_keeps_what_small_pools_evict_and_routers_know_it() -> None:
    """Conversations take turns, and their prompts are three times what the pools hold."""
    rng = random.Random(1)
    requests = [
        TraceRequest(20.0 * turn + 0.05 * place, 2000, 2, tuple(talk * 10 + n for n in range(4)))
        for turn in range(4)
        for place, talk in enumerate(rng.sample(range(16), 16))
    ]
    num_computed = {}
    for num_host_blocks in (0, 600):
        size = num_host_blocks * facts_of(PROFILE, 64).layout.block_bytes
        engine = EngineConfig(max_num_seqs=16, max_num_batched_tokens=1024, prefix_host_memory=size)
        cluster = run(setup_of({MIXED: 2}, num_blocks=80, engine=engine), requests)
        counters = [node.scheduler.statistics().counters for node in cluster.nodes]
        num_computed[num_host_blocks] = sum(one.num_chunk_tokens for one in counters)
        assert {node.scheduler.host_pool.num_blocks for node in cluster.nodes} == {num_host_blocks}
    num_prompt = sum(one.num_prompt for one in requests)
    assert num_computed[0] > 0.9 * num_prompt
    # The first two times. Half of the third and fourth are elsewhere, for routers who do not know.
    assert num_computed[600] < 0.55 * num_prompt


def test_few_uncached_tokens_are_computed_by_the_decode_node() -> None:
    handoff = HandoffConfig(local_prefill_threshold=600)
    cluster = run(setup_of({P: 1, D: 1}, handoff=handoff), [TraceRequest(0.0, 500, 5)])
    prefill, decode = cluster.nodes
    assert prefill.execution.num_runs == 0
    assert decode.scheduler.statistics().counters.num_chunk_tokens == 500
    assert cluster.served[0].outcome == "stop"


def test_a_simulation_is_the_same_twice_and_another_with_another_trace() -> None:
    setup = setup_of({P: 2, D: 2})
    once, again = ([outcome(one) for one in run(setup, trace()).served] for _ in range(2))
    other = [outcome(one) for one in run(setup, trace(seed=5)).served]
    assert once == again
    assert once != other


def test_more_load_takes_longer_and_full_nodes_queue() -> None:
    setup = setup_of({P: 1, D: 1}, num_blocks=120)
    slow, fast = (run(setup, trace(80, gap_s=gap_s)) for gap_s in (1.0, 0.001))
    ttfts_s = [sum(one.ttft_s for one in cluster.served) for cluster in (slow, fast)]
    assert ttfts_s[1] > 2 * ttfts_s[0]
    assert all(one.outcome == "stop" for one in fast.served)


def test_nodes_that_refuse_are_asked_again_and_at_last_somebody_is_refused() -> None:
    handoff = HandoffConfig(max_queued_requests=1)
    setup = setup_of({P: 1, D: 1}, num_blocks=60, handoff=handoff)
    requests = [replace(one, num_output=100) for one in trace(40, gap_s=0.001)]
    cluster = run(setup, requests)
    outcomes = Counter(one.outcome for one in cluster.served)
    assert outcomes.keys() == {"stop", "overloaded"}
    figures = latency_figures(cluster.served, LatencyTargets(ttft_s=60.0, tpot_s=1.0), 10.0)
    assert (figures["requests"], figures["failed"]) == (40, outcomes["overloaded"])
    assert figures["answered"] == outcomes["stop"] == round(10 * figures["goodput_rps"])


def test_what_is_left_on_a_node_is_found() -> None:
    cluster = run(setup_of({P: 1, D: 1}), trace(8))
    cluster.nodes[1].scheduler.pool.allocate(1, BlockUse.RUNNING)
    with pytest.raises(InternalError, match="decode-0#1 holds something"):
        cluster.check_empty()


@pytest.mark.parametrize(("at_once", "times"), [(0, 1.0), (2, 1.0), (1, 2.0)])
def test_nodes_that_share_cores_slow_each_other_down(at_once: int, times: float) -> None:
    """Two prompts at the same time on two nodes: their steps take twice as long."""
    requests = [TraceRequest(0.0, 1000, 1), TraceRequest(0.0, 1000, 1)]
    cluster = run(replace(setup_of({MIXED: 2}), at_once=at_once), requests)
    assert {node.execution.num_runs for node in cluster.nodes} == {1}
    step_s = COST.seconds(1000, 0, 1000 * 1001 // 2)
    for node in cluster.nodes:
        assert node.execution.busy_s == pytest.approx(times * step_s)


@pytest.mark.parametrize("num_nodes", SHAPES, ids=str)
def test_cores_that_are_enough_for_all_change_nothing(num_nodes: dict[Role, int]) -> None:
    setup = setup_of(num_nodes)
    own, shared = (run(replace(setup, at_once=n), trace()) for n in (0, 9))
    for one, other in zip(own.served, shared.served, strict=True):
        assert outcome(one) == pytest.approx(outcome(other))


def test_a_step_is_slow_only_as_long_as_another_one_runs() -> None:
    """A short prompt comes while a long one is computed, whose layers leave one after the other."""
    requests = [TraceRequest(0.0, 1000, 2), TraceRequest(0.01, 100, 1)]
    setup = replace(setup_of({P: 2, D: 1}), at_once=1)
    cluster = run(setup, requests)
    long_s, short_s = (COST.seconds(n, 0, n * (n + 1) // 2) for n in (1000, 100))
    busy_s = sorted(node.execution.busy_s for node in cluster.nodes[:2])
    assert busy_s == pytest.approx([2 * short_s, long_s + short_s])


def test_a_short_request_is_not_sent_behind_a_long_prompt_that_no_report_tells_yet() -> None:
    """Both mixed nodes have one request when it comes."""
    requests = [
        TraceRequest(0.0, 12_000, 5),
        TraceRequest(1e-3, 100, 9),
        TraceRequest(2e-3, 100, 5),
    ]
    cluster = run(setup_of({MIXED: 2}), requests)
    counters = [node.scheduler.statistics().counters for node in cluster.nodes]
    assert [one.num_chunk_tokens for one in counters] == [12_000, 200]


def test_what_a_request_takes_beside_passes_before_it_is_placed() -> None:
    setup = setup_of({P: 1, D: 1})
    slow = replace(setup, profile=replace(PROFILE, beside=BesideSteps(request_s=0.012)))
    requests = [TraceRequest(0.0, 100, 3)]
    quick, slow_served = (run(one, requests).served[0] for one in (setup, slow))
    assert slow_served.ttft_s - quick.ttft_s == pytest.approx(0.012 - 4 * setup.message_s)
    assert slow_served.tpot_s == pytest.approx(quick.tpot_s)


def test_what_pushes_take_passes_in_steps_whose_kv_goes_to_another_node() -> None:
    """Both steps of a prompt are longer. A mixed node keeps what it computes and pushes nothing."""
    for nodes, num_pushed in (({P: 1, D: 1}, 2), ({MIXED: 1}, 0)):
        setup = setup_of(nodes)
        engine = replace(setup.config.engine, max_num_batched_tokens=64)
        setup = replace(setup, config=replace(setup.config, engine=engine))
        slow = replace(setup, profile=replace(PROFILE, beside=BesideSteps(push_s=0.03)))
        requests = [TraceRequest(0.0, 100, 3)]
        quick, slow_served = (run(one, requests).served[0] for one in (setup, slow))
        assert slow_served.ttft_s - quick.ttft_s == pytest.approx(0.03 * num_pushed)
        assert slow_served.tpot_s == pytest.approx(quick.tpot_s)


def test_on_shared_cores_an_answer_and_a_prompt_slow_each_other_by_factors_of_their_own() -> None:
    requests = [TraceRequest(0.0, 20, 300), TraceRequest(0.5, 400, 2)]

    def served(slowdowns: Slowdowns = NO_SLOWDOWN) -> list[ServedRequest]:
        profile = replace(PROFILE, beside=BesideSteps(slowdowns=slowdowns))
        return run(replace(setup_of({P: 1, D: 1}), profile=profile, at_once=2), requests).served

    (answer, prompt), (slow_answer, same_prompt), (same_answer, slow_prompt) = (
        served(),
        served(NO_SLOWDOWN._replace(answers_beside_prompts=3.0)),
        served(NO_SLOWDOWN._replace(prompts_beside_answers=3.0)),
    )
    assert slow_prompt.compute_s == pytest.approx(3.0 * prompt.compute_s)
    assert same_prompt.compute_s == pytest.approx(prompt.compute_s)
    late_s = [one.last_at_s - answer.last_at_s for one in (slow_answer, same_answer)]
    assert late_s[0] > 0.5 * prompt.compute_s
    assert late_s[0] > 20 * abs(late_s[1])
    alike = served(Slowdowns(answers_beside_answers=3.0, prompts_beside_prompts=3.0))
    assert alike == [answer, prompt], (
        "an answer runs beside a prompt here, and never beside another"
    )
