"""The kinds of connector that the suite runs over; a further one is one more entry in `KINDS`.

Nothing here needs more than numpy and what the connectors over TCP import, so that the suite also
runs on a small machine with the hardware that a kind wants; what one kind alone needs, it imports.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from common.observing.clock import Clock
from kv_transfer.connector.shell import TransportConnector
from kv_transfer.contract import OnEvent
from kv_transfer.lanes.ipc.ipc_lane import IpcLane, placed_sums
from kv_transfer.lanes.lane import Lane
from kv_transfer.lanes.pieces import Sums, packed_sums, piece_sum
from kv_transfer.lanes.pool_memory import Bytes, Pool, host_pool, ring_pool
from kv_transfer.lanes.rdma.peer_batches import Engine
from kv_transfer.lanes.rdma.read_lane import RdmaReadLane
from kv_transfer.shared.block_arrays import as_blocks
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.lanes import VERIFY_AUTO
from kv_transfer.shared.limits import RING_RECEIVING_WINDOWS, RING_WINDOWS, Limits
from kv_transfer.shared.pool_shape import PoolShape
from kv_transfer.zmq.connector import ZmqConnector
from tests.support.engine.fake_card import FakeCard, bytes_sum
from tests.support.kv.fake_engine import FakeEngine
from tests.support.kv.fake_late_lane import Copier, FakeLateLane
from tests.support.kv.fake_one_sided_lane import Fabric, FakeOneSidedLane
from tests.support.kv.loopback_connector import (
    LoopbackConnector,
    LoopbackNetwork,
    LoopbackTransport,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """A test's options for one node's connector."""

    layout: KVLayout
    incarnation: Incarnation
    window_bytes: int
    peer_timeout_s: float
    verify: str = VERIFY_AUTO
    clock: Clock | None = None
    host: Bytes | None = None


class Kind:
    """Makes the pools and connectors of one cluster.

    `lane` is the one that its pairs agree on, with `kv_lanes` connections. `is_one_sided`: blocks
    of a landing that ended early may be released later. `is_read_beside`: a frame is sent when
    something other than the connector's thread has read its bytes.
    """

    lane = ""
    is_one_sided = False
    kv_lanes = 1
    is_read_beside = False

    def pool(self, layout: KVLayout, num_blocks: int) -> Bytes:
        """Return `pool_shape`, or uint8 `[num_bytes]` where layers differ."""
        return np.zeros(shape_of_bytes(layout, num_blocks), np.uint8)

    def beside(self, layout: KVLayout, num_blocks: int) -> Bytes:
        """Return memory that a node sends from beside its pool, in the same form."""
        return np.zeros(shape_of_bytes(layout, num_blocks), np.uint8)

    def connector(self, pool: Bytes, options: NodeOptions, on_event: OnEvent) -> TransportConnector:
        raise NotImplementedError

    def offer(self, pool: Bytes, layout: KVLayout) -> bytes:
        """Return the HELLO's offer of `lane`, for bytes out of `pool`."""
        return b""

    def source_block(self, layer: int) -> int:
        """Return the number by which a frame names block 0 of the pool of `offer`."""
        return 0

    def sums(self, planes: Sequence[Any], layer: int, ordinal: int) -> Sums:
        """Return the sums of a block's pieces as `lane` sends them."""
        return packed_sums(piece_sum(plane, layer, ordinal) for plane in planes)

    def silent_endpoint(self) -> str:
        """Return an endpoint that accepts connections and never sends."""
        raise NotImplementedError

    def close(self) -> None:
        pass


