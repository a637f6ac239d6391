"""A simulated cluster whose nodes drain."""

from __future__ import annotations

from typing import Any

from common.ids import Incarnation
from node.flow.messages import Drain, Message, Submit
from tests.simulation.flow_router import Client, FlowRouter
from tests.simulation.scripted_node import Node, NodeSize
from tests.simulation.world import DECODE, PREFILL, ROUTER, World, right_answer

OTHER_DECODE, OTHER_PREFILL = Incarnation("e", 1), Incarnation("q", 1)


class Cluster(World):
    """Two of each, and drained nodes end as soon as they may."""

    def __init__(self, *, threshold: int | None = 6, size: NodeSize | None = None) -> None:
        size = size or NodeSize(budget=6)
        super().__init__(threshold=threshold, prefill=size, decode=size)
        self.e = self.join(OTHER_DECODE, size, threshold)
        if threshold is not None:
            self.q = self.join(OTHER_PREFILL, size)
        self.gone: list[Node] = []
        router: Any = FlowRouter(
            ROUTER,
            lambda node, message: self.to_nodes.append((node, message)),
            decoders=(DECODE, OTHER_DECODE),
            prefillers=() if threshold is None else (PREFILL, OTHER_PREFILL),
            clock=self.clock,
        )
        self.router = router

    def drain(self, node: Node, timeout_s: float) -> None:
        """The node reads it first of all: a router goes on choosing the node for a while."""
        node.inbox.put(Drain(timeout_s))

    def to_the_node(self, node: Incarnation, message: Message) -> None:
        """A call to a node that has left fails."""
        if node not in self.nodes and isinstance(message, Submit):
            self.router.on_call_failed(message.reply_to)  # type: ignore[attr-defined]
        else:
            super().to_the_node(node, message)

    def end_drained(self) -> None:
        """Who holds nothing any more ends: said once, and true."""
        for node in list(self.nodes.values()):
            if node.num_drained:
                assert node.num_drained == 1
                node.check_empty()
                said = [item for item in self.to_router if item.node == node.me]
                for item in said:
                    self.to_router.remove(item)
                    self.to_the_router(item)
                self.stop(node)
                self.kill(node, is_noticed=True)
                self.gone.append(node)

    def crash(self, node: Node) -> None:
        """The node dies, and with it what it said and nobody has read."""
        self.to_router = [item for item in self.to_router if item.node != node.me]
        self.kill(node, is_noticed=True)
        self.gone.append(node)

    def end(self, *clients: Client) -> None:
        """Peace, and the closing checks."""
        for _ in range(20):
            self.settle()
            self.end_drained()
            for gone in self.gone:
                # Also for transfers that were opened to a node that had left already.
                for connector in self.network.connectors.values():
                    connector.on_peer_lost(gone.me)
            self.advance(0.1)
        self.check_closed()
        for client in clients:
            assert client.outcomes == ["finished"], client
            assert client.tokens == right_answer(client.request)
