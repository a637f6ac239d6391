"""What the load wants of a cluster, and which node changes its role."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from common.nodes import Role
from common.observing.latency import LatencyTargets
from router.core.scaling.demand import RoleDemand, demands
from router.core.scaling.measure import ROLES, Measured
from router.core.scaling.moves import (
    COOL_DOWN_S,
    HOLD_S,
    MOST_HOLD_S,
    PAYS_BACK_S,
    RETURN_S,
    Moves,
)
from router.core.scaling.scaling import Decision
from tests.support.nodes.fluid_cluster import PREFILL_SPEED, READ_S, FluidCluster

BUSY_PREFILL = 0.8 * PREFILL_SPEED
"""Prompt tokens a second that one node is well able to compute."""
FULL_LOAD = {"prompts_per_s": 4 * BUSY_PREFILL, "answers": 300.0}
"""What keeps four nodes of each role busy."""


def needed(decision: Decision) -> tuple[float, float]:
    demands = decision.demands
    return demands[Role.PREFILL].need, demands[Role.DECODE].need


def desired(decision: Decision) -> tuple[int, int]:
    demands = decision.demands
    return demands[Role.PREFILL].desired, demands[Role.DECODE].desired


def test_a_load_that_fits_moves_nothing() -> None:
    cluster = FluidCluster(4, 4)
    *_, last = cluster.run(120, prompts_per_s=3 * PREFILL_SPEED, answers=200)
    assert cluster.moves == []
    assert needed(last) == pytest.approx((3 / 0.85, 200 / 85), rel=0.02)
    assert desired(last) == (4, 3)
    assert "enough of both" in last.choice.why


def test_an_idle_cluster_wants_one_of_each_and_moves_nothing() -> None:
    cluster = FluidCluster(4, 4)
    *_, last = cluster.run(60, prompts_per_s=0, answers=0)
    assert (desired(last), needed(last), cluster.moves) == ((1, 1), (0, 0), [])


def test_prompts_that_queue_take_decode_nodes() -> None:
    cluster = FluidCluster(2, 6)
    *_, last = cluster.run(120, prompts_per_s=5 * BUSY_PREFILL, answers=100)
    assert {role for _, role in cluster.moves} == {Role.PREFILL}
    assert len(cluster.of(Role.PREFILL)) >= 5
    assert desired(last)[0] == len(cluster.of(Role.PREFILL))


def test_answers_that_wait_for_seats_take_prefill_nodes() -> None:
    cluster = FluidCluster(6, 2)
    cluster.run(120, prompts_per_s=BUSY_PREFILL, answers=420)
    assert [role for _, role in cluster.moves] == [Role.DECODE] * 3
    assert len(cluster.of(Role.DECODE)) == 5


def test_demand_is_what_arrives_not_what_is_computed() -> None:
    """The overloaded role computes as much as its nodes can, whatever is asked of it."""
    cluster = FluidCluster(1, 1)
    *_, last = cluster.run(10, prompts_per_s=3 * PREFILL_SPEED, answers=1)
    seen = last.demands[Role.PREFILL].measured
    assert seen.tokens_per_s == pytest.approx(PREFILL_SPEED, rel=0.02)
    assert seen.arriving_per_s == pytest.approx(3 * PREFILL_SPEED, rel=0.02)
    assert last.demands[Role.PREFILL].need > 3
    assert last.demands[Role.PREFILL].prefill_wait_s == pytest.approx(20, rel=0.1)


def test_prompts_that_wait_for_a_seat_count_as_prefill_to_come() -> None:
    seated = FluidCluster(1, 1)
    waiting = FluidCluster(1, 1)
    *_, low = seated.run(10, prompts_per_s=1000, answers=90)
    *_, high = waiting.run(10, prompts_per_s=1000, answers=400)
    assert needed(high)[0] > needed(low)[0]
    assert high.demands[Role.PREFILL].measured.queued_tokens >= 100 * 300


def test_a_slow_step_needs_more_decode_nodes() -> None:
    cluster = FluidCluster(4, 4)
    cluster.scaling = type(cluster.scaling)(replace(cluster.scaling.targets, tpot_s=0.015))
    cluster.run(5, prompts_per_s=1000, answers=4)
    *_, last = cluster.run(30, prompts_per_s=1000, answers=120)
    assert "a step takes" in last.demands[Role.DECODE].why
    assert needed(last)[1] > 4


def test_a_step_within_the_target_is_told_with_the_answers_that_wait() -> None:
    held = Measured(
        num_nodes=2,
        mean_nodes=2.0,
        step_s=0.07,
        least_step_s=0.01,
        num_running=1.5,
        num_waiting=3.5,
    )
    measured = {role: held if role is Role.DECODE else Measured() for role in ROLES}
    found = demands(measured, LatencyTargets(ttft_s=1.0, tpot_s=0.1))[Role.DECODE]
    assert found.need == pytest.approx(2 * (0.06 * 5 / 1.5) / 0.09)
    assert found.why == (
        "a step takes 70.0 ms while 1.5 answers run, and 5.0 run or wait (target 100 ms)"
    )


def test_nothing_is_taken_from_a_role_whose_rest_would_be_worse_off() -> None:
    cluster = FluidCluster(2, 2)
    *_, last = cluster.run(60, prompts_per_s=2.2 * PREFILL_SPEED, answers=170)
    assert cluster.moves == []
    assert "with one less it would be at" in last.choice.why


def test_a_role_keeps_its_only_node() -> None:
    for prefill, decode in ((1, 3), (3, 1)):
        cluster = FluidCluster(prefill, decode)
        prompts, answers = (0.0, 900.0) if decode == 3 else (9 * PREFILL_SPEED, 0.0)
        *_, last = cluster.run(60, prompts_per_s=prompts, answers=answers)
        assert cluster.moves == []
        assert "keeps its only node" in last.choice.why


def test_a_role_that_lost_its_last_node_gets_one() -> None:
    cluster = FluidCluster(3, 0)
    *_, last = cluster.run(30, prompts_per_s=0, answers=0)
    assert [role for _, role in cluster.moves] == [Role.DECODE]
    assert desired(last) == (1, 1)


def test_a_role_that_lost_its_last_node_gets_one_soon_although_the_last_change_took_one() -> None:
    cluster = FluidCluster(2, 2)
    while not cluster.moves:
        cluster.run(READ_S, prompts_per_s=9 * PREFILL_SPEED, answers=0)
    assert [role for _, role in cluster.moves] == [Role.PREFILL]
    cluster.nodes = cluster.of(Role.PREFILL)
    cluster.run(COOL_DOWN_S + 2 * READ_S, prompts_per_s=0, answers=0)
    assert len(cluster.of(Role.DECODE)) == 1


def test_the_only_prefill_node_decodes_when_nothing_else_does_for_a_while() -> None:
    cluster = FluidCluster(1, 1)
    decode = cluster.of(Role.DECODE)[0]
    cluster.run(5, prompts_per_s=0, answers=0)
    decode.is_draining = True
    cluster.run(MOST_HOLD_S - READ_S, prompts_per_s=0, answers=0)
    decode.is_draining = False
    cluster.run(READ_S, prompts_per_s=0, answers=0)
    decode.is_draining = True
    since_s = cluster.now_s
    *_, last = cluster.run(MOST_HOLD_S, prompts_per_s=0, answers=0)
    assert cluster.moves == [], "a node came back meanwhile"
    assert "no change for another" in last.choice.why
    cluster.run(2 * READ_S, prompts_per_s=0, answers=0)
    ((moved_at_s, role),) = cluster.moves
    assert role is Role.DECODE
    assert moved_at_s == pytest.approx(since_s + MOST_HOLD_S + READ_S)


def test_the_only_prefill_node_beside_a_mixed_one_and_the_only_decode_node_stay() -> None:
    for cluster in (FluidCluster(1, 0, 1), FluidCluster(0, 1)):
        *_, last = cluster.run(3 * MOST_HOLD_S, prompts_per_s=9 * PREFILL_SPEED, answers=100)
        assert cluster.moves == []
        assert "keeps its only node" in last.choice.why


def test_a_cluster_of_decode_nodes_gets_a_prefill_node_when_prompts_are_computed() -> None:
    idle = FluidCluster(0, 3)
    idle.run(30, prompts_per_s=0, answers=100)
    assert idle.moves == []
    cluster = FluidCluster(0, 3)
    cluster.run(30, prompts_per_s=2000, answers=50)
    assert [role for _, role in cluster.moves] == [Role.PREFILL]


def test_mixed_nodes_keep_their_role_and_say_what_they_want() -> None:
    cluster = FluidCluster(0, 0, 2)
    *_, last = cluster.run(60, prompts_per_s=3 * PREFILL_SPEED, answers=20)
    assert cluster.moves == []
    assert last.demands[Role.MIXED].desired >= 4
    assert desired(last) == (0, 0)


def test_changes_are_some_time_apart_and_longer_before_one_goes_back() -> None:
    cluster = FluidCluster(6, 2)
    cluster.run(60, prompts_per_s=BUSY_PREFILL, answers=420)
    cluster.run(120, prompts_per_s=5 * BUSY_PREFILL, answers=50)
    times = [at_s for at_s, _ in cluster.moves]
    roles = [role for _, role in cluster.moves]
    turn = roles.index(Role.PREFILL)
    assert roles[turn:] == [Role.PREFILL] * len(roles[turn:])
    assert times[0] >= HOLD_S
    for index in range(1, len(times)):
        pause_s = RETURN_S if index == turn else COOL_DOWN_S
        assert times[index] - times[index - 1] >= pause_s


def test_a_shortage_for_a_moment_changes_nothing() -> None:
    cluster = FluidCluster(4, 4)
    cluster.run(30, prompts_per_s=3 * BUSY_PREFILL, answers=200)
    for _ in range(10):
        cluster.run(1.25, prompts_per_s=5 * PREFILL_SPEED, answers=200)
        cluster.run(30, prompts_per_s=3 * BUSY_PREFILL, answers=200)
    assert cluster.moves == []


def test_a_load_that_swings_quickly_does_not_swing_the_roles() -> None:
    cluster = FluidCluster(4, 4)
    for _ in range(20):
        cluster.run(15, prompts_per_s=5 * BUSY_PREFILL, answers=100)
        cluster.run(15, prompts_per_s=BUSY_PREFILL, answers=420)
    roles = [role for _, role in cluster.moves]
    num_turns = sum(before is not after for before, after in pairwise(roles))
    assert num_turns <= 600 / RETURN_S


@pytest.mark.parametrize(("burst_s", "most"), [(6.25, 2), (10.0, 14), (15.0, 14)])
def test_bursts_of_either_kind_change_roles_a_few_times_and_then_no_more(
    burst_s: float, most: int
) -> None:
    cluster = FluidCluster(4, 4)
    while cluster.now_s < 600:
        cluster.run(burst_s, prompts_per_s=7 * PREFILL_SPEED, answers=100)
        cluster.run(burst_s, prompts_per_s=0.5 * PREFILL_SPEED, answers=560)
    assert len(cluster.moves) <= most
    assert all(at_s < 260 for at_s, _ in cluster.moves)


def wait_s(moves: Moves, short: Role, since_s: float) -> float:
    """How long a role has to be short of nodes, from a moment on, until a node gets it."""
    nodes = [node.view() for node in FluidCluster(4, 4).nodes]
    now_s = since_s
    while True:
        found = {
            role: RoleDemand(
                role=role,
                num_nodes=0 if role is Role.MIXED else 4,
                need=5.0 if role is short else 1.0,
                desired=1,
                why="",
                prefill_wait_s=0.0,
                measured=Measured(),
            )
            for role in ROLES
        }
        if moves.choose(found, nodes, now_s).move is not None:
            moves.on_moved(short, now_s)
            return now_s - since_s
        now_s += 0.25


def test_a_change_that_is_taken_back_too_soon_makes_the_next_one_wait_for_longer() -> None:
    moves, now_s = Moves(), 0.0
    waits: list[float] = []
    for pause_s in (0, 60, 60, 60, 60, 60, PAYS_BACK_S, 60, 60):
        now_s += pause_s
        short = Role.DECODE if len(waits) % 2 else Role.PREFILL
        waits.append(wait_s(moves, short, now_s))
        now_s += waits[-1]
    assert waits == [2.5, 2.5, 5.0, 10.0, 20.0, 20.0, 20.0, 2.5, 5.0]
    assert (HOLD_S, MOST_HOLD_S) == (2.5, 20.0)


def test_one_more_change_of_the_same_kind_does_not_wait_for_longer() -> None:
    moves, now_s = Moves(), 0.0
    for short in (Role.PREFILL, Role.DECODE, Role.PREFILL, Role.DECODE):
        now_s += 60
        now_s += wait_s(moves, short, now_s)
    assert wait_s(moves, Role.DECODE, now_s + 60) == HOLD_S
    moves.begin(now_s + 100)
    assert wait_s(moves, Role.PREFILL, now_s + 160) == HOLD_S, "another router leads"


@pytest.mark.covers("M14")
@pytest.mark.parametrize("fault", ["is_draining", "is_suspected", "unlisted"])
def test_nodes_that_leave_or_are_silent_do_not_count(fault: str) -> None:
    cluster = FluidCluster(2, 2)
    for node in (cluster.nodes[0], cluster.nodes[2]):
        if fault == "unlisted":
            node.is_listed = False
        else:
            setattr(node, fault, True)
    *_, last = cluster.run(60, prompts_per_s=5 * PREFILL_SPEED, answers=300)
    assert cluster.moves == []
    assert {role: demand.num_nodes for role, demand in last.demands.items()} == {
        Role.PREFILL: 1,
        Role.DECODE: 1,
        Role.MIXED: 0,
    }


def test_the_least_busy_node_that_can_change_changes() -> None:
    cluster = FluidCluster(3, 1)
    quiet, able, busy = cluster.nodes[:3]
    quiet.record = replace(quiet.record, roles=())
    cluster.follows = False
    cluster.run(20, prompts_per_s=0, answers=300)
    able.queued_tokens, busy.queued_tokens = 10, 5000
    move = cluster.decide().choice.move
    assert move is not None
    assert move.node == able.record.incarnation
    for node in (able, busy):
        node.record = replace(node.record, roles=())
    choice = cluster.decide().choice
    assert (choice.move, "no prefill node can change its role" in choice.why) == (None, True)


@pytest.mark.parametrize("span_s", [5.0, 30.0])
def test_a_slow_first_prompt_is_outweighed_by_those_that_follow(span_s: float) -> None:
    """Although the nodes never compute prompts for a second of any window."""
    cluster = FluidCluster(2, 4)
    cluster.decide()
    first = cluster.nodes[0]
    first.num_prompt_tokens, first.prompt_ms = 20, 600
    cluster.run(span_s, prompts_per_s=0, answers=1)
    *_, early = cluster.run(READ_S, prompts_per_s=500, answers=50)
    assert needed(early)[0] < 1
    *_, last = cluster.run(60, prompts_per_s=500, answers=50)
    assert cluster.moves == []
    assert needed(last)[0] == pytest.approx(0.05 / 0.85, rel=0.02)


def loaded() -> tuple[FluidCluster, tuple[int, int]]:
    """A cluster that a load keeps busy for a minute, and what it wants of each role."""
    cluster = FluidCluster(4, 4)
    *_, last = cluster.run(60, **FULL_LOAD)
    assert desired(last) == (4, 4)
    return cluster, desired(last)


@pytest.mark.covers("F147")
@pytest.mark.parametrize("span_s", [2 * READ_S, 30.0, 600.0])
@pytest.mark.parametrize("lease_s", [5.0, 600.0])
def test_while_the_store_is_away_the_load_is_not_taken_for_none(
    span_s: float, lease_s: float
) -> None:
    cluster, before = loaded()
    cluster.is_store_away = True
    first = cluster.run(min(lease_s, span_s), **FULL_LOAD)
    for node in cluster.nodes:
        node.is_listed = span_s <= lease_s
    away = [*first, *cluster.run(span_s, **FULL_LOAD)]
    assert {desired(one) for one in away} == {before}
    assert {one.choice.why for one in away} == {"the placement store is away"}
    cluster.is_store_away = False
    unlisted = cluster.run(2 * READ_S, **FULL_LOAD)  # nodes come back one after the other
    for node in cluster.nodes:
        node.is_listed = True
    back = [*unlisted, *cluster.run(60, **FULL_LOAD)]
    assert {desired(one) for one in back} == {before}
    *_, idle = cluster.run(60, prompts_per_s=0, answers=0)
    assert desired(idle) == (1, 1), "what was held is let go again"
    assert cluster.moves == []


@pytest.mark.covers("F147")
@pytest.mark.parametrize("num_unlisted", [1, 4])
def test_nodes_that_serve_and_cannot_report_are_not_taken_for_idle(num_unlisted: int) -> None:
    cluster, before = loaded()
    cluster.follows = False
    for node in cluster.of(Role.PREFILL)[:num_unlisted]:
        node.is_listed = False
    silent = cluster.run(600, **FULL_LOAD)
    assert min(desired(one)[0] for one in silent) == before[0]
    assert "not reported" in silent[-1].demands[Role.PREFILL].why
    *_, fewer = cluster.run(60, prompts_per_s=0, answers=0)
    assert desired(fewer) == (before[0], 1), "the other role has told all"
    for node in cluster.nodes:
        node.is_listed = True
    back = cluster.run(30, prompts_per_s=0, answers=0)
    assert max(desired(one)[0] for one in back) <= before[0], "no burst is seen"
    assert desired(back[-1]) == (1, 1)


def test_a_role_that_computes_no_prompts_any_more_hides_no_other_speed() -> None:
    cluster = FluidCluster(2, 2)
    cluster.decide()
    first = cluster.nodes[0]
    first.num_prompt_tokens, first.prompt_ms = 20, 600
    cluster.run(20, prompts_per_s=0, answers=1)
    cluster.nodes = cluster.of(Role.DECODE)
    cluster.follows = False
    *_, last = cluster.run(60, prompts_per_s=500, answers=10)
    speed = last.demands[Role.DECODE].measured.node_tokens_per_s
    assert speed == pytest.approx(PREFILL_SPEED, rel=0.02)


def test_a_node_that_restarts_counts_from_zero_again() -> None:
    cluster = FluidCluster(2, 2)
    cluster.run(30, prompts_per_s=BUSY_PREFILL, answers=50)
    first = cluster.nodes[0]
    first.record = replace(first.record, epoch=2)
    first.num_prompt_tokens = first.prompt_ms = 0
    *_, last = cluster.run(5, prompts_per_s=BUSY_PREFILL, answers=50)
    assert 0 <= last.demands[Role.PREFILL].need < 2


def test_a_decision_names_its_numbers() -> None:
    cluster = FluidCluster(2, 6)
    decisions = cluster.run(30, prompts_per_s=5 * BUSY_PREFILL, answers=100)
    move = next(one.choice.move for one in decisions if one.choice.move)
    assert move is not None
    for part in ("prefill needs", "and has 2", "prompt tokens/s arrive", "decode needs", "seats"):
        assert part in move.why