class LoopbackKind(Kind):
    """Connectors in one process, with a network that the test controls."""

    lane = "loopback"

    def __init__(self) -> None:
        self.network = LoopbackNetwork()

    def lanes(self, pool: Bytes, layout: KVLayout) -> Sequence[Lane]:
        """Return the lanes that are offered besides the inline one."""
        return []

    def connector(self, pool: Bytes, options: NodeOptions, on_event: OnEvent) -> TransportConnector:
        return LoopbackConnector(
            pool,
            options.layout,
            options.incarnation,
            on_event,
            network=self.network,
            window_bytes=options.window_bytes,
            peer_timeout_s=options.peer_timeout_s,
            clock=options.clock,
            lanes=self.lanes(pool, options.layout),
            beside=options.host,
            verify=options.verify,
            kv_lanes=self.kv_lanes,
        )

    def silent_endpoint(self) -> str:
        return LoopbackTransport(self.network).endpoint


class FakeRdmaKind(LoopbackKind):
    """One-sided writes in memory, which the test controls too."""

    lane = "rdma"
    is_one_sided = True

    def __init__(self) -> None:
        super().__init__()
        self.fabric = Fabric()
        self.one_sided: list[FakeOneSidedLane] = []

    def lanes(self, pool: Bytes, layout: KVLayout) -> Sequence[Lane]:
        self.one_sided.append(FakeOneSidedLane(self.fabric, host_pool(pool, layout)))
        return [self.one_sided[-1]]


class FakeLateKind(LoopbackKind):
    """Copies that are completed later, on a thread that the test controls too."""

    lane = "shm"

    def __init__(self) -> None:
        super().__init__()
        self.copier = Copier()

    def lanes(self, pool: Bytes, layout: KVLayout) -> Sequence[Lane]:
        return [FakeLateLane(self.copier, host_pool(pool, layout))]

    def offer(self, pool: Bytes, layout: KVLayout) -> bytes:
        offer = self.lanes(pool, layout)[0].offer(Peer("", Incarnation("anyone", 1)))
        assert offer is not None
        return offer

    def close(self) -> None:
        self.copier.close()


class ZmqKind(Kind):
    """Connectors over TCP."""

    lane = "zmq"

    def __init__(self) -> None:
        self.host = "127.0.0.1"
        self.advertised_host: str | None = None
        self._exit = contextlib.ExitStack()

    def lanes(self, pool: Bytes, layout: KVLayout) -> Sequence[Lane]:
        """Return the lanes that are offered besides the inline one."""
        return []

    def lanes_of(self, pool: Bytes, options: NodeOptions) -> Sequence[Lane]:
        """Return those of a node with these options."""
        return self.lanes(pool, options.layout)

    def card(self, pool: Bytes) -> FakeCard | None:
        """Return the card that has the pool."""
        return None

    def host_pool(self, pool: Bytes, options: NodeOptions) -> Pool:
        """Return the connector's pool: where a card has `pool`, its ring."""
        return host_pool(pool, options.layout)

    def connector(self, pool: Bytes, options: NodeOptions, on_event: OnEvent) -> TransportConnector:
        return ZmqConnector(
            self.host_pool(pool, options),
            options.layout,
            options.incarnation,
            on_event,
            host=self.host,
            advertised_host=self.advertised_host,
            window_bytes=options.window_bytes,
            peer_timeout_s=options.peer_timeout_s,
            clock=options.clock,
            lanes=self.lanes_of(pool, options),
            beside=options.host,
            card=self.card(pool),
            verify=options.verify,
            kv_lanes=self.kv_lanes,
        )

    def silent_endpoint(self) -> str:
        listener = self._exit.enter_context(socket.create_server(("127.0.0.1", 0)))
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"

    def close(self) -> None:
        self._exit.close()


