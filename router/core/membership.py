"""The router's own copy of the cluster: from the store, and from the nodes' streams.

A node becomes a member when the store lists it, and can be chosen while this router hears it on its
stream. The store removes no member that is heard: one that answers may still refuse the writes that
renew leases (full memory, full disk, lost replicas, a read-only replica), and one that was emptied
lists nobody for a moment. A member that is heard ends when its stream does, which is how a node
leaves, or when a newer incarnation of it is listed. Placement avoids those that drain.

A member whose stream broke is left out until it is heard again, and one that is suspected is shown
as such. A broken stream is opened again for one lease after the store listed the member or it was
heard. While the store is away, or does not list members that are heard, nothing is known of the
others: their streams are opened again for `STORE_GRACE_S`.

Between two answers of the store at most half a lease counts. After a whole machine was suspended,
all leases have expired: a router that polls first must give the nodes time to renew them.

Nodes that serve another model, or speak a protocol that this router does not, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from itertools import islice

from common.ids import Incarnation
from common.nodes import NodeRecord, Role
from common.version import PROTOCOL_VERSION, can_speak
from placement.store import LiveNode
from router.core.known.member import Member
from router.core.known.member_effects import (
    MembershipEffect,
    NodeDecodes,
    NodeGone,
    NodeHeard,
    NodeLeftOut,
    NodeSuspected,
    NodeTrusted,
    NodeUnlisted,
    StreamLost,
)
from router.core.known.node_view import NodeView
from router.core.known.roster import Roster

STORE_GRACE_S = 600.0
MAX_NODES = 4096
MAX_READ = 128
"""Reports of a listing that are read at once."""
ENDED_BY_NODE = "the node ended the stream"
"""The reason of a stream that ended in order."""


class Membership:
    """Nodes by incarnation, with the requests that this router has sent to each.

    Each `on_…` returns the effects to perform, in order.
    """

    def __init__(self, *, model: str, lease_s: float, tokens: str = "") -> None:
        self.model = model
        self._tokens = tokens
        self._lease_s = lease_s
        self._members: dict[Incarnation, Member] = {}
        self._is_store_away = False
        self._num_listed = self._num_asked = 0
        self._asked_at_s = math.inf
        self._waited_s = 0.0
        self._left_out: dict[Incarnation, NodeRecord] = {}
        self._used: set[Incarnation] = set()
        self._suspects: dict[Incarnation, bool] = {}
        self._unlisted: set[Incarnation] = set()
        self._gone: dict[Incarnation, str] = {}
        self._gone_before: dict[Incarnation, str] = {}
        """The nodes that were gone before the store was asked, with the reasons."""
        self._roster = Roster()
        self._changed: dict[Incarnation, None] = {}
        """Nodes whose view in the roster is old, in the order of events. The order of a set is
        another one in each process, and the choices of wide clusters would depend on it."""
        self._busier: dict[Incarnation, None] = {}
        """Nodes of which only the number of this router's requests has changed."""
        self._reported: dict[Incarnation, None] = {}
        """Nodes of which only the report is new."""

    @property
    def other_models(self) -> list[str]:
        """The models of the nodes that are left out, ordered."""
        return sorted({one.model for one in self._left_out.values() if one.model != self.model})

    @property
    def num_other_versions(self) -> int:
        """The nodes of this model that are left out, because of the protocol that they speak."""
        return sum(not can_speak(one.protocol) for one in self._left_out_of_model())

    @property
    def num_other_tokenizers(self) -> int:
        """The nodes of this model that are left out, because token ids mean others there."""
        return sum(can_speak(one.protocol) for one in self._left_out_of_model())

    def _left_out_of_model(self) -> list[NodeRecord]:
        return [one for one in self._left_out.values() if one.model == self.model]

    @property
    def is_store_away(self) -> bool:
        return self._is_store_away

    @property
    def num_listed(self) -> int:
        """The nodes in the latest listing that could be members."""
        return self._num_listed

    def on_asking(self) -> None:
        """Note that the store is asked now.

        Of the nodes lost before, those it does not list have left.
        """
        self._num_asked += 1
        self._gone_before.update(self._gone)
        self._gone.clear()

    def on_listing(self, nodes: Sequence[LiveNode], now_s: float) -> list[MembershipEffect]:
        """Take over the listed nodes; one that is left out still replaces older incarnations."""
        self._tell_time(now_s)
        self._is_store_away = False
        listed, left_out = self._usable(nodes)
        self._num_listed = len(listed)
        num_before = len(self._members)
        moved: list[MembershipEffect] = []
        for incarnation, node in listed.items():
            moved += self._list(incarnation, node)
        if self._left_out or len(self._members) > num_before:
            self._replace(listed.keys() | self._left_out.keys())
        ended = self._ended(nodes)
        return [*left_out, *moved, *ended, *self._forget()]

    def on_store_away(self, now_s: float) -> list[MembershipEffect]:
        """Go on without the store, which did not answer."""
        self._tell_time(now_s)
        self._is_store_away = True
        return [*self._ended(None), *self._forget()]

    def on_heard(
        self, incarnation: Incarnation, *, stuck_s: float = 0.0, unreached: str = ""
    ) -> list[MembershipEffect]:
        """Note a message on the node's stream, and why requests do not reach the node, if they do
        not.

        `stuck_s`: how long its step has lasted, if it makes no progress.
        """
        member = self._members.get(incarnation)
        if member is None:
            return []
        effects: list[MembershipEffect] = []
        is_new = not member.is_heard
        if is_new:
            member.is_heard = True
            self._changed[incarnation] = None
            effects.append(NodeHeard(incarnation, member.was_lost))
        if stuck_s:
            reason = f"its step has lasted {stuck_s:g} s"
            effects += self.on_suspected(incarnation, reason, is_heard=False)
        elif unreached:
            effects += self.on_suspected(incarnation, unreached, is_heard=True)
        elif is_new or member.suspicion is not None:
            was_suspected, member.suspicion = member.suspicion is not None, None
            self._suspects.pop(incarnation, None)
            self._changed[incarnation] = None
            effects.append(NodeTrusted(incarnation, was_suspected))
        return effects

    def on_suspected(
        self, incarnation: Incarnation, reason: str, *, is_heard: bool
    ) -> list[MembershipEffect]:
        """Suspect a node: it is gone or hangs, or its stream works and requests do not reach it."""
        member = self._members.get(incarnation)
        if member is None or member.suspicion is is_heard:
            return []
        was_trusted, member.suspicion = member.suspicion is None, is_heard
        self._suspects[incarnation] = is_heard
        self._changed[incarnation] = None
        return [NodeSuspected(incarnation, reason, is_heard, was_trusted)]

    def on_lost(self, incarnation: Incarnation, reason: str) -> list[MembershipEffect]:
        """Mark the node as lost: its stream broke or fell silent.

        The store's next listing shows whether it has left.
        """
        self._gone[incarnation] = reason
        member = self._members.get(incarnation)
        if member is not None:
            member.is_heard, member.suspicion = False, None
            self._suspects.pop(incarnation, None)
            member.lost_at_s = self._waited_s
            self._changed[incarnation] = None
        return [StreamLost(incarnation, reason == ENDED_BY_NODE)]

    def on_role(self, incarnation: Incarnation, role: Role) -> list[MembershipEffect]:
        """Give a node the role that it reports on its stream, after it wrote it to the store.

        A listing that was requested before this report does not change the role back.
        """
        member = self._members.get(incarnation)
        if member is None:
            return []
        member.role_told_at = self._num_asked
        return self._give(incarnation, member, replace(member.record, role=role))

    def _give(
        self, incarnation: Incarnation, member: Member, record: NodeRecord
    ) -> list[MembershipEffect]:
        """Replace a record by one with another role at once: requests may wait for that role."""
        before, member.record = member.record.role, record
        self._changed[incarnation] = None
        begins = before is Role.PREFILL is not record.role
        return [NodeDecodes(incarnation)] if begins and member.can_be_chosen else []

    def on_leg_opened(self, incarnation: Incarnation, num_tokens: int) -> None:
        """Count one more request that the node was asked to hold.

        `num_tokens` are those of the prompt if this node computes it; otherwise 0.
        """
        member = self._members.get(incarnation)
        if member is not None:
            member.own.open(num_tokens)
            self._used.add(incarnation)
            self._busier[incarnation] = None

    def on_prompt_computed(self, incarnation: Incarnation, num_tokens: int) -> None:
        """Stop counting the tokens of a prompt on the node that continues with the answer."""
        member = self._members.get(incarnation)
        if member is not None:
            member.own.end_prompt(num_tokens)
            self._busier[incarnation] = None

    def on_leg_closed(self, incarnation: Incarnation, num_tokens: int) -> None:
        """Count one request less, and its tokens that still count."""
        member = self._members.get(incarnation)
        if member is not None:
            member.own.close(num_tokens)
            if not member.own.num_requests:
                self._used.discard(incarnation)
            self._busier[incarnation] = None

    @property
    def used(self) -> Set[Incarnation]:
        """The nodes that have a request of this router, or were chosen for one."""
        return self._used

    @property
    def suspects(self) -> Mapping[Incarnation, bool]:
        """The nodes that are suspected, and whether each is heard."""
        return self._suspects

    def nodes(self) -> Roster:
        """Return the nodes that can be chosen, ordered by id, until the next event.

        Every request calls this, and changes the views of the two nodes that it is placed on. A
        call reads at most `MAX_READ` reports of a listing; while `has_unread`, some views are old.
        """
        self._changed |= self._busier
        self._busier.clear()
        self._read_changed()
        return self._roster

    def _read_changed(self) -> None:
        members, changed = self._members, self._changed
        for node in list(islice(self._reported, MAX_READ)):
            changed[node] = None
            del self._reported[node]
        for node in changed:
            member = members.get(node)
            if member is not None and member.can_be_chosen:
                self._roster.put(self._view(member))
            else:
                self._roster.discard(node)
        changed.clear()

    @property
    def has_unread(self) -> bool:
        """Whether some reports of the latest listing are not in `nodes` yet."""
        return bool(self._reported)

    def max_model_len(self) -> int | None:
        """Return the longest prompt and answer that a node which can be chosen now can finish.

        None without such a node. Their numbers of requests do not matter, so views stay as they
        are.
        """
        self._read_changed()
        return self._roster.max_model_len()

    def _view(self, member: Member) -> NodeView:
        is_listed = self._is_listed(member)
        held = member.own.held(member.record, member.load if is_listed else None)
        return NodeView(
            record=member.record,
            load=member.load,
            num_requests=held.num_requests,
            num_used_blocks=held.num_used_blocks,
            num_queued_tokens=held.num_queued_tokens,
            is_suspected=member.suspicion is not None,
            is_listed=is_listed,
        )

    def unlisted(self) -> list[Incarnation]:
        """Return the nodes that are heard and whose lease is missing in a store that answers."""
        if self._is_store_away:
            return []
        missing = [node for node, one in self._members.items() if not self._is_listed(one)]
        return sorted(node for node in missing if self._members[node].can_be_chosen)

    @property
    def last_unlisted(self) -> Set[Incarnation]:
        """The nodes that were `unlisted` when the store answered last."""
        return self._unlisted

    def was_heard(self, incarnation: Incarnation) -> bool:
        """Return whether a member is heard, or was before it was lost."""
        member = self._members.get(incarnation)
        return member is not None and (member.is_heard or member.was_lost)

    def records(self) -> list[NodeRecord]:
        """Return every node to keep a stream to, ordered by id."""
        return [self._members[node].record for node in sorted(self._members)]

    def _usable(
        self, nodes: Sequence[LiveNode]
    ) -> tuple[dict[Incarnation, LiveNode], list[MembershipEffect]]:
        """Return the listed nodes that can be members, and the effects of new ones that cannot."""
        usable: dict[Incarnation, LiveNode] = {}
        left_out: dict[Incarnation, NodeRecord] = {}
        effects: list[MembershipEffect] = []
        for node in nodes:
            record = node.record
            is_of_model, is_router = record.model == self.model, record.role is Role.ROUTER
            if is_of_model and can_speak(record.protocol) and self._has_our_tokens(record):
                if not is_router and len(usable) < MAX_NODES:
                    usable[record.incarnation] = node
            elif (is_of_model or not is_router) and len(left_out) < MAX_NODES:
                left_out[record.incarnation] = record
                if record.incarnation not in self._left_out:
                    effects.append(NodeLeftOut(record.incarnation, self._why_left_out(record)))
        self._left_out = left_out
        return usable, effects

    def _has_our_tokens(self, record: NodeRecord) -> bool:
        """Return whether token ids mean the same on a node, as far as both sides are known."""
        is_router = record.role is Role.ROUTER
        return is_router or record.tokens in ("", self._tokens) or not self._tokens

    def _why_left_out(self, record: NodeRecord) -> str:
        if record.model != self.model:
            return f"it serves {record.model}, not {self.model}"
        if can_speak(record.protocol):
            return "its tokenizer is another one than this router's (tokenizer.json)"
        versions = f"{record.protocol}, this router's {PROTOCOL_VERSION}"
        return f"its protocol version is {versions}"

    def _ended(self, nodes: Sequence[LiveNode] | None) -> list[MembershipEffect]:
        """Return the ends of the nodes whose streams ended before the store was asked.

        A node that leaves in order removes its lease before it ends its stream. `nodes` None: the
        store is away.
        """
        ended, self._gone_before = self._gone_before, {}
        if not ended:
            return []
        listed = {node.record.incarnation for node in nodes or ()}
        is_known = nodes is not None
        return [
            NodeGone(node, reason, reason == ENDED_BY_NODE and is_known and node not in listed)
            for node, reason in ended.items()
        ]

    def _tell_time(self, now_s: float) -> None:
        self._waited_s += min(max(0.0, now_s - self._asked_at_s), self._lease_s / 2)
        self._asked_at_s = now_s

    def _list(self, incarnation: Incarnation, node: LiveNode) -> list[MembershipEffect]:
        member = self._members.get(incarnation)
        if member is None:
            self._members[incarnation] = Member(node.record, node.load, self._waited_s)
            return []
        record = node.record
        if member.role_told_at == self._num_asked:
            record = replace(record, role=member.record.role)
        moved: list[MembershipEffect] = []
        if record.role is not member.record.role:
            moved = self._give(incarnation, member, record)
        was_listed = self._is_listed(member)
        if member.take_report(record, node.load, self._waited_s) or not was_listed:
            self._reported[incarnation] = None
        return moved

    def _replace(self, listed: Collection[Incarnation]) -> None:
        """Mark the members whose node has a newer incarnation in the listing."""
        latest: dict[str, int] = {}
        for node_id, epoch in listed:
            latest[node_id] = max(epoch, latest.get(node_id, 0))
        for incarnation, member in self._members.items():
            if incarnation.epoch < latest.get(incarnation.node_id, 0):
                member.is_replaced = True
                self._changed[incarnation] = None

    def _is_listed(self, member: Member) -> bool:
        """Return whether the lease was valid at the store's last reply.

        A router that was suspended must not expire nodes before it has polled again.
        """
        return self._waited_s - member.listed_at_s <= self._lease_s

    def _forget(self) -> list[MembershipEffect]:
        """Drop members that cannot be chosen and are not expected to be heard again.

        Return those that are unlisted from now on.
        """
        unlisted, now_s = self.unlisted(), self._waited_s
        is_store_incomplete = self._is_store_away or bool(unlisted)
        patience_s = STORE_GRACE_S if is_store_incomplete else self._lease_s
        members = self._members.items()
        doubtful = [(at, one) for at, one in members if one.listed_at_s < now_s or one.is_replaced]
        for at, one in doubtful:
            if not self._is_kept(one, patience_s):
                del self._members[at]
                self._changed[at] = None
                self._used.discard(at)
                self._suspects.pop(at, None)
            elif one.listed_at_s < now_s:
                self._reported[at] = None
        known, self._unlisted = self._unlisted, set(unlisted)
        return [NodeUnlisted(node) for node in unlisted if node not in known]

    def _is_kept(self, member: Member, patience_s: float) -> bool:
        if member.is_replaced:
            return member.is_heard and member.own.num_requests > 0
        seen_at_s = max(member.listed_at_s, member.lost_at_s)
        return member.is_heard or self._waited_s - seen_at_s <= patience_s
