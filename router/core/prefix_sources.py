"""The node from which a prefill node can pull what it lacks of a prompt. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from common.ids import Incarnation
from common.kv.prefix_source import PrefixSource
from router.core.known.block_index import HeldBlocks
from router.core.policies.least_loaded import pressure
from router.core.policies.query import NodeView


def prefix_source(
    nodes: Sequence[NodeView], prefill: NodeView, decode: Incarnation | None, held: HeldBlocks
) -> PrefixSource | None:
    """Return the node with the most of a prompt, of those that can send it to `prefill`.

    `held` is what nodes have reported. None: no node has more than `prefill` itself. Of nodes with
    equally much it is `decode`, or else the one with the least to do.
    """
    num_own = held.on(prefill.incarnation)
    if not held.runs or held.runs[0][0] <= num_own:
        return None
    found = [
        (num_blocks, node.incarnation == decode, -pressure(node), node.incarnation)
        for node in nodes
        if (num_blocks := held.on(node.incarnation)) > num_own and _can_send(node, prefill)
    ]
    if not found:
        return None
    num_blocks, _, _, source = max(found)
    return PrefixSource(source, num_blocks * prefill.record.block_size)


def _can_send(node: NodeView, prefill: NodeView) -> bool:
    return (
        node.record.sends_blocks
        and not (node.load.is_draining or node.is_suspected)
        and node.record.can_exchange_kv(prefill.record)
        and prefill.incarnation not in node.load.kv_unreachable
    )
