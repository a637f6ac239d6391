"""What the ZMQ transport asks of the kernel, and how long it keeps what it sends."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from common.ids import Incarnation
from kv_transfer.core.effects import Peer
from kv_transfer.core.limits import Limits
from kv_transfer.zmq_transport import (
    KERNELS_CHOICE,
    LOCAL_SEND_BUFFER_BYTES,
    ZmqTransport,
    send_buffer_bytes,
)
from tests.contract.kv_connector.cluster import LAYOUT

NOBODY = Peer("tcp://127.0.0.1:1", Incarnation("nobody", 1))


@pytest.mark.parametrize(
    ("endpoint", "wanted"),
    [
        ("tcp://127.0.0.1:9001", LOCAL_SEND_BUFFER_BYTES),
        ("tcp://localhost:9001", LOCAL_SEND_BUFFER_BYTES),
        ("tcp://[::1]:9001", LOCAL_SEND_BUFFER_BYTES),
        ("tcp://10.0.0.7:9001", KERNELS_CHOICE),
        ("tcp://[2001:db8::7]:9001", KERNELS_CHOICE),
        ("tcp://decode:9001", KERNELS_CHOICE),
    ],
)
def test_only_towards_this_machine_the_kernel_holds_little(endpoint: str, wanted: int) -> None:
    assert send_buffer_bytes(endpoint) == wanted


@pytest.fixture
def transport() -> Iterator[ZmqTransport]:
    transport = ZmqTransport("127.0.0.1", 0, "127.0.0.1", LAYOUT, Limits())
    yield transport
    transport.close()


def test_what_zmq_holds_of_a_closed_connection_is_kept(transport: ZmqTransport) -> None:
    part = np.ones(1 << 20, np.uint8)
    kept = weakref.ref(part)
    transport.connect(NOBODY)
    assert transport.send(NOBODY, [memoryview(b"header"), part.data])
    del part
    transport.disconnect(NOBODY)
    gc.collect()
    # ZMQ lets go of it in a thread of its own, and is not asked before the next wait.
    assert kept() is not None
    while kept() is not None:
        transport.wait(0.001)


def test_what_was_sent_during_a_wait_is_let_go_of_when_it_ends(
    transport: ZmqTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender that an acknowledgement wakes sends again, in memory that it made free."""
    itself = Peer(transport.endpoint, Incarnation("itself", 1))
    part = np.ones(1 << 20, np.uint8)
    kept = weakref.ref(part)
    transport.connect(itself)
    assert transport.send(itself, [memoryview(b"header"), part.data])
    del part

    def until_it_is_sent(_: int) -> list[tuple[int, int]]:
        while 0 in transport._part_senders[itself]._held[0][0]:
            pass
        return []

    monkeypatch.setattr(transport._poller, "poll", until_it_is_sent)
    transport.wait(1.0)
    assert kept() is None
