"""Nodes as the store lists them, and a membership that hears them."""

from __future__ import annotations

from common.nodes import NodeLoad, Role
from placement.store import LiveNode
from router.core.membership import Membership
from tests.support.nodes.node_records import record

LEASE_S = 5.0


def live(
    node_id: str = "d0", epoch: int = 1, role: Role = Role.DECODE, num_running: int = 0
) -> LiveNode:
    load = NodeLoad(
        free_blocks=10, free_seats=4, num_running=num_running, num_waiting=1, queued_tokens=0
    )
    return LiveNode(record=record(node_id, role, epoch=epoch), load=load)


def with_nodes(*nodes: LiveNode, now_s: float = 0.0) -> Membership:
    """Listed and heard."""
    membership = Membership(model="m", lease_s=LEASE_S)
    membership.on_listing(nodes, now_s)
    for node in nodes:
        membership.on_heard(node.record.incarnation)
    return membership
