"""Which nodes were paired, from what routers and nodes say of themselves. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from common.ids import Incarnation
from common.nodes import NodeRecord, Role
from common.version import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION, UNNAMED_PROTOCOL
from placement.store import LiveNode

BOTH = OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION


class Pair(NamedTuple):
    """A prefill and a decode node, each in one life."""

    prefill: Incarnation
    decode: Incarnation


class Trio(NamedTuple):
    """Protocol versions of a router and of the pair that it chose."""

    router: int
    prefill: int
    decode: int


class Handoffs:
    """Every pair that a router chose, and the KV that went from one node of a pair to the other."""

    def __init__(self) -> None:
        self.records: dict[Incarnation, NodeRecord] = {}
        self.num_bytes: Counter[Pair] = Counter()
        self._chosen: dict[tuple[str, int], tuple[int, Pair]] = {}
        self._links: dict[tuple[Incarnation, str], tuple[int, Incarnation | None]] = {}

    def on_leases(self, nodes: Sequence[LiveNode]) -> None:
        """Record all leases of the placement store.

        A link names a decode node without its life. Bytes count for the life that has a lease both
        before and after they were sent.
        """
        self.records |= {node.record.incarnation: node.record for node in nodes}
        decoders = {
            node.record.node_id: node.record.incarnation
            for node in nodes
            if node.record.role is Role.DECODE
        }
        for node in nodes:
            for link in node.load.kv_links:
                key = node.record.incarnation, link.decode
                now = decoders.get(link.decode)
                num_before, before = self._links.get(key, (0, now))
                self._links[key] = link.num_bytes, now
                if now is not None and now == before and link.num_bytes > num_before:
                    self.num_bytes[Pair(key[0], now)] += link.num_bytes - num_before

    def on_cluster(self, told: Mapping[str, Any]) -> None:
        """Record a router's `/v1/cluster`."""
        router = told["router"].get("protocol", UNNAMED_PROTOCOL)
        for one in told["recent_placements"]:
            if one["prefill"] and one["decode"]:
                pair = Pair(_incarnation(one["prefill"]), _incarnation(one["decode"]))
                self._chosen[one.get("choice_id", one["request_id"]), one["attempt"]] = router, pair

    def is_used(self, node: Incarnation) -> bool:
        """Return whether KV came from or to this node in this life."""
        return any(node in pair for pair in self.num_bytes)

    def chosen(self) -> Counter[Trio]:
        """Return how many attempts each combination of protocol versions got."""
        return Counter(
            Trio(router, self.records[pair.prefill].protocol, self.records[pair.decode].protocol)
            for router, pair in self._chosen.values()
            if pair.prefill in self.records and pair.decode in self.records
        )

    def handed_off(self) -> Counter[tuple[int, int]]:
        """Return the bytes of KV by the protocol versions of prefill and decode node."""
        total: Counter[tuple[int, int]] = Counter()
        for pair, num_bytes in self.num_bytes.items():
            versions = self.records[pair.prefill].protocol, self.records[pair.decode].protocol
            total[versions] += num_bytes
        return total

    def missing(self) -> list[str]:
        """Return the combinations of versions that can work together and did not."""
        chosen, handed_off = self.chosen(), self.handed_off()
        found = []
        for prefill, decode in sorted(self._fitting()):
            pair = f"a prefill node of protocol {prefill} and a decode node of protocol {decode}"
            if not handed_off[prefill, decode]:
                found.append(f"no KV went between {pair}")
            found += [
                f"no router of protocol {router} chose {pair}"
                for router in BOTH
                if not chosen[Trio(router, prefill, decode)]
            ]
        return found

    def _fitting(self) -> set[tuple[int, int]]:
        """Return the versions of prefill and decode nodes that can exchange KV."""
        return {
            (prefill.protocol, decode.protocol)
            for prefill, decode in product(self.records.values(), self.records.values())
            if prefill.role is Role.PREFILL
            and decode.role is Role.DECODE
            and prefill.can_exchange_kv(decode)
        }

    def misfits(self) -> list[str]:
        """Return the pairs that were chosen or used though they cannot exchange KV."""
        pairs: Iterable[Pair] = {pair for _, pair in self._chosen.values()} | self.num_bytes.keys()
        return sorted(
            f"{pair.prefill} and {pair.decode}"
            for pair in pairs
            if pair.prefill in self.records
            and pair.decode in self.records
            and not self.records[pair.prefill].can_exchange_kv(self.records[pair.decode])
        )


def _incarnation(text: str) -> Incarnation:
    node_id, _, epoch = text.rpartition("#")
    return Incarnation(node_id, int(epoch))
