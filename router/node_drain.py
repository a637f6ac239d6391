"""Asking a node of the cluster to leave, on behalf of whoever operates it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from common.errors import NodeLost
from common.ids import Incarnation
from router.node_pool import NodePool

log = logging.getLogger("pdserve.router.nodes")


class UnknownNode(Exception):
    """No node of this name is known here; `known` are those that are, ordered."""

    def __init__(self, node_id: str, known: list[str]) -> None:
        super().__init__(node_id)
        self.node_id = node_id
        self.known = known


@dataclass(frozen=True, slots=True)
class DrainingNode:
    """A node that was asked to leave; what runs there has `timeout_s` from the first asking on."""

    node: Incarnation
    timeout_s: float


async def drain_node(pool: NodePool, node_id: str) -> DrainingNode:
    """Ask the latest life of `node_id` that this router knows, and no other one.

    Raises `UnknownNode`, `StaleEpoch` when the node has begun a new life, `NodeLost` when it does
    not answer.
    """
    known = [record.incarnation for record in pool.membership.records()]
    lives = [incarnation for incarnation in known if incarnation.node_id == node_id]
    if not lives:
        raise UnknownNode(node_id, sorted({incarnation.node_id for incarnation in known}))
    node = max(lives)
    client = pool.client(node)
    if client is None:
        raise NodeLost(f"{node} has left")
    timeout_s = await client.drain()
    log.info("%s was asked to leave", node)
    return DrainingNode(node, timeout_s)
