"""The router's own copy of the cluster: from the store, and from the nodes' streams.

A node becomes a member when the store lists it, and can be chosen while this router hears it on its
stream. The store removes no member that is heard: one that answers may still refuse the writes that
renew leases (full memory, full disk, lost replicas, a read-only replica), and one that was emptied
lists nobody for a moment. A member that is heard ends when its stream does, which is how a node
leaves, or when a newer incarnation of it is listed. Placement avoids those that drain.

A member whose stream broke is left out until it is heard again, and one that is suspected is shown
as such. A broken stream is opened again for one lease after the store listed the member or it was
heard. While the store is away, or does not list members that are heard, nothing is known of the
others: their streams are opened again for `store_grace_s`.

Between two answers of the store at most half a lease counts. After a whole machine was suspended,
all leases have expired: a router that polls first must give the nodes time to renew them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from common.ids import Incarnation
from common.nodes import NodeLoad, NodeRecord, Role
from placement.store import LiveNode
from router.core.held_load import OwnLoad, prompt_tokens_on
from router.core.policies.query import NodeView

STORE_GRACE_S = 600.0
MAX_NODES = 4096


@dataclass(slots=True)
class _Member:
    record: NodeRecord
    load: NodeLoad
    listed_at_s: float
    lost_at_s: float = -math.inf
    is_heard: bool = False
    is_suspected: bool = False
    is_replaced: bool = False
    own: OwnLoad = field(default_factory=OwnLoad)


class Membership:
    """Nodes by incarnation, with the requests that this router has sent to each."""

    def __init__(self, *, lease_s: float, store_grace_s: float = STORE_GRACE_S) -> None:
        self._lease_s = lease_s
        self._store_grace_s = store_grace_s
        self._members: dict[Incarnation, _Member] = {}
        self._is_store_away = False
        self._num_listed = 0
        self._asked_at_s = math.inf
        self._waited_s = 0.0

    @property
    def is_store_away(self) -> bool:
        return self._is_store_away

    @property
    def num_listed(self) -> int:
        """The nodes in the latest listing that could be members."""
        return self._num_listed

    def on_listing(
        self,
        nodes: Sequence[LiveNode],
        now_s: float,
        *,
        unusable: Collection[Incarnation] = (),
    ) -> None:
        """Take over the nodes that the store lists.

        `unusable`: incarnations that it lists as well and that cannot be members, such as those
        with another model. They replace older ones too.
        """
        self._tell_time(now_s)
        self._is_store_away = False
        listed = [node for node in nodes[:MAX_NODES] if node.record.role is not Role.ROUTER]
        self._num_listed = len(listed)
        for node in listed:
            self._list(node)
        self._replace({node.record.incarnation for node in listed} | set(unusable))
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
            member.lost_at_s = self._waited_s

    def on_leg_opened(self, incarnation: Incarnation, num_prompt_tokens: int) -> None:
        """Count one more request that the node was asked to hold."""
        member = self._members.get(incarnation)
        if member is not None:
            member.own.open(prompt_tokens_on(member.record.role, num_prompt_tokens))

    def on_leg_closed(self, incarnation: Incarnation, num_prompt_tokens: int) -> None:
        """Count one of these requests less."""
        member = self._members.get(incarnation)
        if member is not None:
            member.own.close(prompt_tokens_on(member.record.role, num_prompt_tokens))

    def nodes(self) -> list[NodeView]:
        """Return the nodes that can be chosen, ordered by id."""
        return [
            self._view(member)
            for _, member in sorted(self._members.items())
            if member.is_heard and not member.is_replaced
        ]

    def max_model_len(self) -> int | None:
        """Return the longest prompt and answer that a node which can be chosen now can finish.

        None without such a node. Asked for every request, so nothing is estimated for it.
        """
        return max(
            (
                member.record.max_model_len
                for member in self._members.values()
                if member.is_heard
                and not member.is_replaced
                and member.record.role is not Role.PREFILL
                and not member.load.is_draining
            ),
            default=None,
        )

    def _view(self, member: _Member) -> NodeView:
        is_listed = self._is_listed(member)
        held = member.own.held(member.record, member.load if is_listed else None)
        return NodeView(
            record=member.record,
            load=member.load,
            num_requests=held.num_requests,
            num_used_blocks=held.num_used_blocks,
            num_queued_tokens=held.num_queued_tokens,
            is_suspected=member.is_suspected,
            is_listed=is_listed,
        )

    def unlisted(self) -> list[Incarnation]:
        """Return the nodes that are heard and whose lease is missing in a store that answers."""
        if self._is_store_away:
            return []
        return [node.incarnation for node in self.nodes() if not node.is_listed]

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
            self._members[incarnation] = _Member(node.record, node.load, self._waited_s)
            return
        member.record, member.load, member.listed_at_s = node.record, node.load, self._waited_s
        member.own.on_listing()

    def _replace(self, listed: Collection[Incarnation]) -> None:
        """Mark the members of which a newer incarnation is listed."""
        latest = dict(sorted(listed))
        for incarnation, member in self._members.items():
            if incarnation.epoch < latest.get(incarnation.node_id, 0):
                member.is_replaced = True

    def _is_listed(self, member: _Member) -> bool:
        """Evaluate the lease at the store's last reply: a router that was suspended must not expire
        nodes before it has polled again."""
        return self._waited_s - member.listed_at_s <= self._lease_s

    def _forget(self) -> None:
        """Drop members that cannot be chosen and are not expected to be heard again."""
        is_store_incomplete = self._is_store_away or bool(self.unlisted())
        patience_s = self._store_grace_s if is_store_incomplete else self._lease_s
        self._members = {
            incarnation: member
            for incarnation, member in self._members.items()
            if self._is_kept(member, patience_s)
        }

    def _is_kept(self, member: _Member, patience_s: float) -> bool:
        if member.is_replaced:
            return member.is_heard and member.own.num_requests > 0
        seen_at_s = max(member.listed_at_s, member.lost_at_s)
        return member.is_heard or self._waited_s - seen_at_s <= patience_s