class ShmKind(ZmqKind):
    """Frames over TCP, bytes through shared memory."""

    lane = "shm"

    def __init__(self) -> None:
        super().__init__()
        self._shared: dict[int, Any] = {}

    def pool(self, layout: KVLayout, num_blocks: int) -> Bytes:
        from kv_transfer.lanes.shm.shared_pool import SharedPool

        shared = SharedPool(num_blocks * layout.block_bytes, is_touched=False)
        pool = shared.memory.reshape(shape_of_bytes(layout, num_blocks))
        self._shared[pool.ctypes.data] = shared
        return pool

    def beside(self, layout: KVLayout, num_blocks: int) -> Bytes:
        return self.pool(layout, num_blocks)

    def lanes(self, pool: Bytes, layout: KVLayout) -> Sequence[Lane]:
        from kv_transfer.lanes.shm.shm_lane import ShmLane

        return [ShmLane(layout, self._shared[pool.ctypes.data])]

    def lanes_of(self, pool: Bytes, options: NodeOptions) -> Sequence[Lane]:
        from kv_transfer.lanes.shm.shm_lane import ShmLane

        host = None if options.host is None else self._shared[options.host.ctypes.data]
        return [ShmLane(options.layout, self._shared[pool.ctypes.data], host)]

    def offer(self, pool: Bytes, layout: KVLayout) -> bytes:
        offer = self.lanes(pool, layout)[0].offer(Peer("", Incarnation("anyone", 1)))
        assert offer is not None
        return offer


class CardKind(ZmqKind):
    """Pools on cards, which the connector's lanes of the host reach through rings."""

    is_read_beside = True
    num_slots: int | None = None
    """Slots of each ring; None: as many as a node makes."""

    def __init__(self) -> None:
        super().__init__()
        self.cards: dict[int, FakeCard] = {}

    def pool(self, layout: KVLayout, num_blocks: int) -> Bytes:
        card = FakeCard(layout, num_blocks)
        self.cards[card.content.ctypes.data] = card
        return card.content.reshape(shape_of_bytes(layout, num_blocks))

    def card(self, pool: Bytes) -> FakeCard:
        return self.cards[pool.ctypes.data]

    def host_pool(self, pool: Bytes, options: NodeOptions) -> Pool:
        card = self.card(pool)
        num_slots = self.num_slots or Limits(window_bytes=options.window_bytes).ring_slots(
            card.layout
        )
        memory = self.ring_memory(PoolShape.ring(card.layout, num_slots).num_bytes)
        return ring_pool(memory, card.layout)

    def ring_memory(self, num_bytes: int) -> Bytes:
        """Return zeros. None is touched: a ring can have more than a thousand times its pool."""
        return np.zeros(num_bytes, np.uint8)

    def close(self) -> None:
        super().close()
        for card in self.cards.values():
            card.close()


class CardShmKind(CardKind):
    """Frames over TCP, bytes out of the sender's ring, which is shared memory."""

    lane = "shm"

    def __init__(self) -> None:
        super().__init__()
        self._shared: list[Any] = []

    def ring_memory(self, num_bytes: int) -> Bytes:
        from kv_transfer.lanes.shm.shared_pool import SharedPool

        self._shared.append(SharedPool(num_bytes, is_touched=False))
        memory: Bytes = self._shared[-1].memory
        return memory

    def lanes(self, pool: Bytes, layout: KVLayout) -> Sequence[Lane]:
        from kv_transfer.lanes.shm.shm_lane import ShmLane

        return [ShmLane(layout, self._shared[-1], is_ring=True)]


