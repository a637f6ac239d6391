"""Which nodes hold the KV of which blocks: as they report it, and as this router expects it. Pure.

Nodes report the blocks that enter and leave their tiers: the pool, host memory below it, and files.
Between a placement and the report that follows it, and of nodes that report nothing, the router
expects that a node holds the prompts that it was sent. All of it is a hint: a wrong one costs a
miss in a cache, never an answer.

A block counts as held in whatever tier it is: to copy it back takes a small part of the time to
compute it, and which of two nodes has less to do matters more. Other nodes can pull it from every
tier; what is only in files is read first.

The holders of a block are bits of one integer. A hash covers all tokens before it, and a cache
evicts a prefix after its continuations, so a node that holds a block holds those before it: along a
prompt the holders only become fewer, and a binary search finds where.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple

from common.ids import Incarnation
from common.kv.blocks import BlockHash, BlockKey, block_key, block_keys
from common.kv.tiers import Tier

MAX_BLOCKS = 10_000_000
"""Blocks in the index, once for each tier that they are in, whatever the number of holders."""
MAX_EXPECTED = 65_536
MAX_RUNS = 8
"""How many different depths one look-up tells apart, the deepest ones."""
SWEPT_AT_ONCE = 4096
"""Blocks of nodes that have left which one report takes out of the index."""


_NOTHING: dict[BlockKey, int] = {}


class HeldBlocks(NamedTuple):
    """How many leading blocks of a prompt each node holds. A `run` is a depth and the nodes that
    end there, the deepest first."""

    runs: Sequence[tuple[int, int]]
    slots: dict[Incarnation, int]
    nodes: Sequence[Incarnation | None]
    """The node of each slot."""

    def on(self, node: Incarnation) -> int:
        """Return how many leading blocks the node holds."""
        slot = self.slots.get(node) if self.runs else None
        if slot is not None:
            for depth, holders in self.runs:
                if holders >> slot & 1:
                    return depth
        return 0

    def deepest(self, number: int, draw: Callable[[int], int]) -> Iterator[Incarnation]:
        """Return up to `number` holders, those of the most blocks first.

        Of nodes that hold as many, those come first whose slots follow `draw(number of slots)`.
        """
        for _, holders in self.runs:
            first = draw(len(self.nodes))
            for part in (holders >> first << first, holders & (1 << first) - 1):
                while part and number:
                    lowest = part & -part
                    part ^= lowest
                    number -= 1
                    node = self.nodes[lowest.bit_length() - 1]
                    if node is not None:
                        yield node


class BlockIndex:
    """At most `max_blocks` reported and `MAX_EXPECTED` expected blocks. No method does more than a
    bounded piece of work, but for one per block of its argument."""

    def __init__(self, max_blocks: int = MAX_BLOCKS, max_expected: int = MAX_EXPECTED) -> None:
        self._max_blocks = max_blocks
        self._max_expected = max_expected
        self._holders: dict[Tier, dict[BlockKey, int]] = {tier: {} for tier in Tier}
        """Who has which blocks in each tier."""
        pool, host, disk = (self._holders[tier].get for tier in Tier)
        self._holders_of = pool, host, disk
        self._expected: dict[BlockKey, int] = {}
        """Those that were expected first come first: in an `OrderedDict` each takes twice as long,
        and the first ones are taken out where nodes report nothing, and else hardly ever."""
        self._slots: dict[Incarnation, int] = {}
        self._held: dict[int, dict[Tier, set[BlockKey]]] = {}
        """The reported blocks of each slot."""
        self._bits: list[int] = []
        """One integer for each slot: most blocks have one holder, and share it."""
        self._leaving: dict[int, dict[Tier, set[BlockKey]]] = {}
        self._emptied: list[int] = []
        """Slots of nodes that have left, of which only expected blocks may be here."""
        self._gone = 0
        """The bits of all slots whose nodes have left."""
        self._free: list[int] = []
        self._node_of: list[Incarnation | None] = []
        self._last: tuple[Sequence[BlockHash], HeldBlocks] | None = None
        """The last look-up, for as long as nothing changes: a choice makes several alike."""

    def __len__(self) -> int:
        """Return how many blocks are known of reports, in all tiers."""
        return sum(map(len, self._holders.values()))

    def num_held(self, node: Incarnation, tier: Tier = Tier.POOL) -> int:
        """Return how many blocks the node has reported of a tier."""
        held = self._held.get(self._slots.get(node, -1))
        return 0 if held is None else len(held[tier])

    # What nodes say, and what is placed.

    def on_report(
        self,
        node: Incarnation,
        added: Collection[BlockKey],
        removed: Collection[BlockKey],
        tier: Tier = Tier.POOL,
    ) -> int:
        """Take blocks that entered or left a tier of a node; return how many had no room."""
        self._sweep()
        if not added and not removed:
            return 0
        slot, self._last = self._slot(node), None
        bit, keys = self._bits[slot], self._held[slot][tier]
        index = self._holders[tier]
        fitting = added
        if len(self) + len(added) > self._max_blocks:
            fitting = _fitting(index, added, self._max_blocks - len(self))
        if index.keys().isdisjoint(fitting):
            index.update(dict.fromkeys(fitting, bit))
        else:
            holders_of = index.get
            index.update([(key, holders_of(key, 0) | bit) for key in fitting])
        keys.update(fitting)
        gone = keys.intersection(removed)
        keys -= gone
        for key in gone:
            left = index[key] & ~bit
            if not left:
                del index[key]
            else:
                index[key] = left if left & (left - 1) else self._bits[left.bit_length() - 1]
        if tier is Tier.POOL and self._expected:  # what is expected enters the pool
            expected, nodes_of = self._expected, self._expected.get
            for key in chain(fitting, removed):
                nodes = nodes_of(key)
                if nodes is not None and nodes & bit:
                    if nodes == bit:
                        del expected[key]
                    else:
                        expected[key] = nodes & ~bit
        return len(added) - len(fitting)

    def expect(self, hashes: Sequence[BlockHash], node: Incarnation) -> None:
        """Take that the node is about to compute or receive these blocks."""
        slot, expected = self._slot(node), self._expected
        bit, num_known = self._bits[slot], self.held(hashes).on(node)
        self._last = None
        # Deepest first, so that a chain loses its end before its beginning.
        for key in reversed(block_keys(hashes[num_known:])):
            expected[key] = expected.pop(key, 0) | bit
        num_over = len(expected) - self._max_expected
        if num_over > 0:
            for key in list(islice(expected, num_over)):
                del expected[key]

    def forget(self, node: Incarnation) -> None:
        """Forget what a node holds: it has left, or will say it anew."""
        slot = self._slots.pop(node, None)
        if slot is None:
            return
        self._leaving[slot], self._node_of[slot] = self._held.pop(slot), None
        self._gone |= self._bits[slot]
        self._sweep()

    # Look-ups.

    def held(self, hashes: Sequence[BlockHash], *, to_send: bool = False) -> HeldBlocks:
        """Return how many leading blocks of a prompt each node holds; with `to_send`, of those
        that it has reported, and can send."""
        runs: list[tuple[int, int]] = []
        if not hashes:
            return HeldBlocks(runs, self._slots, self._node_of)
        if self._last is not None and self._last[0] is hashes and not to_send:
            return self._last[1]
        pool, host, disk = self._holders_of
        expected = (_NOTHING if to_send else self._expected).get
        key = block_key(hashes[0])
        left = (pool(key, 0) | host(key, 0) | disk(key, 0) | expected(key, 0)) & ~self._gone
        end = len(hashes)
        while left and len(runs) < MAX_RUNS:
            # The most leading blocks that any of those `left` holds: the deeper it goes, the fewer
            # holders there are.
            low, new = 1, left
            while low < end:
                middle = (low + end + 1) // 2
                key = block_key(hashes[middle - 1])
                found = (pool(key, 0) | host(key, 0) | disk(key, 0) | expected(key, 0)) & left
                if found:
                    low, new = middle, found
                else:
                    end = middle - 1
            left &= ~new
            runs.append((end, new))
            end -= 1
        held = HeldBlocks(runs, self._slots, self._node_of)
        if not to_send:
            self._last = hashes, held
        return held

    def num_in_memory(self, hashes: Sequence[BlockHash], node: Incarnation, most: int) -> int:
        """Return how many of the first `most` blocks a node has reported to be in memory.

        The others that it holds are on disk alone.
        """
        if not self._holders[Tier.DISK]:
            return most
        pool, host = self._holders[Tier.POOL].get, self._holders[Tier.HOST].get
        slot, low, end = self._slots.get(node, len(self._bits)), 0, most
        while low < end:
            middle = (low + end + 1) // 2
            key = block_key(hashes[middle - 1])
            if (pool(key, 0) | host(key, 0)) >> slot & 1:
                low = middle
            else:
                end = middle - 1
        return low

    # Slots.

    def _slot(self, node: Incarnation) -> int:
        slot = self._slots.get(node)
        if slot is None:
            if not self._free:
                self._free_emptied()
            slot = self._free.pop() if self._free else len(self._bits)
            if slot == len(self._bits):
                self._bits.append(1 << slot)
                self._node_of.append(None)
            self._slots[node], self._held[slot] = slot, {tier: set() for tier in Tier}
            self._node_of[slot] = node
        return slot

    def _free_emptied(self) -> None:
        """Free slots of nodes that have left: one pass for all of them, however many left at once.

        Until then what is expected of them is looked over.
        """
        bits = sum(self._bits[slot] for slot in self._emptied)
        if bits:
            expected = self._expected
            for key in [key for key, nodes in expected.items() if nodes & bits]:
                if left := expected[key] & ~bits:
                    expected[key] = left
                else:
                    del expected[key]
        self._gone &= ~bits
        self._free += self._emptied
        self._emptied.clear()

    def _drop(self, index: dict[BlockKey, int], key: BlockKey, bit: int) -> None:
        holders = index[key] & ~bit
        if not holders:
            del index[key]
        elif holders & (holders - 1):
            index[key] = holders
        else:
            index[key] = self._bits[holders.bit_length() - 1]

    def _sweep(self) -> None:
        """Take some blocks of the nodes that have left out of the index."""
        if not self._leaving:
            return
        num_left, self._last = SWEPT_AT_ONCE, None
        while self._leaving and num_left:
            slot, held = next(iter(self._leaving.items()))
            bit = self._bits[slot]
            for tier, keys in held.items():
                while keys and num_left:
                    self._drop(self._holders[tier], keys.pop(), bit)
                    num_left -= 1
            if not any(held.values()):
                del self._leaving[slot]
                self._emptied.append(slot)


def _fitting(
    index: Mapping[BlockKey, int], added: Collection[BlockKey], num_room: int
) -> list[BlockKey]:
    """Return what can be added to an index that has room for so many further blocks."""
    new = dict.fromkeys(key for key in added if key not in index)
    dropped = set(islice(new, max(num_room, 0), None))
    return [key for key in added if key not in dropped]
