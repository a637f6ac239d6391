"""Reports of blocks from tiers to indexes, through streams that lose, break and begin again.

Nodes compute, keep, evict, end and come back under their names, while what they say of it is built
in pieces, waits, is lost, or is damaged. When all has been said, each router knows of each node
what that has, and of nothing else.
"""

from __future__ import annotations

import random
from collections import deque
from itertools import count, takewhile

import pytest

from common.ids import Incarnation
from common.kv.blocks import BlockHash, block_key, block_keys, hash_full_blocks
from common.kv.tiers import Tier
from engine.core.blocks.prefix_cache import PrefixCache
from node.control import block_reports
from node.control.block_reports import BlockReports, CachedBlocks
from protos import pdserve_node_pb2 as pb
from router.core.known.block_index import BlockIndex
from router.core.known.block_reports import ReportReader
from tests.support.examples import everyday

NUM_NODES, NUM_ROUTERS, NUM_TURNS = 3, 2, 400
CHAINS = [
    hash_full_blocks([*range(3), *range(100 * family, 100 * family + 12)], 1, "f")
    for family in range(1, 5)
]
"""They share three blocks, which are evicted last."""


class Node:
    """One life of a node: its tiers, and what its event loop knows of them."""

    def __init__(self, name: str, epoch: int, rng: random.Random) -> None:
        self.incarnation = Incarnation(name, epoch)
        self.tiers = {tier: PrefixCache() for tier in Tier}
        for cache in self.tiers.values():
            cache.keep_news()
        self.cached = CachedBlocks()
        self.reports: dict[int, BlockReports] = {}
        self._ids = count()
        self._rng = rng
        self._blocks: dict[Tier, dict[BlockHash, int]] = {tier: {} for tier in Tier}
        """In the order of eviction."""

    def compute(self) -> None:
        """Have a prompt in a tier, mostly in the pool; its beginning is evicted last."""
        tier = self._rng.choices(list(Tier), (3, 1, 1))[0]
        blocks, hashes = self._blocks[tier], self._rng.choice(CHAINS)[: self._rng.randint(1, 15)]
        for block_hash in hashes:
            if block_hash not in blocks:
                blocks[block_hash] = next(self._ids)
                self.tiers[tier].insert(block_hash, blocks[block_hash])
        for block_hash in reversed(hashes):
            blocks[block_hash] = blocks.pop(block_hash)

    def evict(self) -> None:
        """Lose some blocks."""
        tier = self._rng.choice(list(Tier))
        blocks = self._blocks[tier]
        for _ in range(min(self._rng.randint(1, 12), len(blocks))):
            block_hash = next(iter(blocks))
            self.tiers[tier].forget(blocks.pop(block_hash))

    def deliver(self) -> None:
        """The event loop takes what the step thread has noted."""
        news = {tier: cache.take_news() for tier, cache in self.tiers.items()}
        self.cached.take(news)
        for reports in self.reports.values():
            reports.add(news)

    def keys(self, *tiers: Tier) -> set[int]:
        """The blocks in any of these tiers."""
        return {block_key(block_hash) for tier in tiers for block_hash in self._blocks[tier]}

    def num_held(self, hashes: list[BlockHash], *tiers: Tier) -> int:
        """How many leading blocks are in any of these tiers."""
        held = self.keys(*tiers)
        return sum(1 for _ in takewhile(lambda one: block_key(one) in held, hashes))


