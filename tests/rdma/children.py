"""Nodes in processes of their own, which tests stop and kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from kv_transfer.contract import KVEvent, Ticket
from tests.rdma.devices import WAIT_S
from tests.rdma.rdma_kind import RdmaKind
from tests.rdma.two_lanes import ALL_BLOCKS, LAYOUT, NUM_BLOCKS
from tests.support.kv.kv_cluster import Cluster, Node, commit_for

WINDOW_BYTES = 8 << 20


def big_node(cluster: Cluster, name: str, fill: int) -> Node:
    """A node whose pool is large enough for a write to take a while, filled with `fill`."""
    node = cluster.node(name, layout=LAYOUT, window_bytes=WINDOW_BYTES, num_blocks=NUM_BLOCKS)
    node.pool[:] = fill
    return node


def send_all(node: Node, ticket: Ticket) -> None:
    """Send the whole pool."""
    node.connector.open(ticket, deadline_s=WAIT_S)
    node.push_all(ticket, ALL_BLOCKS)
    node.connector.commit(ticket.lease_token, commit_for(ticket, LAYOUT))


def decode_child(pipe: Connection, engine: int, fill: int) -> None:
    """Answer each request with a ticket for all blocks."""
    cluster = Cluster(RdmaKind(engine))
    node = big_node(cluster, "d", fill)
    while pipe.recv():
        ticket = cluster.ticket(node, ALL_BLOCKS)
        node.connector.expect(ticket, sender_deadline_s=WAIT_S)
        pipe.send(ticket)


def prefill_child(pipe: Connection, engine: int, fill: int, name: str = "p") -> None:
    """Send all blocks for each ticket, and report the outcome."""
    node = big_node(Cluster(RdmaKind(engine)), name, fill)
    while ticket := pipe.recv():
        send_all(node, ticket)
        event: KVEvent = node.inbox.get()
        pipe.send(event)


def other_prefill_child(pipe: Connection, engine: int, fill: int) -> None:
    """Be a further node that does so."""
    prefill_child(pipe, engine, fill, "q")


class Child:
    """A process that runs one of the functions above."""

    def __init__(
        self, target: Callable[[Connection, int, int], None], engine: int, fill: int = 0
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=target, args=(theirs, engine, fill), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, request: object) -> None:
        self._pipe.send(request)

    def wait_answer(self) -> Any:
        assert self._pipe.poll(WAIT_S), "the child says nothing"
        return self._pipe.recv()

    def stop(self) -> None:
        """Stop the process in the middle of its work."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
