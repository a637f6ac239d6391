"""Roles that follow the load, in whole clusters: everybody is answered, and nothing swings."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from common.nodes import Role
from common.observing.latency import LatencyTargets
from simulator.cluster import SimulatedCluster
from simulator.trace_file import TraceRequest
from tests.unit.simulator.clusters import D, P, clients_of, setup_of

TARGETS = LatencyTargets(ttft_s=1.0, tpot_s=0.1)
SPAN_S = 20.0


def requests(per_s: float, num_prompt: int, num_output: int, begins_s: float) -> list[TraceRequest]:
    """Requests of one kind, one after the other, for `SPAN_S`."""
    count = int(SPAN_S * per_s)
    return [TraceRequest(begins_s + i / per_s, num_prompt, num_output) for i in range(count)]


LONG_PROMPTS = requests(12.0, 7000, 4, 0.0)
LONG_ANSWERS = requests(6.0, 128, 900, SPAN_S)


def served(trace: list[TraceRequest]) -> SimulatedCluster:
    setup = replace(setup_of({P: 2, D: 2}, num_blocks=2000), targets=TARGETS)
    cluster = SimulatedCluster(setup)
    found = cluster.run(clients_of(cluster, trace))
    assert {one.outcome for one in found} <= {"stop", "length"}
    return cluster


def roles(cluster: SimulatedCluster) -> Counter[Role]:
    return Counter(cluster.role_of(node.me) for node in cluster.nodes)


def test_roles_follow_a_load_that_turns_around_and_everybody_is_answered() -> None:
    cluster = served(LONG_PROMPTS + LONG_ANSWERS)
    given = [move.role for at_s, move in cluster.moves]
    turn = sum(at_s < SPAN_S for at_s, _ in cluster.moves)
    assert given[:turn] == [Role.PREFILL]
    assert given[turn:] == [Role.DECODE, Role.DECODE]
    assert roles(cluster) == {P: 1, D: 3}


def test_a_load_that_fits_moves_nothing() -> None:
    assert served(LONG_PROMPTS[::5]).moves == []
