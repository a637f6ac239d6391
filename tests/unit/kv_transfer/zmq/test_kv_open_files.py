"""A process that can open hardly any more files: it refuses, and does not spin."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import HandoffFailed
from kv_transfer.contract import Landed, TransferEnded
from kv_transfer.sending.transfer_errors import PeerUnreachable
from kv_transfer.sending.unreachable import MOST_PAUSE_S
from kv_transfer.shared.limits import Limits
from kv_transfer.zmq import open_files
from kv_transfer.zmq.open_files import FEW, NEARLY_NONE, OpenFiles, files_left
from kv_transfer.zmq.transport import ZmqTransport
from tests.support.clocks.manual_clock import ManualClock
from tests.support.kv.kv_cluster import (
    LAYOUT,
    Cluster,
    Node,
    cluster_of,
    error_of,
    send,
    wait_until,
)

ROOM = 100
WAIT_S = 20.0


@pytest.fixture
def few_files() -> Iterator[None]:
    """Let this process open `ROOM` more files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + ROOM, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def only_left(count: int) -> Iterator[None]:
    """Open files until `count` are left."""
    opened = [os.dup(0) for _ in range(files_left() - count)]
    try:
        yield
    finally:
        for file in opened:
            os.close(file)


@pytest.mark.usefixtures("few_files")
def test_files_that_are_left_are_counted() -> None:
    # Looking takes one itself.
    before = files_left()
    assert ROOM - 2 <= before <= ROOM
    with only_left(10):
        assert files_left() == 10
    assert files_left() == before


@pytest.mark.usefixtures("few_files")
def test_nothing_can_be_counted_without_a_file() -> None:
    opened = []
    with contextlib.suppress(OSError):
        while True:
            opened.append(os.dup(0))
    left = files_left()
    for file in opened:
        os.close(file)
    assert left == 0


@pytest.mark.parametrize(
    ("left", "wanted"),
    [
        (FEW, (False, False)),
        (FEW - 1, (True, False)),
        (NEARLY_NONE, (True, False)),
        (NEARLY_NONE - 1, (True, True)),
    ],
)
def test_the_two_levels(
    left: int, wanted: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_files, "files_left", lambda: left)
    files = OpenFiles()
    assert files.look()
    assert (files.are_few, files.are_nearly_none) == wanted


def test_no_limit_and_no_folder_of_files_are_no_lack_of_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_folder(path: str) -> None:
        raise FileNotFoundError(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", no_folder)
        assert files_left() > FEW
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    assert files_left() > FEW


def test_files_are_not_counted_in_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "LOOK_EVERY_S", 3600.0)
    files = OpenFiles()
    assert [files.look() for _ in range(3)] == [True, False, False]


@pytest.mark.usefixtures("few_files")
def test_a_port_without_files_is_closed_and_opens_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(open_files, "LOOK_EVERY_S", 0.0)
    with _listening() as (transport, address):
        with only_left(NEARLY_NONE - 1):
            transport.wait(0.0)
            assert transport.is_short_of_files
            _wait_until_refused(address)
            transport.wait(0.0)
        with only_left(FEW - 1):
            transport.wait(0.0)
            _wait_until_refused(address)
        transport.wait(0.0)
        assert [transport.is_short_of_files] == [False]
        socket.create_connection(address).close()
        transport.wait(0.0)
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "nearly all files that this process may open are open",
        "the KV port is open again",
    ]


class Pairs:
    """A prefill node with a connection to `known`, and none to `other`; all in this process."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.clock = ManualClock()
        self.prefill = cluster.node("p", clock=self.clock)
        self.known, self.other = cluster.node("known"), cluster.node("other")
        self.hand_over(self.known)

    def hand_over(self, to: Node) -> None:
        ticket = self.cluster.ticket(to, [1, 2, 3])
        send(self.prefill, to, ticket, [4, 5, 6])
        assert self.prefill.wait_event() == TransferEnded(ticket.lease_token, None)
        assert isinstance(to.wait_event(), Landed)

    def count_files(self) -> None:
        """Let each node count its files, and tell its machine, which it does a turn later."""
        for node in self.cluster.nodes:
            connector, turn = node.connector, node.connector.num_turns
            wait_until(lambda: connector.num_turns >= turn + 2, node.look_at_the_time)  # noqa: B023

    def error_to(self, to: Node, *, is_silent: bool = False) -> HandoffFailed:
        """Return how a transfer ends that must not succeed; time passes for a silent node only."""
        num_before = len(self.prefill.events)
        self.prefill.connector.open(self.cluster.ticket(to, [1]), deadline_s=30)
        if is_silent:
            self.prefill.pass_time_until(lambda: self.prefill.events[num_before:], self.clock)
        return error_of(self.prefill.wait_event())

    def try_again(self) -> None:
        """Let the prefill node connect to those that it did not reach."""
        self.clock.advance(MOST_PAUSE_S)
        self.prefill.look_at_the_time()
        wait_until(lambda: not self.prefill.connector.statistics().unreachable)


@pytest.fixture
def pairs(few_files: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pairs]:
    monkeypatch.setattr(open_files, "LOOK_EVERY_S", 0.0)
    with contextlib.closing(cluster_of("zmq")) as cluster:
        yield Pairs(cluster)


@pytest.mark.covers("F98")
def test_with_few_files_new_senders_are_refused_and_connected_ones_go_on(pairs: Pairs) -> None:
    with only_left(FEW - 1):
        pairs.count_files()
        assert "can open no more files" in str(pairs.error_to(pairs.other))
        pairs.hand_over(pairs.known)
    pairs.count_files()
    pairs.hand_over(pairs.other)


@pytest.mark.covers("F98")
def test_without_files_transfers_end_typed_until_there_are_some(pairs: Pairs) -> None:
    """The port is closed with its connections: ZMQ ends them with the listener."""
    with only_left(0):
        pairs.count_files()
        for node in (pairs.known, pairs.other):
            assert isinstance(pairs.error_to(node, is_silent=True), PeerUnreachable)
    pairs.count_files()
    pairs.try_again()
    for node in (pairs.known, pairs.other):
        pairs.hand_over(node)
    for node in pairs.cluster.nodes:
        node.assert_books_are_empty()


@pytest.mark.usefixtures("few_files")
def test_a_port_that_cannot_be_opened_again_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(open_files, "LOOK_EVERY_S", 0.0)
    with _listening() as (transport, address):
        with only_left(NEARLY_NONE - 1):
            transport.wait(0.0)
            _wait_until_refused(address)
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(address)
            other.listen()
            for _ in range(5):
                transport.wait(0.0)
        transport.wait(0.0)
        socket.create_connection(address).close()
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "nearly all files that this process may open are open",
        "the KV port cannot be opened again yet",
        "the KV port is open again",
    ]


@contextlib.contextmanager
def _listening() -> Iterator[tuple[ZmqTransport, tuple[str, int]]]:
    """A transport, and the address at which it listens."""
    transport = ZmqTransport("127.0.0.1", 0, "127.0.0.1", LAYOUT, Limits())
    with contextlib.closing(transport):
        yield transport, ("127.0.0.1", int(transport.endpoint.rpartition(":")[2]))


def _wait_until_refused(address: tuple[str, int]) -> None:
    """ZMQ closes its listener in its own thread."""
    deadline_at_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_at_s:
        try:
            socket.create_connection(address, timeout=WAIT_S).close()
        except ConnectionResetError:
            pass  # It was in the listener's queue when that closed.
        except ConnectionRefusedError:
            return
    raise AssertionError("the port is open")
