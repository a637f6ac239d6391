"""Messages between nodes, through a router: pulls, refusals of pulls, offers of blocks.

`router.dispatch.between_nodes` does the same with messages of gRPC.
"""

from __future__ import annotations

from collections.abc import Callable

from common.ids import Incarnation
from common.observing.clock import Clock
from node.flow.messages import (
    AskBlocks,
    FetchBlocks,
    Message,
    OfferBlocks,
    PullRefused,
    SendBlocks,
    WarmNode,
)
from router.core.membership import Membership
from router.core.prefix_sources import WarmWishes, heir_of
from router.dispatch.between_nodes import PassedPulls
from simulator.node import NodeSaid


class NodesInContact:
    """Passes on messages between nodes. `send` returns whether a message leaves."""

    def __init__(
        self,
        router: Incarnation,
        send: Callable[[Incarnation, Message], bool],
        membership: Membership,
        clock: Clock,
    ) -> None:
        self._router = router
        self._send = send
        self._membership = membership
        self._clock = clock
        self._passed = PassedPulls()
        self._wishes = WarmWishes()

    def take(self, node: Incarnation, said: NodeSaid) -> None:
        """Pass on the parts of a node's message that are for other nodes."""
        for wanted in said.pulls:
            self._pull(node, wanted)
        for refused in said.refused_pulls:
            self._send(refused.node, PullRefused(refused.lease_token))
        for offered in said.offers:
            self._offer(node, offered)
        if said.warm_from:
            self._wishes.add(node, said.warm_from, self._clock.now_s())
            self.warm()

    def on_lost(self, lost: Incarnation) -> None:
        """Tell the nodes that pull from a node that it is lost."""
        self._wishes.forget(lost)
        for puller, token in self._passed.take(lost):
            self._send(puller, PullRefused(token))

    def warm(self) -> None:
        """Ask the nodes that are heard which of their blocks a new node may pull."""
        if not self._wishes:
            return
        members = self._membership
        settled = self._wishes.settle(members.nodes(), members.records(), self._clock.now_s())
        for new, _, source in settled:
            if source is not None:
                self._send(source, WarmNode(self._router, new))

    def _pull(self, node: Incarnation, wanted: AskBlocks) -> None:
        """Pass a pull on; refuse it at once if its source is not reached."""
        token = wanted.ticket.lease_token
        if self._send(wanted.source, SendBlocks(self._router, wanted.ticket, wanted.block_hashes)):
            self._passed.add(wanted.source, node, token)
        else:
            self._send(node, PullRefused(token))

    def _offer(self, node: Incarnation, offered: OfferBlocks) -> None:
        """Offer this node's blocks to a new node, or to one that stays."""
        new = offered.new_node
        heir = heir_of(node, self._membership.nodes()) if new is None else new.node
        if heir is not None:
            self._send(heir, FetchBlocks(self._router, node, offered.block_hashes))
