"""Nodes on cards in processes of their own, with rings that RDMA reads."""

from __future__ import annotations

from multiprocessing.connection import Connection

from kv_transfer.contract import KVEvent, Ticket
from tests.rdma.devices import WAIT_S
from tests.rdma.rdma_kind import RdmaRingKind
from tests.rdma.two_lanes import LAYOUT, NUM_BLOCKS
from tests.support.kv.kv_cluster import Cluster, Node, commit_for

NUM_SLOTS = 8
"""The slots of a ring: two are for receiving, which take one frame, of half a window."""
READY = "ready"
WINDOW_BYTES = 4 * 2 * LAYOUT.piece_bytes


def ring_cluster(first: int = 0) -> Cluster:
    """Its nodes are on the engines of `first`, `first + 1` …, as they are made."""
    kind = RdmaRingKind(first)
    kind.num_slots = NUM_SLOTS
    return Cluster(kind)


def card_node(cluster: Cluster, name: str, fill: int) -> Node:
    """A node whose card is filled with `fill`."""
    node = cluster.node(name, layout=LAYOUT, window_bytes=WINDOW_BYTES, num_blocks=NUM_BLOCKS)
    node.pool[:] = fill
    return node


def hand_over(node: Node, ticket: Ticket) -> None:
    """Send the first blocks, as many as the ticket has."""
    node.connector.open(ticket, deadline_s=WAIT_S)
    node.push_all(ticket, range(len(ticket.target_block_ids)))
    node.connector.commit(ticket.lease_token, commit_for(ticket, LAYOUT))


def card_decode_child(pipe: Connection, engine: int, fill: int) -> None:
    """Say that it is ready, and answer each request, a number of blocks, with a ticket."""
    cluster = ring_cluster(engine)
    node = card_node(cluster, "d", fill)
    pipe.send(READY)
    while num_blocks := pipe.recv():
        ticket = cluster.ticket(node, range(num_blocks))
        node.connector.expect(ticket, sender_deadline_s=WAIT_S)
        pipe.send(ticket)


def card_prefill_child(pipe: Connection, engine: int, fill: int) -> None:
    """Say that it is ready, send blocks for each ticket, and report the outcome."""
    node = card_node(ring_cluster(engine), "p", fill)
    pipe.send(READY)
    while ticket := pipe.recv():
        hand_over(node, ticket)
        event: KVEvent = node.inbox.get()
        pipe.send(event)
