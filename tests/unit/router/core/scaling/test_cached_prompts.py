"""What nodes have cached of prompts that wait is no demand for computing, and takes blocks."""

from __future__ import annotations

from dataclasses import replace

from common.nodes import NodeLoad, Role
from placement.store import LiveNode
from router.core.membership import Membership
from router.core.scaling.measure import Measured, Meter
from tests.support.nodes.node_records import record

SIZES = {"num_blocks": 100_000, "max_num_seqs": 256, "max_model_len": 100_000}
IDLE = NodeLoad(free_blocks=90_000, free_seats=256, num_running=0, num_waiting=0, queued_tokens=0)
WAITING = replace(IDLE, num_running=2, num_waiting=8, queued_tokens=3002, num_found_tokens=27_000)


def members(*nodes: tuple[str, Role, NodeLoad]) -> Membership:
    """Return a membership that hears nodes with these ids, roles and loads."""
    found = Membership(model="m", lease_s=5.0)
    listing = [
        LiveNode(record=record(node_id, role, **SIZES), load=load) for node_id, role, load in nodes
    ]
    found.on_listing(listing, 0.0)
    for node in listing:
        found.on_heard(node.record.incarnation)
    return found


def measured(role: Role, *nodes: tuple[str, Role, NodeLoad]) -> Measured:
    return Meter().read(members(*nodes).nodes(), 0.0)[role]


def test_demand_counts_the_tokens_that_are_computed_and_the_blocks_of_all() -> None:
    found = measured(Role.MIXED, ("m0", Role.MIXED, WAITING))
    assert found.queued_tokens == 3000, "each running answer has one token more"
    assert found.waiting_blocks == (3000 + 27_000) / 4


def test_prompts_that_wait_to_be_computed_hold_reserved_blocks_for_all_of_their_tokens() -> None:
    reserved = replace(IDLE, num_reserved_blocks=8000)
    found = measured(Role.DECODE, ("d0", Role.DECODE, reserved), ("p0", Role.PREFILL, WAITING))
    assert found.used_blocks == 10_000 - (3000 + 27_000) / 4


def test_an_earlier_node_reports_no_cached_tokens() -> None:
    found = measured(Role.MIXED, ("m0", Role.MIXED, replace(WAITING, num_found_tokens=0)))
    assert found.waiting_blocks == 3000 / 4
