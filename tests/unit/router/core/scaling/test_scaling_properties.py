"""What holds of every change of a role, whatever the load and whatever happens to nodes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.nodes import Role
from router.core.scaling.demand import pressure
from router.core.scaling.moves import BETTER, COOL_DOWN_S, RETURN_S
from tests.support.examples import everyday
from tests.support.nodes.fluid_cluster import PREFILL_SPEED, FluidCluster

BUSY_PREFILL, BUSY_SEATS = 0.85 * PREFILL_SPEED, 85
LOADS = st.lists(
    st.tuples(
        st.sampled_from([1.25, 5.0, 10.0, 30.0]),
        st.floats(0, 12 * PREFILL_SPEED),
        st.floats(0, 1200),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=everyday(10, of=200), deadline=None)
@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 2), LOADS)
# The only prefill node drains while nodes change to decode: the next change goes the other way.
@example(3, 0, 0, [(10.0, 9442.0, 1199.0, 9), (30.0, 1800.0, 1200.0, 2)])
def test_every_change_leaves_one_of_each_and_makes_the_worse_role_better(
    num_prefill: int, num_decode: int, num_mixed: int, loads: list[tuple[float, float, float, int]]
) -> None:
    cluster = FluidCluster(num_prefill, num_decode, num_mixed)
    were_lost, was_only = [], False
    for span_s, prompts_per_s, answers, fault in loads:
        for index, node in enumerate(cluster.nodes):
            node.is_draining = index == fault
        for decision in cluster.run(span_s, prompts_per_s=prompts_per_s, answers=answers):
            move, demands = decision.choice.move, decision.demands
            for demand in demands.values():
                assert demand.need >= 0
                assert demand.desired >= demand.need or demand.desired == 4096
            if move is None:
                continue
            short, giving = demands[move.role], demands[move.role_before]
            assert {move.role, move.role_before} == {Role.PREFILL, Role.DECODE}
            if giving.num_nodes == 1:  # nothing decodes without it
                assert move.role is Role.DECODE
                assert short.num_nodes == demands[Role.MIXED].num_nodes == 0
                was_only = True
            after = max(
                pressure(short.need, short.num_nodes + 1),
                pressure(giving.need, giving.num_nodes - 1),
            )
            was_lost = not short.num_nodes
            were_lost.append(was_lost)
            assert was_lost or after <= BETTER * max(short.pressure, giving.pressure)
            assert was_lost or short.pressure > 1
    for ((before_s, before), _), ((after_s, after_role), was_lost) in pairwise(
        zip(cluster.moves, were_lost, strict=True)
    ):
        pause_s = COOL_DOWN_S if before is after_role or was_lost else RETURN_S
        assert after_s - before_s >= pause_s - 1e-9
    if num_prefill and num_decode:
        assert cluster.of(Role.PREFILL) or was_only
        assert cluster.of(Role.DECODE)


@settings(max_examples=everyday(15, of=300), deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.floats(0, 0.9), st.floats(0.1, 0.9))
def test_a_steady_load_that_some_split_can_serve_comes_to_rest(
    num_prefill: int, num_decode: int, prefill_share: float, load: float
) -> None:
    """`load` of all nodes, of which `prefill_share` are for prompts."""
    num_nodes = num_prefill + num_decode
    best = min(max(1, round(prefill_share * num_nodes)), num_nodes - 1)
    cluster = FluidCluster(num_prefill, num_decode)
    prompts_per_s, answers = load * best * BUSY_PREFILL, load * (num_nodes - best) * BUSY_SEATS
    cluster.run(60 + 15 * num_nodes, prompts_per_s=prompts_per_s, answers=answers)
    num_moves = len(cluster.moves)
    assert num_moves <= abs(best - num_prefill) + 2
    cluster.run(90, prompts_per_s=prompts_per_s, answers=answers)
    assert len(cluster.moves) == num_moves


@settings(max_examples=everyday(10, of=200), deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), LOADS)
def test_the_same_reports_give_the_same_decisions(
    num_prefill: int, num_decode: int, loads: list[tuple[float, float, float, int]]
) -> None:
    one, other = FluidCluster(num_prefill, num_decode), FluidCluster(num_prefill, num_decode)
    for span_s, prompts_per_s, answers, _ in loads:
        load = {"prompts_per_s": prompts_per_s, "answers": answers}
        assert one.run(span_s, **load) == other.run(span_s, **load)
