"""The receiving half of a connector, whose copies end later than its sessions."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from common.errors import PeerProtocolError
from common.observing.clock import MonotonicClock
from kv_transfer.connector.connector_parts import ConnectorParts
from kv_transfer.connector.receiving_end import ReceivingEnd
from kv_transfer.connector.transfer_metrics import TransferMetrics
from kv_transfer.connector.workers import Job, Workers
from kv_transfer.lanes.lane import Lane
from kv_transfer.lanes.pool_memory import SourceMemory, host_pool
from kv_transfer.lanes.shm.shared_pool import SharedPool
from kv_transfer.lanes.shm.shm_lane import ShmLane
from kv_transfer.receiving.effects import CloseLane, OpenLane, SendBack, Write
from kv_transfer.shared.block_arrays import as_blocks
from kv_transfer.transport import Parts
from kv_transfer.wire import frames
from kv_transfer.wire.frames import Frame
from tests.support.kv.receiver_events import (
    BEGIN,
    LAYOUT,
    LIMITS,
    ME,
    SENDER,
    ticket,
)

NUM_BLOCKS = 4


class Waiting(Workers):
    """Jobs wait until the test runs them."""

    def __init__(self) -> None:
        super().__init__(0, lambda: None)
        self.jobs: deque[Job] = deque()

    def run(self, job: Job) -> None:
        self.jobs.append(job)


class Replies:
    """A `transport.Transport` as far as a receiving end needs one."""

    is_short_of_files = False

    def __init__(self) -> None:
        self.sent: list[Frame] = []

    def reply(self, session: bytes, parts: Parts) -> None:
        self.sent.append(frames.decode(bytes(parts[0])))


class Node:
    """A receiving end, a pool that is shared with it, and its effects performed at once."""

    def __init__(self) -> None:
        self.workers, self.replies = Waiting(), Replies()
        self.shared = SharedPool(NUM_BLOCKS * LAYOUT.block_bytes, is_touched=False)
        self.memory = np.zeros(NUM_BLOCKS * LAYOUT.block_bytes, np.uint8)
        lanes: dict[str, Lane] = {"shm": ShmLane(LAYOUT)}
        self.parts = ConnectorParts(
            memory=SourceMemory(host_pool(self.memory, LAYOUT)),
            num_blocks=NUM_BLOCKS,
            layout=LAYOUT,
            incarnation=ME,
            transport=self.replies,  # type: ignore[arg-type]  # The rest is not called.
            lanes=lanes,
            verify="off",
            clock=MonotonicClock(),
            limits=LIMITS,
            metrics=TransferMetrics(lanes),
            workers=self.workers,
        )
        self.end = ReceivingEnd(self.parts)

    def receive(self, *received: Frame) -> None:
        for frame in received:
            self.end.on_message(b"a", [memoryview(frames.encode(frame))])
            self.perform()

    def perform(self) -> None:
        while self.parts.effects:
            effect = self.parts.effects.popleft()
            if isinstance(effect, SendBack | OpenLane | CloseLane):
                self.end.perform(effect)

    def copy(self) -> None:
        self.workers.jobs.popleft()()()
        self.perform()

    def hello(self) -> frames.Hello:
        return frames.Hello(SENDER, ME, LAYOUT, {"shm": self.shared.offer(NUM_BLOCKS)}, "off")


def data(seq: int) -> frames.Data:
    return frames.Data(seq, 1, 3, 0, (0, 1), (), (2, 3), b"", wants_ack=True)


def test_a_session_with_the_id_of_an_earlier_one_keeps_its_lane() -> None:
    """A copy of the earlier one ends when the later one has mapped the sender's pool."""
    node = Node()
    node.shared.memory[:] = np.arange(node.shared.memory.size) % 251
    node.end.expect(ticket(), 100.0)
    node.receive(node.hello(), BEGIN, data(0))
    # Ends the session: this frame is not the next one.
    node.receive(data(7))
    node.end.expect(ticket(2, (2, 3)), 100.0)
    node.receive(node.hello(), frames.Begin(2, 3))
    node.replies.sent.clear()
    node.copy()
    assert node.replies.sent == [], "it acknowledged a frame of the earlier session"
    second = frames.Data(0, 2, 3, 0, (0, 1), (), (0, 1), b"", wants_ack=True)
    node.receive(second)
    node.copy()
    assert node.replies.sent == [frames.Ack(1, LIMITS.window_bytes)]
    source, target = (
        memory.reshape(LAYOUT.num_planes, NUM_BLOCKS, -1)
        for memory in (node.shared.memory, node.memory)
    )
    assert np.array_equal(target[:, 2:], source[:, :2])
    assert not target[:, :2].any(), "it copied for a landing that had failed"


def test_a_copy_without_the_senders_memory_breaks_the_protocol() -> None:
    write = Write(b"a", "shm", "off", data(0), as_blocks((0, 1)))
    pool = host_pool(np.zeros(NUM_BLOCKS * LAYOUT.block_bytes, np.uint8), LAYOUT)
    with pytest.raises(PeerProtocolError, match="without shared memory"):
        ShmLane(LAYOUT).copy(write, [], pool)