class Router:
    """An index, and the stream of each node, in which reports wait."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.number = number
        self.index = BlockIndex()
        self._rng = rng
        self._readers: dict[Incarnation, ReportReader] = {}
        self._streams: dict[Incarnation, deque[pb.BlockReport]] = {}
        self._heard: set[Incarnation] = set()
        self._asked: set[Incarnation] = set()
        """Nodes that were asked to say all again, and have not heard it."""

    def connect(self, node: Node) -> None:
        """Open a stream, again if there was one: what was on its way is gone."""
        self.lose(node.incarnation)
        node.reports[self.number] = BlockReports(node.cached)
        self._readers[node.incarnation] = ReportReader()
        self._streams[node.incarnation] = deque()
        self._heard.discard(node.incarnation)

    def lose(self, node: Incarnation) -> None:
        """The stream ends."""
        self._streams.pop(node, None)
        self._asked.discard(node)
        self.index.forget(node)

    def send(self, node: Node) -> bool:
        """The node says one piece; return whether there was one."""
        if node.incarnation in self._asked and self._rng.random() < 0.5:
            self._asked.remove(node.incarnation)
            node.reports[self.number].restart()
        report = node.reports[self.number].next()
        if report is not None:
            self._streams[node.incarnation].append(report)
        return report is not None

    def damage(self, node: Node) -> None:
        """A report that waits is lost, or comes twice, or is cut short.

        Another one follows it: that the last one is missing shows nowhere. So it is with the first
        one of those that say all again on a stream, after one report alone.
        """
        stream = self._streams[node.incarnation]
        if len(stream) > 1:
            place = self._rng.randrange(len(stream) - 1)
            if stream[place].number == 1 and node.incarnation in self._heard:
                return
            match self._rng.choice(("lost", "twice", "cut")):
                case "lost":
                    del stream[place]
                case "twice":
                    stream.insert(place, stream[place])
                case "cut":
                    stream[place] = pb.BlockReport(number=stream[place].number, added=b"cut")

    def take(self, node: Node) -> bool:
        """Read one report; return whether there was one."""
        stream = self._streams[node.incarnation]
        if not stream:
            return False
        self._heard.add(node.incarnation)
        message, reader = stream.popleft(), self._readers[node.incarnation]
        report = reader.take(message.number, message.tier, message.added, message.removed)
        if report is not None:
            if report.is_first:
                self.index.forget(node.incarnation)
            self.index.on_report(node.incarnation, report.added, report.removed, report.tier)
            if reader.has_lost:
                self._asked.add(node.incarnation)
        return True

    def is_asking(self, node: Node) -> bool:
        return node.incarnation in self._asked


def end_of(node: Node, routers: list[Router], rng: random.Random) -> Node:
    """The node's next life. Its streams break; or they are closed, when another life is listed."""
    later = Node(node.incarnation.node_id, node.incarnation.epoch + 1, rng)
    for router in routers:
        if rng.random() < 0.5:  # connected to before the earlier stream is closed
            router.connect(later)
            router.lose(node.incarnation)
        else:
            router.lose(node.incarnation)
            router.connect(later)
    return later


def settle(nodes: list[Node], routers: list[Router]) -> None:
    """Everything is said and read."""
    for node in nodes:
        node.deliver()
        for router in routers:
            for _ in range(1000):
                if not (router.send(node) | router.take(node) | router.is_asking(node)):
                    break
            else:
                pytest.fail("a node never ends what it says")


def check(nodes: list[Node], routers: list[Router], expected: set[int]) -> None:
    num_blocks = len(set[int]().union(*(node.keys(*Tier) for node in nodes)))
    for router in routers:
        index = router.index
        assert len(index) == num_blocks
        for node in nodes:
            for tier in Tier:
                assert index.num_held(node.incarnation, tier) == len(node.keys(tier))
            for hashes in CHAINS:
                keys = block_keys(hashes)
                to_send = index.held(keys, to_send=True).on(node.incarnation)
                assert to_send == node.num_held(hashes, *Tier)
                in_memory = index.num_in_memory(keys, node.incarnation, to_send)
                assert in_memory == node.num_held(hashes, Tier.POOL, Tier.HOST)
                found = index.held(keys).on(node.incarnation)
                least = node.num_held(hashes, *Tier)
                assert found >= least
                hoped = {*keys[least:found]} - node.keys(*Tier)
                assert hoped <= expected, "a block that nobody has or hopes for"


@pytest.mark.covers("F77")
@pytest.mark.parametrize("seed", range(everyday(10, of=200)))
def test_what_routers_know_is_what_nodes_have(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(block_reports, "MAX_REPORTED", 4)
    monkeypatch.setattr(block_reports, "MIN_FORGOTTEN", 6)
    expects = seed % 2 == 1
    expected: set[int] = set()
    routers = [Router(number, rng) for number in range(NUM_ROUTERS)]
    nodes = [Node(f"n{number}", 1, rng) for number in range(NUM_NODES)]
    for router in routers:
        for node in nodes:
            router.connect(node)
    for turn in range(NUM_TURNS):
        place, router = rng.randrange(NUM_NODES), rng.choice(routers)
        node = nodes[place]
        action = rng.choices(
            ("compute", "evict", "deliver", "send", "take", "damage", "connect", "end", "expect"),
            (20, 15, 15, 30, 30, 8, 6, 1, 5),
        )[0]
        match action:
            case "compute":
                node.compute()
            case "evict":
                node.evict()
            case "deliver":
                node.deliver()
            case "send":
                router.send(node)
            case "take":
                router.take(node)
            case "damage":
                router.damage(node)
            case "connect":
                router.connect(node)
            case "end":
                nodes[place] = end_of(node, routers, rng)
            case "expect" if expects:
                keys = block_keys(rng.choice(CHAINS)[: rng.randint(1, 15)])
                router.index.expect(keys, node.incarnation)
                expected.update(keys)
        if turn % 100 == 99:
            settle(nodes, routers)
            check(nodes, routers, expected)
