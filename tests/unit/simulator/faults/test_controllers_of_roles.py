"""Roles that follow the load in clusters that are watched: who leads, and what must hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.errors import InternalError, PlacementUnavailable
from common.ids import Incarnation
from common.nodes import Role
from router.core.known.node_view import NodeView
from simulator.faults.history import Fault
from simulator.faults.kinds import STORE, FaultKind
from simulator.faults.shape import ROUTER
from simulator.faults.store.leading import Leading
from simulator.faults.store.leases import Leases
from tests.support.nodes.node_views import node as view_of
from tests.unit.simulator.faults.histories import (
    a_history,
    a_shape,
    an_asked_request,
    outcomes,
    run,
)

R1, R2, P0 = Incarnation("r1", 1), Incarnation("r2", 1), Incarnation("p", 1)
LONG = [
    an_asked_request(1.0 + 0.1 * number, f"r{number}", max_tokens=24, deadline_s=300.0)
    for number in range(30)
]
SHAPE = replace(
    a_shape(),
    num_routers=2,
    num_prefill=3,
    max_num_seqs=2,
    step_s=0.2,
    target_ttft_s=5.0,
    target_tpot_s=0.2,
)
"""Answers are long and seats few: decode nodes are short."""


def test_the_store_has_one_leader_and_one_open_change() -> None:
    leases = Leases(4.0)
    leading = Leading(leases)
    assert leading.lead(R1, 4.0, 0.0).leader == R1
    assert leading.lead(R2, 4.0, 3.0).leader == R1
    assert leading.begin_move(R2, P0, Role.DECODE, 3.0) is None
    begun = leading.begin_move(R1, P0, Role.DECODE, 3.0)
    assert begun is not None
    assert leading.begin_move(R1, P0, Role.DECODE, 3.0) is None, "one is open"
    found = leading.lead(R2, 4.0, 4.0)
    assert (found.leader, found.last_move) == (R2, begun)
    assert not leading.end_move(R1, begun.number, 4.0), "it leads no more"
    assert leading.end_move(R2, begun.number, 4.0)
    leases.empty()
    after = leading.lead(R1, 4.0, 5.0)
    assert (after.leader, after.last_move) == (R1, None)
    later = leading.begin_move(R1, P0, Role.DECODE, 5.0)
    assert later is not None
    assert later.number > begun.number


def test_roles_follow_the_load_and_no_request_notices() -> None:
    cluster = run(a_history(SHAPE, LONG))
    assert cluster.roles.num_moved >= 1
    assert outcomes(cluster) <= {"length", "stop"}


def test_a_router_that_is_cut_from_the_store_is_followed_by_another_one() -> None:
    cut = Fault(
        at_s=1.0, kind=FaultKind.PARTITION, target=ROUTER, other=STORE, span_s=60.0, how="both"
    )
    cluster = run(a_history(SHAPE, LONG, cut))
    assert cluster.roles.num_moved >= 1
    assert cluster.roles.leading.leader(cluster.timeline.now_s()) == cluster.routers["router-2"].me


def test_a_role_that_lost_its_last_node_gets_one() -> None:
    crashes = [
        Fault(at_s=2.0, kind=FaultKind.CRASH, target=f"decode-{number}", how="known")
        for number in range(2)
    ]
    cluster = run(a_history(SHAPE, LONG, *crashes))
    assert Role.DECODE in {node.role for node in cluster.nodes.values()}
    alone = run(a_history(replace(SHAPE, target_ttft_s=0.0, target_tpot_s=0.0), LONG, *crashes))
    assert {node.role for node in alone.nodes.values()} == {Role.PREFILL}


def test_a_role_by_a_change_that_is_not_open_is_wrong() -> None:
    cluster = run(a_history(SHAPE, LONG))
    node = cluster.nodes["prefill-0"].me
    with pytest.raises(InternalError, match="takes a role by change 999"):
        cluster.roles.on_role(node, 999)


def test_a_person_may_not_take_the_last_node_that_decodes() -> None:
    cluster = run(a_history(replace(SHAPE, num_routers=1, num_decode=1), LONG[:1]))
    (decode,) = (one for one in cluster.nodes.values() if one.role is Role.DECODE)
    with pytest.raises(InternalError, match="was the last node that decodes"):
        decode.life.set_role(Role.PREFILL)


def test_a_change_by_load_may_not_take_the_last_node_that_prefills() -> None:
    shape = replace(SHAPE, num_prefill=1, num_routers=1)
    cluster = run(a_history(shape, LONG[:1]))
    node, leading, now_s = cluster.nodes["prefill-0"], cluster.roles.leading, 0.0
    leader = leading.lead(R1, 4.0, now_s).leader
    begun = leading.begin_move(leader, node.me, Role.DECODE, now_s)
    assert begun is not None
    with pytest.raises(InternalError, match="was the last node that prefills"):
        node.life.set_role(Role.DECODE, begun.number)


def test_a_change_by_load_may_give_decode_nodes_one_that_prefills() -> None:
    cluster = run(a_history(replace(SHAPE, num_prefill=1, num_routers=1), LONG[:1]))
    del cluster.nodes["prefill-0"]
    node, leading = cluster.nodes["decode-0"], cluster.roles.leading
    begun = leading.begin_move(leading.lead(R1, 4.0, 0.0).leader, node.me, Role.PREFILL, 0.0)
    assert begun is not None
    node.life.set_role(Role.PREFILL, begun.number)
    assert node.role is Role.PREFILL


def test_a_cluster_in_which_no_node_decodes_is_to_get_one() -> None:
    cluster = run(a_history(SHAPE, LONG[:1]))
    routers = cluster.routers.values()
    for name in [name for name, node in cluster.nodes.items() if node.role is not Role.PREFILL]:
        assert cluster.roles.why_unserved(routers) == ""
        del cluster.nodes[name]
    for num in (3, 2, 1):
        assert cluster.roles.why_unserved(routers) == f"no node decodes, and {num} could"
        assert cluster.roles.why_unserved([]) == "", "no router is there"
        cluster.nodes.popitem()
    assert cluster.roles.why_unserved(routers) == "", "no node is there"


def test_the_only_node_that_stays_is_given_the_role_in_which_it_answers() -> None:
    drains = [
        Fault(at_s=2.0, kind=FaultKind.DRAIN, target=f"decode-{number}", other=ROUTER)
        for number in range(2)
    ]
    cluster = run(a_history(replace(SHAPE, num_prefill=1), LONG, *drains))
    (node,) = cluster.nodes.values()
    assert node.role is Role.DECODE
    assert cluster.roles.num_moved >= 1


def test_a_cluster_whose_roles_stay_may_be_without_a_node_that_decodes() -> None:
    cluster = run(a_history(a_shape(), LONG[:1]))
    for name in ("decode-0", "decode-1"):
        del cluster.nodes[name]
    cluster.nodes["another"] = cluster.nodes["prefill-0"]
    assert cluster.roles.why_unserved(cluster.routers.values()) == ""


def test_a_role_is_taken_if_another_node_stays_in_the_one_that_is_left() -> None:
    leases, now_s = Leases(4.0), 0.0
    d0, d1, d2 = (view_of(name) for name in ("d0", "d1", "d2"))
    for view in (d0, d1):
        leases.heartbeat(view.record, view.load, now_s)
    leases.heartbeat(d2.record, replace(d2.load, is_draining=True), now_s)

    def takes_prefill(view: NodeView, *others: str) -> bool:
        wanted = replace(view.record, role=Role.PREFILL)
        return leases.take_role(wanted, view.load, others, now_s)

    assert not takes_prefill(d0, "d2", "nobody")
    assert takes_prefill(d0, "d2", "d1")
    assert not takes_prefill(d1, "d0", "d2"), "d0 prefills, and d2 leaves"
    assert [one.record.role for one in leases.live_nodes(now_s)] == [
        Role.PREFILL,
        Role.DECODE,
        Role.DECODE,
    ]
    now_s = 4.0
    assert not takes_prefill(d0, "d1"), "its lease has ended"
    leases.is_away = True
    with pytest.raises(PlacementUnavailable):
        takes_prefill(d0, "d1")
