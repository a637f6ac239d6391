"""A peer that sends what it likes, and the node that must not mind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from common.ids import Incarnation
from kv_transfer.contract import TransferEnded
from kv_transfer.receiving.effects import DropReason
from kv_transfer.shared.limits import (
    MAX_BLOCKS_PER_FRAME,
    Limits,
)
from kv_transfer.wire import frames
from tests.support.kv.kv_cluster import (
    LAYOUT,
    WINDOW_BYTES,
    Cluster,
    Node,
    commit_for,
)

ROGUE = Incarnation("rogue", 1)
LIMITS = Limits(window_bytes=WINDOW_BYTES)
WELCOME = frames.Welcome(
    Incarnation("d", 1),
    "zmq",
    b"",
    WINDOW_BYTES,
    "block",
    LIMITS.quiet_s,
    MAX_BLOCKS_PER_FRAME,
)


def hello_to(decode: Node) -> frames.Hello:
    return frames.Hello(ROGUE, decode.incarnation, LAYOUT, {"zmq": b""}, "auto")


@pytest.fixture
def decode(zmq_cluster: Cluster) -> Node:
    return zmq_cluster.node("d")


class Raw:
    """A DEALER that sends any frames."""

    def __init__(self, context: zmq.Context[Any], decode: Node) -> None:
        self._decode = decode
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 20_000)
        self.socket.connect(decode.connector.endpoint)

    def send(self, frame: frames.Frame | bytes, *payload: bytes) -> None:
        header = frame if isinstance(frame, bytes) else frames.encode(frame)
        self.socket.send_multipart([header, *payload])

    def answer(self) -> frames.Frame:
        return frames.decode(self.socket.recv())

    def hello(self) -> None:
        self.send(hello_to(self._decode))
        assert self.answer() == WELCOME

    def settle(self) -> None:
        """Wait for an answer after which everything sent before was handled."""
        self.send(frames.Ping(()))
        while not isinstance(answer := self.answer(), frames.Pong):
            if answer == frames.Rejected(frames.NO_SESSION, "say HELLO first"):
                return


@pytest.fixture
def raw(decode: Node) -> Iterator[Raw]:
    with zmq.Context() as context:
        peer = Raw(context, decode)
        with contextlib.closing(peer.socket):
            yield peer


def assert_others_are_served(cluster: Cluster, decode: Node) -> None:
    prefill = cluster.node("good")
    ticket = cluster.ticket(decode, [9, 8])
    decode.connector.expect(ticket, sender_deadline_s=30)
    prefill.connector.open(ticket, deadline_s=30)
    prefill.push_all(ticket, [1, 2])
    prefill.connector.commit(ticket.lease_token, commit_for(ticket))
    assert prefill.wait_event() == TransferEnded(ticket.lease_token, None)
    assert np.array_equal(decode.pool[:, :, [9, 8]], prefill.pool[:, :, [1, 2]])


def dropped(decode: Node, reason: DropReason) -> int:
    return decode.connector.statistics().frames_dropped[reason.value]
