"""The router's own copy of who is alive: from the store, and from the nodes' streams.

A node can be chosen when three things hold: the store listed it recently, this router hears it on
its stream, and it is not draining (placement looks at that). A store that is away or was emptied
removes no node at once: a node whose stream is alive stays, for `store_grace_s` at most while the
store is unreachable, and for one lease when the store answers without it. A node whose stream broke
is left out until it is heard again, and one that is suspected is listed as such. A newer
incarnation replaces an older one.

Between two answers of the store at most half a lease counts. After a whole machine was suspended,
all leases have expired: a router that polls first must give the nodes time to renew them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.ids import Incarnation
from common.nodes import NodeLoad, NodeRecord, Role
from placement.store import LiveNode
from router.core.policies.query import NodeView

STORE_GRACE_S = 600.0
MAX_NODES = 4096


@dataclass(slots=True)
class _Member:
    record: NodeRecord
    load: NodeLoad
    listed_at_s: float
    is_heard: bool = False
    is_suspected: bool = False
    num_inflight: int = 0
    num_inflight_at_report: int = 0


class Membership:
    """Nodes by incarnation, with the requests that this router has sent to each."""

    def __init__(self, *, lease_s: float, store_grace_s: float = STORE_GRACE_S) -> None:
        self._lease_s = lease_s
        self._store_grace_s = store_grace_s
        self._members: dict[Incarnation, _Member] = {}
        self._is_store_away = False
        self._asked_at_s = math.inf
        self._waited_s = 0.0

    @property
    def is_store_away(self) -> bool:
        return self._is_store_away

    def on_listing(self, nodes: Sequence[LiveNode], now_s: float) -> None:
        """Take over the nodes that the store lists."""
        self._tell_time(now_s)
        if self._is_store_away:
            # The store may be empty now: nodes with a stream have one lease to register again.
            for member in self._members.values():
                if member.is_heard and member.listed_at_s > -math.inf:
                    member.listed_at_s = self._waited_s
        self._is_store_away = False
        for node in nodes[:MAX_NODES]:
            if node.record.role is not Role.ROUTER:
                self._list(node)
        self._forget()

    def on_store_away(self, now_s: float) -> None:
        """Go on without the store, which did not answer."""
        self._tell_time(now_s)
        self._is_store_away = True
        self._forget()

    def on_heard(self, incarnation: Incarnation) -> None:
        """Mark the node as heard: a message came on its stream."""
        member = self._members.get(incarnation)
        if member is not None:
            member.is_heard = True
            member.is_suspected = False

    def on_suspected(self, incarnation: Incarnation) -> None:
        """Mark the node as suspected, until it is heard again: its stream is open and silent."""
        member = self._members.get(incarnation)
        if member is not None:
            member.is_suspected = True

    def on_lost(self, incarnation: Incarnation) -> None:
        """Mark the node as lost: its stream broke or fell silent."""
        member = self._members.get(incarnation)
        if member is not None:
            member.is_heard = False
            member.is_suspected = False

    def on_leg_opened(self, incarnation: Incarnation) -> None:
        """Count one more request that the node was asked to hold."""
        member = self._members.get(incarnation)
        if member is not None:
            member.num_inflight += 1

    def on_leg_closed(self, incarnation: Incarnation) -> None:
        """Count one of these requests less."""
        member = self._members.get(incarnation)
        if member is not None:
            member.num_inflight = max(0, member.num_inflight - 1)

    def nodes(self) -> list[NodeView]:
        """Return the nodes that can be chosen, ordered by id."""
        return [
            NodeView(
                record=member.record,
                load=member.load,
                num_requests=_estimate(member),
                is_suspected=member.is_suspected,
            )
            for _, member in sorted(self._members.items())
            if member.is_heard and self._is_listed(member)
        ]

    def records(self) -> list[NodeRecord]:
        """Return every node to keep a stream to, ordered by id."""
        return [member.record for _, member in sorted(self._members.items())]

    def _tell_time(self, now_s: float) -> None:
        self._waited_s += min(max(0.0, now_s - self._asked_at_s), self._lease_s / 2)
        self._asked_at_s = now_s

    def _list(self, node: LiveNode) -> None:
        incarnation = node.record.incarnation
        member = self._members.get(incarnation)
        if member is None:
            for other, older in self._members.items():
                if other.node_id == incarnation.node_id and other.epoch < incarnation.epoch:
                    older.listed_at_s = -math.inf
            self._members[incarnation] = _Member(node.record, node.load, self._waited_s)
            return
        member.record, member.load, member.listed_at_s = node.record, node.load, self._waited_s
        member.num_inflight_at_report = member.num_inflight

    def _is_listed(self, member: _Member) -> bool:
        """Evaluate the lease at the store's last reply: a router that was suspended must not expire
        nodes before it has polled again."""
        grace_s = self._store_grace_s if self._is_store_away else self._lease_s
        return self._waited_s - member.listed_at_s <= grace_s

    def _forget(self) -> None:
        """Drop members that cannot be chosen any more and hold nothing of this router."""
        self._members = {
            incarnation: member
            for incarnation, member in self._members.items()
            if self._is_listed(member) or (member.is_heard and member.num_inflight)
        }


def _estimate(member: _Member) -> int:
    """Return the requests on the node: reported and sent since, at least this router's own."""
    reported = member.load.num_running + member.load.num_waiting
    sent_since = member.num_inflight - member.num_inflight_at_report
    return max(member.num_inflight, reported + max(0, sent_since))
