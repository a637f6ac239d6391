"""Nodes on one network, over each connector."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from common.errors import HandoffFailed
from common.ids import AttemptId, Incarnation
from common.kv_layout import KVLayout
from kv_transfer.connector import (
    Commit,
    KVEvent,
    LandingFailed,
    OnEvent,
    Ticket,
    TransferEnded,
)
from kv_transfer.loopback import LoopbackConnector, LoopbackNetwork, LoopbackTransport
from kv_transfer.pieces import Pool
from kv_transfer.shell import TransportConnector
from kv_transfer.zmq_connector import ZmqConnector

LAYOUT = KVLayout(
    model_digest="m", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32"
)
PAIR_BYTES = 2 * LAYOUT.piece_bytes
# Two blocks per frame, five in flight: the handoffs of the suite meet both bounds.
WINDOW_BYTES = 5 * PAIR_BYTES
WAIT_S = 20.0


@dataclass
class Node:
    """A connector with its pool and the events it emitted, in order."""

    incarnation: Incarnation
    pool: Pool
    connector: TransportConnector
    layout: KVLayout
    events: list[KVEvent] = field(default_factory=list)
    inbox: queue.Queue[KVEvent] = field(default_factory=queue.Queue)

    def wait_event(self) -> KVEvent:
        return self.inbox.get(timeout=WAIT_S)

    def push_all(
        self,
        ticket: Ticket,
        source_blocks: Sequence[int],
        layers: Sequence[int] | None = None,
    ) -> None:
        for layer in range(self.layout.num_layers) if layers is None else layers:
            self.connector.push(
                ticket.lease_token,
                layer=layer,
                ordinals=range(len(source_blocks)),
                source_blocks=source_blocks,
            )


class Cluster:
    """Makes nodes of one kind of connector, and closes them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.host = "127.0.0.1"
        self.advertised_host: str | None = None
        self.network = LoopbackNetwork()
        self.nodes: list[Node] = []
        self._tokens = itertools.count(101)
        self._exit = contextlib.ExitStack()

    def node(
        self,
        name: str,
        *,
        epoch: int = 1,
        layout: KVLayout = LAYOUT,
        window_bytes: int = WINDOW_BYTES,
        peer_timeout_s: float = 2.0,
        num_blocks: int = 12,
        on_event: OnEvent | None = None,
    ) -> Node:
        incarnation = Incarnation(name, epoch)
        rng = np.random.default_rng(len(self.nodes))
        shape = (layout.num_layers, 2, num_blocks, layout.piece_bytes)
        pool = rng.integers(0, 256, shape, dtype=np.uint8)
        events: list[KVEvent] = []
        inbox: queue.Queue[KVEvent] = queue.Queue()

        def take(event: KVEvent) -> None:
            events.append(event)
            inbox.put(event)

        connector = self.connector(
            pool,
            layout,
            incarnation,
            on_event or take,
            window_bytes=window_bytes,
            peer_timeout_s=peer_timeout_s,
        )
        self.nodes.append(Node(incarnation, pool, connector, layout, events, inbox))
        return self.nodes[-1]

    def connector(
        self,
        pool: Pool,
        layout: KVLayout,
        incarnation: Incarnation,
        on_event: OnEvent,
        *,
        window_bytes: int,
        peer_timeout_s: float,
    ) -> TransportConnector:
        if self.kind == "zmq":
            return ZmqConnector(
                pool,
                layout,
                incarnation,
                on_event,
                host=self.host,
                advertised_host=self.advertised_host,
                window_bytes=window_bytes,
                peer_timeout_s=peer_timeout_s,
            )
        return LoopbackConnector(
            pool,
            layout,
            incarnation,
            on_event,
            network=self.network,
            window_bytes=window_bytes,
            peer_timeout_s=peer_timeout_s,
        )

    def ticket(
        self, decode: Node, target_blocks: Sequence[int], *, num_cached_tokens: int = 0
    ) -> Ticket:
        token = next(self._tokens)
        return Ticket(
            attempt=AttemptId(f"r{token}", 0),
            decode_node=decode.incarnation,
            kv_endpoint=decode.connector.endpoint,
            lease_token=token,
            generation=7,
            target_block_ids=tuple(target_blocks),
            num_cached_tokens=num_cached_tokens,
            fingerprint=decode.layout.fingerprint,
            lease_s=30.0,
        )

    def silent_endpoint(self) -> str:
        """Somebody accepts connections there and never says a word."""
        if self.kind == "loopback":
            return LoopbackTransport(self.network).endpoint
        listener = self._exit.enter_context(socket.create_server(("127.0.0.1", 0)))
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"

    def close(self) -> None:
        for node in self.nodes:
            node.connector.close()
        self._exit.close()


def commit_for(ticket: Ticket, layout: KVLayout = LAYOUT, *, missing: int = 0) -> Commit:
    """The commit of a prompt whose last block lacks `missing` tokens."""
    num_new = len(ticket.target_block_ids) * layout.block_size - missing
    return Commit(
        num_tokens=ticket.num_cached_tokens + num_new, first_token_id=42, draft_token_ids=(5, 6)
    )


def begin(cluster: Cluster, *, targets: tuple[int, ...] = (1, 2, 3)) -> tuple[Node, Node, Ticket]:
    """A handoff that is expected and open."""
    prefill, decode = cluster.node("p"), cluster.node("d")
    ticket = cluster.ticket(decode, targets)
    decode.connector.expect(ticket, sender_deadline_s=30)
    prefill.connector.open(ticket, deadline_s=30)
    return prefill, decode, ticket


def error_of(event: object) -> HandoffFailed:
    assert isinstance(event, TransferEnded | LandingFailed)
    assert isinstance(event.error, HandoffFailed)
    return event.error


def assert_ended_once(*nodes: Node) -> None:
    """Late calls change nothing, and closing adds no event: what was owed was emitted."""
    counts = [len(node.events) for node in nodes]
    for node in nodes:
        for token in {event.lease_token for event in node.events}:
            node.connector.push(token, layer=0, ordinals=[0], source_blocks=[0])
            node.connector.abort(token)
            node.connector.revoke(token)
        node.connector.close()
        node.connector.close()
    assert [len(node.events) for node in nodes] == counts == [1] * len(nodes)
