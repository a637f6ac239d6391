"""What a router knows of nodes that are heard, and of those that the store lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common.nodes import NodeLoad, Role
from placement.store import LiveNode
from router.core.membership import Membership
from tests.support.nodes.node_records import record

LEASE_S = 5.0


def live(name: str, role: Role, *, is_draining: bool = False, **more: Any) -> LiveNode:
    """Return a node with room for one request; `more` are fields of its record."""
    load = NodeLoad(
        free_blocks=1,
        free_seats=1,
        num_running=0,
        num_waiting=0,
        queued_tokens=0,
        is_draining=is_draining,
    )
    return LiveNode(record=record(name, role, **more), load=load)


def membership(heard: Sequence[LiveNode], listed: Sequence[LiveNode]) -> Membership:
    """Return that of a router of the model `m`, whose tokenizer is `t`.

    These nodes are heard, and these are in the store for longer than a lease.
    """
    membership = Membership(model="m", lease_s=LEASE_S, tokens="t")
    membership.on_listing(heard, 0.0)
    for node in heard:
        membership.on_heard(node.record.incarnation)
    for second in range(1, 10):
        membership.on_listing(listed, float(second))
    return membership
