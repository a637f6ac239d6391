"""Each node in turn, whatever it is doing."""

from __future__ import annotations

from collections.abc import Sequence

from router.core.known.node_view import NodeView
from router.core.policies.query import PolicyState, Query


def round_robin(nodes: Sequence[NodeView], _query: Query, state: PolicyState) -> list[float]:
    """Return 1 for the node whose turn it is, and less for those whose turn comes later."""
    num_nodes = len(nodes)
    turns = {node: turn for turn, node in enumerate(sorted(one.incarnation for one in nodes))}
    return [1 - (turns[one.incarnation] - state.turn) % num_nodes / num_nodes for one in nodes]
