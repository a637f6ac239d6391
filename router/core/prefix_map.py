"""What the router believes each node's prefix cache holds, learned from its own placements.

A hint and nothing more: a wrong hit costs a miss on the node, never an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from common.ids import Incarnation
from common.kv.blocks import BlockHash

MAX_HASHES = 65_536
MAX_NODES_PER_HASH = 8


class PrefixMap:
    """A bounded map from a block hash to the nodes that computed or received it.

    The least recently used hash is dropped first.
    """

    def __init__(self, max_hashes: int = MAX_HASHES) -> None:
        self._max_hashes = max_hashes
        self._nodes: OrderedDict[BlockHash, tuple[Incarnation, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, hashes: Sequence[BlockHash], node: Incarnation) -> None:
        """Add `node` as a holder of these blocks, which it is about to compute or receive."""
        # Deepest first, so that a chain loses its end before its beginning.
        for block_hash in reversed(hashes):
            held = tuple(other for other in self._nodes.pop(block_hash, ()) if other != node)
            self._nodes[block_hash] = (node, *held)[:MAX_NODES_PER_HASH]
        while len(self._nodes) > self._max_hashes:
            self._nodes.popitem(last=False)

    def num_hits(self, hashes: Sequence[BlockHash], node: Incarnation) -> int:
        """Return how many leading blocks `node` is believed to hold."""
        for index, block_hash in enumerate(hashes):
            if node not in self._nodes.get(block_hash, ()):
                return index
        return len(hashes)
