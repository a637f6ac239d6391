"""The node with the most room: seats, blocks and queued prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence

from router.core.known.node_view import NodeView
from router.core.policies.query import PolicyState, Query


def least_loaded(nodes: Sequence[NodeView], _query: Query, _state: PolicyState) -> list[float]:
    """Return `1 / (1 + pressure)` per node: 1 for an idle node, and never 0, so that the fuller of
    two full nodes still scores less."""
    return [1 / (1 + node.pressure) for node in nodes]
