"""The node that holds most of the prompt already, unless it is much busier than another."""

from __future__ import annotations

from collections.abc import Sequence

from router.core.policies.least_loaded import least_loaded
from router.core.policies.query import NodeView, PolicyState, Query

# A whole prompt in the cache weighs as much as the difference between an idle node and one whose
# pressure is 1 (all seats taken): beyond that, waiting costs more than computing again.
_HIT_WEIGHT = 1 / 3


def prefix_affinity(nodes: Sequence[NodeView], query: Query, state: PolicyState) -> list[float]:
    """Return a weighted mean of the cached share of the prompt and of `least_loaded`."""
    loads = least_loaded(nodes, query, state)
    return [
        _HIT_WEIGHT * _cached_share(node, query, state) + (1 - _HIT_WEIGHT) * load
        for node, load in zip(nodes, loads, strict=True)
    ]


def _cached_share(node: NodeView, query: Query, state: PolicyState) -> float:
    hashes = query.block_hashes(node.record)
    num_hits = state.prefixes.num_hits(hashes, node.incarnation)
    return num_hits * node.record.block_size / max(1, len(query.prompt_token_ids))
