"""What nodes say to each other through a router: pulls, refusals of pulls, offers of blocks.

`router.dispatch.between_nodes` does the same with messages of gRPC.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.ids import Incarnation
from node.flow.messages import (
    AskBlocks,
    FetchBlocks,
    Message,
    OfferBlocks,
    PullRefused,
    SendBlocks,
    WarmNode,
)
from router.core.policies.query import NodeView
from router.core.prefix_sources import heir_of, warm_source_of
from router.dispatch.between_nodes import PassedPulls
from simulator.node import NodeSaid


class BetweenNodes:
    """Passes on what nodes have for each other. `send` returns whether a message leaves."""

    def __init__(
        self,
        router: Incarnation,
        send: Callable[[Incarnation, Message], bool],
        nodes: Callable[[], Sequence[NodeView]],
    ) -> None:
        self._router = router
        self._send = send
        self._nodes = nodes
        self._passed = PassedPulls()

    def take(self, node: Incarnation, said: NodeSaid) -> None:
        """Take a message of a node for what it has for others."""
        for wanted in said.pulls:
            self._pull(node, wanted)
        for refused in said.refused_pulls:
            self._send(refused.node, PullRefused(refused.lease_token))
        for offered in said.offers:
            self._offer(node, offered)
        if said.warm_from:
            source = warm_source_of(node, self._nodes(), said.warm_from)
            if source is not None:
                self._send(source, WarmNode(self._router, node))

    def on_lost(self, source: Incarnation) -> None:
        """Tell those that pull from a node that it is lost."""
        for puller, token in self._passed.take(source):
            self._send(puller, PullRefused(token))

    def _pull(self, node: Incarnation, wanted: AskBlocks) -> None:
        """Pass a pull on; say at once if nobody answers."""
        token = wanted.ticket.lease_token
        if self._send(wanted.source, SendBlocks(self._router, wanted.ticket, wanted.block_hashes)):
            self._passed.add(wanted.source, node, token)
        else:
            self._send(node, PullRefused(token))

    def _offer(self, node: Incarnation, offered: OfferBlocks) -> None:
        """Let a new node, or one that stays, pull what this one has."""
        new = offered.new_node
        heir = heir_of(node, self._nodes()) if new is None else new.node
        if heir is not None:
            self._send(heir, FetchBlocks(self._router, node, offered.block_hashes))
