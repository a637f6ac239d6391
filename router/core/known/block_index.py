"""Which nodes hold the KV of which blocks: as they report it, and as this router expects it. Pure.

Nodes report the blocks that enter and leave their tiers: the pool, host memory below it, and files.
Between a placement and the report that follows it, and of nodes that report nothing, the router
expects that a node holds the prompts that it was sent. All of it is a hint: a wrong one costs a
miss in a cache, never an answer.

A block counts as held in whatever tier it is: to copy it back takes a small part of the time to
compute it, and which of two nodes has less to do matters more. Other nodes can pull it from every
tier; what is only in files is read first.

The holders of a block, in whatever tier, are bits of one integer. A hash covers all tokens before
it, and a cache evicts a prefix after its continuations, so a node that holds a block holds those
before it: along a prompt the holders only become fewer, and a binary search finds where. What is
in which tier of a node is in sets of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from common.ids import Incarnation
from common.kv.blocks import BlockKey
from common.kv.tiers import Tier

MAX_BLOCKS = 10_000_000
"""Blocks in the index, whatever the number of their holders and tiers."""
MAX_EXPECTED = 65_536
MAX_RUNS = 8
"""How many different depths one look-up tells apart, the deepest ones."""
SWEPT_AT_ONCE = 4096
"""Blocks of nodes that have left which one report takes out of the index."""
LISTED_AT_ONCE = 512
"""Blocks that are looked up at once to be dropped one after the other."""


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """How many leading blocks of a prompt each node holds. A `run` is a depth and the nodes that
    end there, the deepest first."""

    runs: Sequence[tuple[int, int]]
    slots: dict[Incarnation, int]
    nodes: Sequence[Incarnation | None]
    """The node of each slot."""

    def on(self, node: Incarnation) -> int:
        """Return how many leading blocks the node holds."""
        runs = self.runs
        slot = self.slots.get(node) if runs else None
        if slot is not None:
            for depth, holders in runs:
                if holders >> slot & 1:
                    return depth
        return 0

    def deepest(self, number: int, draw: Callable[[int], int]) -> Iterator[Incarnation]:
        """Return up to `number` holders, those of the most blocks first.

        Of nodes that hold as many, those come first whose slots follow `draw(number of slots)`.
        """
        nodes = self.nodes
        for _, holders in self.runs:
            first, bits = draw(len(nodes)), f"{holders:b}"[::-1]
            for slot, end in ((first, len(bits)), (0, first)):
                while number and (slot := bits.find("1", slot, end)) >= 0:
                    number -= 1
                    node = nodes[slot]
                    slot += 1
                    if node is not None:
                        yield node


class BlockIndex:
    """At most `max_blocks` reported and `MAX_EXPECTED` expected blocks. No method does more than a
    bounded piece of work, but for one per block of its argument."""

    def __init__(self, max_blocks: int = MAX_BLOCKS, max_expected: int = MAX_EXPECTED) -> None:
        self._max_blocks = max_blocks
        self._max_expected = max_expected
        self._holders: dict[BlockKey, int] = {}
        """Who has which blocks. Blocks with one holder share the integer of `_bits`, and mostly
        blocks that follow each other share theirs."""
        self._expected: dict[BlockKey, int] = {}
        """The expected blocks, oldest first.

        In an `OrderedDict` each would take twice as long; the oldest are removed only where nodes
        report nothing.
        """
        self._first: dict[BlockKey, None] = {}
        """The first keys of `_expected`, the first one last, and some that are not there any more:
        the look-up of a dict's first key passes all that was taken out in front of it."""
        self._slots: dict[Incarnation, int] = {}
        self._held: dict[int, dict[Tier, set[BlockKey]]] = {}
        """The reported blocks of each slot."""
        self._bits: list[int] = []
        """The bit of each slot: the holders of a block that no other node has are this object."""
        self._leaving: dict[int, dict[Tier, set[BlockKey]]] = {}
        self._emptied: list[int] = []
        """Slots of nodes that have left, of which only expected blocks may be here."""
        self._gone = 0
        """The bits of all slots whose nodes have left."""
        self._free: list[int] = []
        self._node_of: list[Incarnation | None] = []
        self._last: tuple[Sequence[BlockKey], HeldBlocks] | None = None
        """The last look-up, for as long as nothing changes: a choice makes several alike."""

    def __len__(self) -> int:
        """Return how many blocks nodes have reported."""
        return len(self._holders)

    def num_held(self, node: Incarnation, tier: Tier = Tier.POOL) -> int:
        """Return how many blocks the node has reported of a tier."""
        held = self._held.get(self._slots.get(node, -1))
        return 0 if held is None else len(held[tier])

    # Reports and placements.

    def on_report(
        self,
        node: Incarnation,
        added: Collection[BlockKey],
        removed: Collection[BlockKey],
        tier: Tier = Tier.POOL,
    ) -> int:
        """Record blocks that entered or left a tier of a node; return how many had no room."""
        self._sweep()
        if not added and not removed:
            return 0
        slot, self._last = self._slot(node), None
        index, bit, held = self._holders, self._bits[slot], self._held[slot]
        fitting = added
        if len(index) + len(added) > self._max_blocks:
            fitting = _fitting(index, added, self._max_blocks - len(index))
        if index.keys().isdisjoint(fitting):
            index.update(dict.fromkeys(fitting, bit))
        else:
            self._add_holder(fitting, bit)
        keys = held[tier]
        keys.update(fitting)
        if removed:
            self._take_out(keys.intersection(removed), tier, held, bit)
        if tier is Tier.POOL and self._expected:  # what is expected enters the pool
            self._expect_no_more(fitting, bit)
            self._expect_no_more(removed, bit)
        return len(added) - len(fitting)

    def expect(self, keys: Sequence[BlockKey], node: Incarnation) -> None:
        """Expect these blocks on the node, which is about to compute or receive them."""
        bit, self._last = self._bits[self._slot(node)], None
        holders, expected = self._holders, self._expected

        def is_new(key: BlockKey) -> bool:
            return not (holders.get(key, 0) | expected.get(key, 0)) & bit

        num_known = bisect_left(keys, True, key=is_new)
        # Deepest first, so that a chain loses its end before its beginning.
        new = keys[num_known:][::-1]
        if self._first and not self._first.keys().isdisjoint(new):
            for key in new:
                self._first.pop(key, None)
        if expected.keys().isdisjoint(new):
            expected.update(dict.fromkeys(new, bit))
        else:
            before, after = 0, bit
            for key in new:
                nodes = expected.pop(key, 0)
                if nodes is not before:  # else they are those of the block before it
                    before, after = nodes, nodes | bit
                expected[key] = after
        if len(expected) > self._max_expected:
            self._drop_first(len(expected) - self._max_expected)

    def forget(self, node: Incarnation) -> None:
        """Forget the blocks of a node that has left, or that will report all of them again."""
        slot = self._slots.pop(node, None)
        if slot is None:
            return
        self._leaving[slot], self._node_of[slot] = self._held.pop(slot), None
        self._gone |= self._bits[slot]
        self._sweep()

    # Look-ups.

    def held(self, keys: Sequence[BlockKey], *, to_send: bool = False) -> HeldBlocks:
        """Return how many leading blocks of a prompt each node holds; with `to_send`, of those
        that it has reported, and can send."""
        if self._last is not None and self._last[0] is keys and not to_send:
            return self._last[1]
        held = HeldBlocks(self._runs(keys, to_send), self._slots, self._node_of)
        if not to_send:
            self._last = keys, held
        return held

    def _runs(self, keys: Sequence[BlockKey], to_send: bool) -> list[tuple[int, int]]:
        """Return the runs of `HeldBlocks`, by a binary search for the end of each.

        `found` is where the searches found blocks, and which nodes have them. The next search is
        between the deepest of these that another node has and the one behind it.
        """
        runs: list[tuple[int, int]] = []
        if not keys:
            return runs
        reported, expected = self._holders.get, ({} if to_send else self._expected).get
        left = holders = (reported(keys[0], 0) | expected(keys[0], 0)) & ~self._gone
        low, end, found = 1, len(keys), [(1, left)]
        while left and len(runs) < MAX_RUNS:
            while low < end:
                middle = (low + end + 1) // 2
                key = keys[middle - 1]
                holders_here = reported(key, 0)
                if hoped := expected(key):
                    holders_here |= hoped
                holders_here &= left
                if holders_here:
                    low, holders = middle, holders_here
                    found.append((low, holders))
                else:
                    end = middle - 1
            runs.append((low, holders))
            left ^= holders
            while found and not (holders := found[-1][1] & left):
                end = found.pop()[0] - 1
            if found:
                low = found[-1][0]
        return runs

    def num_in_memory(self, keys: Sequence[BlockKey], node: Incarnation, most: int) -> int:
        """Return how many of the first `most` blocks, which a node holds, it has in memory.

        The others are on disk alone.
        """
        held = self._held.get(self._slots.get(node, -1))
        if held is None or not held[Tier.DISK]:
            return most
        pool, host = held[Tier.POOL], held[Tier.HOST]

        def is_on_disk(key: BlockKey) -> bool:
            return key not in pool and key not in host

        return bisect_left(keys, True, hi=most, key=is_on_disk)

    # Holders.

    def _add_holder(self, keys: Iterable[BlockKey], bit: int) -> None:
        before, after = 0, bit
        index, holders_of = self._holders, self._holders.get
        for key in keys:
            holders = holders_of(key, 0)
            if holders is not before:  # else it is that of the block before it
                before = holders
                after = holders if holders & bit else holders | bit if holders else bit
            index[key] = after

    def _take_out(
        self, gone: set[BlockKey], tier: Tier, held: Mapping[Tier, set[BlockKey]], bit: int
    ) -> None:
        """Take blocks out of a tier of a node, and where no other has them, out of the index."""
        held[tier].difference_update(gone)
        for name, other in held.items():
            if other and name is not tier:
                gone = gone.difference(other)
        index, before, after = self._holders, 0, 0
        for key in gone:
            holders = index[key]
            if holders == bit:
                del index[key]
                continue
            if holders is not before:
                before, after = holders, holders ^ bit
                if not after & (after - 1):
                    after = self._bits[after.bit_length() - 1]
            index[key] = after

    def _expect_no_more(self, keys: Iterable[BlockKey], bits: int) -> None:
        expected = self._expected
        if expected.keys().isdisjoint(keys):
            return
        for key in keys:
            nodes = expected.get(key, 0)
            if nodes == bits:
                del expected[key]
            elif nodes & bits:
                if left := nodes & ~bits:
                    expected[key] = left
                else:
                    del expected[key]

    def _drop_first(self, number: int) -> None:
        """Expect so many blocks no more: those that were expected first."""
        expected, first = self._expected, self._first
        while number:
            if not first:
                first |= dict.fromkeys([*islice(expected, LISTED_AT_ONCE)][::-1])
            key, _ = first.popitem()
            if expected.pop(key, 0):
                number -= 1

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
            found = [key for key, nodes in self._expected.items() if nodes & bits]
            self._expect_no_more(found, bits)
        self._gone &= ~bits
        self._free += self._emptied
        self._emptied.clear()

    def _sweep(self) -> None:
        """Take some blocks of the nodes that have left out of the index."""
        if not self._leaving:
            return
        num_left, self._last = SWEPT_AT_ONCE, None
        while self._leaving and num_left:
            slot, held = next(iter(self._leaving.items()))
            for tier, keys in held.items():
                gone = {keys.pop() for _ in range(min(num_left, len(keys)))}
                self._take_out(gone, tier, held, self._bits[slot])
                num_left -= len(gone)
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