class CardRdmaKind(CardKind):
    """Frames over TCP, bytes read out of the sender's ring by RDMA, which `engine` plays."""

    lane = "rdma_read"

    def __init__(self) -> None:
        super().__init__()
        self.engine = FakeEngine()
        self.made: list[RdmaReadLane] = []
        self._rings: dict[int, Pool] = {}

    def ring_memory(self, num_bytes: int) -> Bytes:
        """Return memory that can be mapped again: see `lanes.rdma.aliases`."""
        return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)

    def host_pool(self, pool: Bytes, options: NodeOptions) -> Pool:
        ring = self._rings[pool.ctypes.data] = super().host_pool(pool, options)
        return ring

    def next_engine(self) -> Engine:
        """Return that of a node that is being made."""
        return self.engine

    def lanes_of(self, pool: Bytes, options: NodeOptions) -> Sequence[Lane]:
        return [self._lane(self._rings[pool.ctypes.data], options.window_bytes)]

    def _lane(self, ring: Pool, window_bytes: int) -> RdmaReadLane:
        self.made.append(RdmaReadLane(ring, self.next_engine(), window_bytes=window_bytes))
        return self.made[-1]

    def offer(self, pool: Bytes, layout: KVLayout) -> bytes:
        """Offer a ring in which slot `i` has layer `i` of block 0."""
        num_slots = (
            max(4, layout.num_layers) * RING_WINDOWS // (RING_WINDOWS - RING_RECEIVING_WINDOWS)
        )
        memory = self.ring_memory(PoolShape.ring(layout, num_slots).num_bytes)
        ring = ring_pool(memory, layout)
        for layer in range(layout.num_layers):
            for plane, content in zip(ring.planes(layer), pool[layer], strict=True):
                plane[layer] = content[0]
        offer = self._lane(ring, memory.size).offer(Peer("", Incarnation("anyone", 1)))
        assert offer is not None
        return offer

    def source_block(self, layer: int) -> int:
        return layer

    def close(self) -> None:
        super().close()
        for lane in self.made:
            lane.close()  # Those that no connector has.


class IpcKind(CardKind):
    """Frames over TCP, bytes from card to card."""

    lane = "ipc"

    def __init__(self) -> None:
        super().__init__()
        self.offering: list[IpcLane] = []

    def lanes(self, pool: Bytes, layout: KVLayout) -> Sequence[Lane]:
        return [IpcLane(layout, self.card(pool), is_offered=True)]

    def offer(self, pool: Bytes, layout: KVLayout) -> bytes:
        self.offering.append(IpcLane(layout, self.card(pool), is_offered=True))
        self.offering[-1].attach(lambda: None)
        offer = self.offering[-1].offer(Peer("", Incarnation("anyone", 1)))
        assert offer is not None
        return offer

    def sums(self, planes: Sequence[Any], layer: int, ordinal: int) -> Sums:
        sums = np.array([[bytes_sum(np.frombuffer(one, np.uint8))] for one in planes], np.uint64)
        return placed_sums(sums, layer, as_blocks([ordinal]))

    def close(self) -> None:
        for lane in self.offering:
            lane.close()
        super().close()


def shape_of_bytes(layout: KVLayout, num_blocks: int) -> tuple[int, ...]:
    """Return `pool_shape`, or `[num_bytes]` where layers differ, as `host_pool` takes it."""
    is_equal = all(layer == layout.layers[0] for layer in layout.layers)
    return layout.pool_shape(num_blocks) if is_equal else (num_blocks * layout.block_bytes,)


def _with_lanes(kind: Kind, kv_lanes: int) -> Kind:
    kind.kv_lanes = kv_lanes
    return kind


KINDS: dict[str, Callable[[], Kind]] = {
    "loopback": LoopbackKind,
    "fake-rdma": FakeRdmaKind,
    "fake-late": FakeLateKind,
    "zmq": ZmqKind,
    "shm": ShmKind,
    "ipc": IpcKind,
    "card-zmq": CardKind,
    "card-rdma": CardRdmaKind,
    "loopback-2": lambda: _with_lanes(LoopbackKind(), 2),
    "zmq-4": lambda: _with_lanes(ZmqKind(), 4),
}
"""The suite runs over each of these."""

MORE_KINDS: dict[str, Callable[[], Kind]] = {
    "zmq-2": lambda: _with_lanes(ZmqKind(), 2),
    "shm-2": lambda: _with_lanes(ShmKind(), 2),
    "ipc-2": lambda: _with_lanes(IpcKind(), 2),
    "card-shm": CardShmKind,
    "card-zmq-2": lambda: _with_lanes(CardKind(), 2),
}
"""Single tests name these."""
