"""The node with the most room: seats, blocks and queued prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence

from router.core.known.node_view import NodeView
from router.core.policies.query import PolicyState, Query

QUEUED_TOKENS_SCALE = 8192
"""Tokens of prompts that weigh as much as all seats of a node."""


def least_loaded(nodes: Sequence[NodeView], _query: Query, _state: PolicyState) -> list[float]:
    """Return `1 / (1 + pressure)` per node: 1 for an idle node, and never 0, so that the fuller of
    two full nodes still scores less."""
    return [1 / (1 + pressure(node)) for node in nodes]


def pressure(node: NodeView) -> float:
    """Return how busy a node is: 0 when idle, about 1 when its seats are taken."""
    record = node.record
    seats = node.num_requests / (record.max_num_seqs or 1)
    blocks = node.num_used_blocks / (record.num_blocks or 1)
    return seats + (blocks if blocks < 1.0 else 1.0) + node.num_queued_tokens / QUEUED_TOKENS_SCALE
