"""Parts that ZMQ sends without a copy: what arrives, and how long the memory is kept."""

from __future__ import annotations

import ctypes
import errno
import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from kv_transfer.zmq.parts import PartSender

HEADER = memoryview(b"header")


class Sockets:
    """Sockets of one context, closed together."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._made: list[zmq.Socket[bytes]] = []
        # They outlive the sockets, as they have to.
        self._part_senders: list[PartSender] = []

    def new(self) -> zmq.Socket[bytes]:
        self._made.append(self._context.socket(zmq.DEALER))
        return self._made[-1]

    def pair(self, endpoint: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Return a socket that sends and one that receives."""
        sender, receiver = self.new(), self.new()
        receiver.setsockopt(zmq.RCVTIMEO, 10_000)
        receiver.bind(endpoint)
        sender.connect(receiver.get_string(zmq.LAST_ENDPOINT).rstrip("\0"))
        return sender, receiver

    def part_sender(self, socket: zmq.Socket[bytes]) -> PartSender:
        self._part_senders.append(PartSender(socket))
        return self._part_senders[-1]

    def close(self) -> None:
        for socket in self._made:
            socket.close(linger=0)
        self._context.term()


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    sockets = Sockets()
    yield sockets
    sockets.close()


def random_bytes(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


@pytest.mark.parametrize("endpoint", ["inproc://parts", "tcp://127.0.0.1:*"])
def test_parts_of_all_sizes_arrive_in_order_as_they_are(sockets: Sockets, endpoint: str) -> None:
    sender, receiver = sockets.pair(endpoint)
    parts = [random_bytes(size, size) for size in (0, 1, 33, 34, 8192, 65536, 3 << 20)]
    parts_sender = sockets.part_sender(sender)
    for _ in range(3):
        parts_sender.send(HEADER, [part.data for part in parts])
        got = receiver.recv_multipart()
        assert got == [bytes(HEADER), *(part.tobytes() for part in parts)]


def test_nothing_is_copied(sockets: Sockets) -> None:
    """Within a process the received memory is the sent memory."""
    sender, receiver = sockets.pair("inproc://parts")
    part = random_bytes(1 << 20, 1)
    sockets.part_sender(sender).send(HEADER, [part.data])
    _, got = receiver.recv_multipart(copy=False)
    assert np.shares_memory(np.frombuffer(got.buffer, np.uint8), part)


@pytest.mark.covers("F25")
def test_a_part_is_kept_until_zmq_has_let_go_of_it(
    sockets: Sockets,
) -> None:
    sender, receiver = sockets.pair("inproc://parts")
    parts_sender = sockets.part_sender(sender)
    first, second = random_bytes(1 << 20, 1), random_bytes(1 << 20, 2)
    kept = weakref.ref(first)
    parts_sender.send(HEADER, [first.data, second.data])
    del first
    gc.collect()
    assert not parts_sender.forget_sent()
    assert kept() is not None

    got = receiver.recv_multipart(copy=False)
    second_got = got.pop()
    del got
    assert not parts_sender.forget_sent()  # one of two
    assert kept() is not None
    del second_got
    assert parts_sender.forget_sent()
    assert kept() is None


def test_sending_forgets_what_was_sent_before(sockets: Sockets) -> None:
    sender, receiver = sockets.pair("inproc://parts")
    parts_sender = sockets.part_sender(sender)
    first = random_bytes(1 << 20, 1)
    kept = weakref.ref(first)
    parts_sender.send(HEADER, [first.data])
    del first
    receiver.recv_multipart()
    parts_sender.send(HEADER, [random_bytes(1 << 20, 2).data])
    assert kept() is None


def test_a_part_that_never_left_is_let_go_of_when_zmq_has_ended(
    sockets: Sockets,
) -> None:
    sender = sockets.new()
    sender.connect("tcp://127.0.0.1:1")  # Nobody is there.
    parts_sender = sockets.part_sender(sender)
    parts_sender.send(HEADER, [random_bytes(1 << 20, 1).data])
    assert not parts_sender.forget_sent()
    sockets.close()
    assert parts_sender.forget_sent()


class BreakingLibrary:
    """As libzmq, for a connection that ends when its second part is sent."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._num_sent = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._library, name)

    def zmq_msg_send(self, message: object, handle: int, flags: int) -> int:
        self._num_sent += 1
        if self._num_sent == 2:
            return -1
        return int(self._library.zmq_msg_send(message, handle, flags))

    def zmq_errno(self) -> int:
        return errno.EAGAIN


def test_what_was_to_follow_a_part_that_failed_is_let_go_of(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, _ = sockets.pair("inproc://parts")
    parts_sender = sockets.part_sender(sender)
    monkeypatch.setattr(parts_sender, "_library", BreakingLibrary(parts_sender._library))
    parts = [random_bytes(1 << 20, seed) for seed in range(4)]
    kept = [weakref.ref(part) for part in parts]
    with pytest.raises(zmq.ZMQError, match="temporarily unavailable"):
        parts_sender.send(HEADER, [part.data for part in parts])
    del parts
    sockets.close()
    assert parts_sender.forget_sent()
    gc.collect()
    assert [one() for one in kept] == [None] * 4


def test_a_socket_that_is_full_takes_nothing(sockets: Sockets) -> None:
    sender = sockets.new()
    sender.setsockopt(zmq.SNDHWM, 1)
    sender.connect("tcp://127.0.0.1:1")
    parts_sender = sockets.part_sender(sender)
    parts_sender.send(HEADER, [random_bytes(1 << 20, 1).data])
    refused = random_bytes(1 << 20, 2)
    kept = weakref.ref(refused)
    with pytest.raises(zmq.Again):
        parts_sender.send(HEADER, [refused.data])
    del refused
    assert kept() is None
