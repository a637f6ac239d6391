"""Nodes that take other roles or leave, several routers, and nodes that are warmed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.nodes import Role
from simulator.faults.history import Fault
from simulator.faults.kinds import FaultKind
from simulator.faults.node.faulty_node import layout_of
from simulator.faults.shape import ROUTER
from tests.unit.simulator.faults.histories import (
    a_history,
    a_shape,
    an_asked_request,
    outcomes,
    run,
)

MANY = [an_asked_request(0.3 + 0.01 * number, f"r{number}") for number in range(20)]


def a_role(at_s: float, target: str, role: Role) -> Fault:
    return Fault(at_s=at_s, kind=FaultKind.ROLE, target=target, other=ROUTER, how=role.value)


def a_drain(at_s: float, target: str, span_s: float = 0.0) -> Fault:
    return Fault(at_s=at_s, kind=FaultKind.DRAIN, target=target, other=ROUTER, span_s=span_s)


def an_upgrade(at_s: float, target: str, how: str) -> Fault:
    kind = FaultKind.UPGRADE
    return Fault(at_s=at_s, kind=kind, target=target, other=ROUTER, span_s=0.1, how=how)


def test_a_node_takes_another_role_and_no_request_notices() -> None:
    roles = (a_role(0.35, "decode-1", Role.PREFILL), a_role(0.42, "decode-0", Role.MIXED))
    cluster = run(a_history(a_shape(), MANY, *roles))
    assert outcomes(cluster) <= {"length", "stop"}
    roles_now = {name: node.role for name, node in cluster.nodes.items()}
    assert roles_now == {
        "prefill-0": Role.PREFILL,
        "decode-0": Role.MIXED,
        "decode-1": Role.PREFILL,
    }


def test_the_last_node_that_decodes_keeps_its_role() -> None:
    shape = replace(a_shape(), num_decode=1)
    cluster = run(a_history(shape, MANY, a_role(0.35, "decode-0", Role.PREFILL)))
    assert cluster.nodes["decode-0"].role is Role.DECODE


@pytest.mark.parametrize("apart_s", [0.0, 1e-3, 3e-3, 0.01, 0.08, 0.27])
def test_of_the_last_two_that_two_routers_are_asked_for_one_goes_on_decoding(
    apart_s: float,
) -> None:
    shape = replace(a_shape(), num_routers=2)
    first = a_role(0.13, "decode-1", Role.PREFILL)
    second = replace(a_role(0.13 + apart_s, "decode-0", Role.PREFILL), other="router-2")
    asked = replace(an_asked_request(0.5, "r1"), router="router-2")
    cluster = run(a_history(shape, [asked], first, second))
    assert outcomes(cluster) <= {"length", "stop"}
    roles = {name: node.role for name, node in cluster.nodes.items()}
    assert Role.DECODE in roles.values()
    if apart_s >= 0.1:
        assert roles["decode-1"] is Role.PREFILL, "the first change was made"


def test_a_node_without_room_for_prompts_keeps_its_role() -> None:
    shape = replace(a_shape(), local_prefill_threshold=0)
    cluster = run(a_history(shape, MANY, a_role(0.35, "decode-0", Role.PREFILL)))
    assert cluster.nodes["decode-0"].role is Role.DECODE


def test_a_node_drains_leaves_and_starts_again() -> None:
    drained = run(a_history(a_shape(), MANY, a_drain(0.35, "decode-1")))
    assert outcomes(drained) <= {"length", "stop"}
    assert "decode-1" not in drained.nodes
    again = run(a_history(a_shape(), MANY, a_drain(0.35, "decode-1", span_s=0.5)))
    assert again.nodes["decode-1"].me.epoch > 3


def test_a_node_that_leaves_hands_its_prefixes_over() -> None:
    shape = replace(a_shape(), num_prefill=2, placement_policy="round_robin")
    asked = [replace(one, num_shared=16, num_prompt=20) for one in MANY]
    cluster = run(a_history(shape, asked, a_drain(1.5, "prefill-0")))
    assert "prefill-0" not in cluster.nodes
    counters = cluster.nodes["prefill-1"].scheduler.statistics().counters
    assert counters.num_fetched_tokens > 0


def test_a_node_that_starts_is_warmed() -> None:
    shape = replace(a_shape(), is_warmed=True)
    crash = Fault(at_s=1.5, kind=FaultKind.CRASH, target="decode-1", span_s=0.5, how="known")
    late = an_asked_request(8.0, "r30")
    cluster = run(a_history(shape, [*MANY, late], crash))
    counters = cluster.nodes["decode-1"].scheduler.statistics().counters
    assert counters.num_fetched_tokens > 0


def test_the_end_of_one_router_ends_no_request_of_another() -> None:
    shape = replace(a_shape(), num_routers=2)
    asked = [
        replace(one, router=(ROUTER, "router-2")[number % 2]) for number, one in enumerate(MANY)
    ]
    crash = Fault(at_s=0.42, kind=FaultKind.CRASH, target=ROUTER, span_s=1.0, how="known")
    cluster = run(a_history(shape, asked, crash))
    ended = {name: outcome for name, outcome, _ in cluster.outcomes()}
    of_other = {ended[one.name] for one in asked if one.router == "router-2"}
    assert of_other <= {"length", "stop"}
    assert "router_lost" in ended.values()


def test_nodes_that_are_upgraded_one_after_the_other_serve_on_with_other_kv() -> None:
    names = ("prefill-0", "decode-0", "decode-1")
    upgrades = [
        an_upgrade(0.35 + 1.5 * number, name, how="new") for number, name in enumerate(names)
    ]
    asked = [an_asked_request(0.2 + 0.1 * number, f"r{number}") for number in range(60)]
    asked = [replace(one, num_shared=16) for one in asked]
    before, cluster = run(a_history(a_shape(), asked)), run(a_history(a_shape(), asked, *upgrades))
    assert outcomes(cluster) <= {"length", "stop"}
    assert cluster.outcomes() == before.outcomes(), "answers are the same"
    layouts = {node.layout.fingerprint for node in cluster.nodes.values()}
    assert len(layouts) == 1
    assert layouts != {node.layout.fingerprint for node in before.nodes.values()}


def test_blocks_of_a_node_that_did_not_leave_to_be_rolled_back_are_right() -> None:
    shape = replace(a_shape(), num_prefill=0, num_decode=0, num_mixed=2)
    asked = [an_asked_request(0.2 + 0.1 * number, f"r{number}") for number in range(40)]
    faults = (
        an_upgrade(0.35, "mixed-0", how="new"),
        Fault(
            at_s=5.0,
            kind=FaultKind.PARTITION,
            target=ROUTER,
            other="mixed-0",
            span_s=0.5,
            how="both",
        ),
        an_upgrade(5.1, "mixed-0", how="old"),
    )
    node = run(a_history(shape, asked, *faults)).nodes["mixed-0"]
    assert node.layout == layout_of(shape.block_size, revision=1)
    assert list(node.scheduler.pool.prefix_cache.block_ids())
