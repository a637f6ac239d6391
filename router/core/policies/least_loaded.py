"""The node with the most room: seats, blocks and queued prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence

from router.core.policies.query import NodeView, PolicyState, Query

_QUEUED_TOKENS_SCALE = 8192


def least_loaded(nodes: Sequence[NodeView], _query: Query, _state: PolicyState) -> list[float]:
    """Return `1 / (1 + pressure)` per node: 1 for an idle node, and never 0, so that the fuller of
    two full nodes still scores less. An old load does not count."""
    return [1 / (1 + _pressure(node)) for node in nodes]


def _pressure(node: NodeView) -> float:
    record, load = node.record, node.load
    seats = node.num_requests / max(1, record.max_num_seqs)
    if not node.is_listed:
        return seats
    blocks = 1 - min(load.free_blocks, record.num_blocks) / max(1, record.num_blocks)
    return seats + blocks + load.queued_tokens / _QUEUED_TOKENS_SCALE
