"""Between which nodes cached KV goes: for a prompt, when a node leaves, when one starts. Pure.

A router that has just started hears its nodes one after the other, and a stream may have broken: so
the node that a new one wants may be there and not be heard yet. The new node serves meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from common.ids import Incarnation
from common.kv.prefix_source import PrefixSource
from common.nodes import NodeRecord, Role
from router.core.known.block_index import HeldBlocks
from router.core.known.node_view import NodeView


def prefix_source(
    nodes: Sequence[NodeView],
    receiver: NodeView,
    decode: Incarnation | None,
    held: HeldBlocks,
    num_in_memory: Callable[[Incarnation, int], int],
) -> PrefixSource | None:
    """Return the node with the most of a prompt, of those that can send it to `receiver`.

    `held` is what nodes have reported, and `num_in_memory` says how many of so many leading blocks
    a node need not read from disk. None: no node has more than `receiver` itself. Of nodes with
    equally much it is the one with most in memory, then `decode`, then the one with the least to
    do. How much that is helps the receiver to decide.
    """
    num_own = held.on(receiver.incarnation)
    if not held.runs or held.runs[0][0] <= num_own:
        return None
    found = [
        (num_blocks, node)
        for node in nodes
        if (num_blocks := held.on(node.incarnation)) > num_own and _can_send(node, receiver)
    ]
    if not found:
        return None
    most = max(num_blocks for num_blocks, _ in found)

    def fitness(node: NodeView) -> tuple[int, bool, float, Incarnation]:
        me = node.incarnation
        return num_in_memory(me, most), me == decode, -node.pressure, me

    deepest = [node for num_blocks, node in found if num_blocks == most]
    best = max(deepest, key=fitness)
    num_read = most - num_in_memory(best.incarnation, most)
    size = receiver.record.block_size
    num_queued = round(best.num_queued_tokens)
    return PrefixSource(best.incarnation, most * size, num_read * size, num_queued)


def heir_of(leaving: Incarnation, nodes: Sequence[NodeView]) -> Incarnation | None:
    """Return the node that takes over what a draining node has cached, if there is one.

    It computes prompts: a prefill node, or else a mixed one. One is enough: others pull from it.
    No prompt waits for that, so a suspected node is asked where no other one is left.
    """
    source = next((node for node in nodes if node.incarnation == leaving), None)
    if source is None:
        return None
    heirs = [
        node
        for node in nodes
        if node.record.role in (Role.PREFILL, Role.MIXED)
        and node.record.sends_blocks
        and node.incarnation != leaving
        and not node.load.is_draining
        and _reaches(source, node)
    ]
    best = min(heirs, key=_as_heir, default=None)
    return None if best is None else best.incarnation


AUTO = "auto"
"""Any node may warm the one that asks."""
WAIT_S = 30.0
"""A node that others can warm has computed prompts of its own after this time."""


def warm_source_of(new: Incarnation, nodes: Sequence[NodeView], wanted: str) -> Incarnation | None:
    """Return the node that warms a new one: that with the id `wanted`, or any; None: there is none.

    Of any it is one of the new one's role, if one has cached blocks; then that with most of them,
    as far as the new one has room for them. No prompt waits for that, so a suspected node is
    asked as well, which answers when it is heard again, but after all others.
    """
    receiver = next((node for node in nodes if node.incarnation == new), None)
    if receiver is None:
        return None
    found = [
        node
        for node in nodes
        if node.incarnation != new
        and _stays_in_reach(node, receiver)
        and (wanted in (node.record.node_id, AUTO))
        and (node.load.num_cached_blocks or wanted != AUTO)
    ]

    def fitness(node: NodeView) -> tuple[bool, bool, int, float, Incarnation]:
        num_blocks = min(node.load.num_cached_blocks, receiver.record.num_blocks // 2)
        is_alike = node.record.role is receiver.record.role
        is_heard = not node.is_suspected
        return is_heard, is_alike, num_blocks, -node.pressure, node.incarnation

    best = max(found, key=fitness, default=None)
    return None if best is None else best.incarnation


def _as_heir(node: NodeView) -> tuple[bool, bool, float, Incarnation]:
    is_mixed = node.record.role is Role.MIXED
    return node.is_suspected, is_mixed, node.pressure, node.incarnation


def _can_send(node: NodeView, receiver: NodeView) -> bool:
    """Return whether a prompt may wait for what a node sends: now, so it is not suspected."""
    return not node.is_suspected and _stays_in_reach(node, receiver)


def _stays_in_reach(node: NodeView, receiver: NodeView) -> bool:
    is_staying = not node.load.is_draining
    return node.record.sends_blocks and is_staying and _reaches(node, receiver)


def _reaches(source: NodeView, node: NodeView) -> bool:
    can_use = source.record.can_exchange_kv(node.record)
    return can_use and node.incarnation not in source.load.kv_unreachable


class Settled(NamedTuple):
    """A wish that is settled: `source` is asked to offer its blocks to `new`; None: no node is."""

    new: Incarnation
    wanted: str
    source: Incarnation | None


class WarmWishes:
    """The wishes of new nodes, at most one of each."""

    def __init__(self) -> None:
        self._wishes: dict[Incarnation, tuple[str, float]] = {}

    def __len__(self) -> int:
        """Return how many nodes wait."""
        return len(self._wishes)

    def add(self, new: Incarnation, wanted: str, now_s: float) -> None:
        """Add the wish of a new node for the blocks of the node with the id `wanted`, or of any."""
        self._wishes[new] = wanted, now_s + WAIT_S

    def forget(self, new: Incarnation) -> None:
        """Drop the wish of a node that is lost."""
        self._wishes.pop(new, None)

    def settle(
        self, nodes: Sequence[NodeView], records: Sequence[NodeRecord], now_s: float
    ) -> list[Settled]:
        """Return the wishes that are over, once; to be called when a node is heard, and now and
        then.

        `nodes` are those that are heard, `records` those of all members. A wish whose node cannot
        come, or did not in time, has no source.
        """
        settled = []
        for new, (wanted, until_s) in list(self._wishes.items()):
            source = warm_source_of(new, nodes, wanted)
            if source is not None or now_s >= until_s or not _can_come(new, wanted, nodes, records):
                del self._wishes[new]
                settled.append(Settled(new, wanted, source))
        return settled


def _can_come(
    new: Incarnation, wanted: str, nodes: Sequence[NodeView], records: Sequence[NodeRecord]
) -> bool:
    """Return whether a node that could send is not heard yet, or `new` itself is not."""
    heard = {node.incarnation: node.record for node in nodes}
    receiver = heard.get(new)
    if receiver is None or (wanted != AUTO and all(one.node_id != wanted for one in records)):
        return True
    return any(
        one.incarnation not in heard and one.sends_blocks and one.can_exchange_kv(receiver)
        for one in records
        if wanted in (one.node_id, AUTO)
    )
