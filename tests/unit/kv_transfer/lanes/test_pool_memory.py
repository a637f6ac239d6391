"""A pool is memory at an address: of the host, whose bytes are read, or of a device."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from common.ids import Incarnation
from common.kv.kv_layout import KVLayout, Layer, LayerShape
from kv_transfer.lanes.inline_lane import InlineLane
from kv_transfer.lanes.pieces import PieceRows
from kv_transfer.lanes.pool_memory import Pool, as_pool, host_pool, ring_pool
from kv_transfer.lanes.rdma.rdma_lane import RdmaLane
from kv_transfer.shared.block_arrays import as_blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.limits import Limits
from kv_transfer.shared.pool_shape import PoolShape
from tests.support.engine.device_memory import DeviceMemory
from tests.support.kv.fake_engine import FakeEngine

NUM_BLOCKS = 8
SHAPE = PoolShape((Layer(2, 1, 64), Layer(1, 3, 32)), NUM_BLOCKS)
LAYOUT = KVLayout.of_layers(
    (LayerShape(2, 1, 4), LayerShape(1, 3, 2)), model_digest="m", block_size=4, dtype="float32"
)
PEER = Peer("tcp://there:1", Incarnation("d", 1))


def test_planes_are_views_at_their_addresses() -> None:
    memory = np.arange(SHAPE.num_bytes, dtype=np.uint32).astype(np.uint8)
    pool = host_pool(memory, LAYOUT)
    assert pool.shape == SHAPE
    starts = [0, 64 * NUM_BLOCKS, 128 * NUM_BLOCKS]
    views = [plane for layer in range(2) for plane in pool.planes(layer)]
    addresses = np.concatenate([pool.addresses(layer) for layer in range(2)])
    for start, view, address in zip(starts, views, addresses.tolist(), strict=True):
        assert address == view.ctypes.data == memory.ctypes.data + start
        assert np.shares_memory(view, memory)
    assert [view.shape for view in views] == [(8, 64), (8, 64), (8, 96)]


def test_layers_of_a_kind_share_the_slots_of_a_ring() -> None:
    layers = (LayerShape(2, 1, 4), LayerShape(1, 3, 2), LayerShape(2, 1, 4))
    layout = KVLayout.of_layers(layers, model_digest="m", block_size=4, dtype="float32")
    memory = np.zeros(5 * (128 + 96), np.uint8)
    ring = ring_pool(memory, layout)
    assert (ring.num_blocks, ring.shape.num_bytes) == (5, memory.size)
    starts = [
        (ring.addresses(layer) - np.uint64(memory.ctypes.data)).tolist() for layer in range(3)
    ]
    assert starts == [[0, 5 * 64], [5 * 128], [0, 5 * 64]]
    ring.planes(0)[1][4] = 1
    assert ring.planes(2)[1][4].all()
    assert not ring.planes(1)[0].any()


@pytest.mark.parametrize("memory", [np.zeros(225, np.uint8), np.zeros(0, np.uint8)])
def test_what_is_no_ring_of_the_layout_is_refused(memory: np.ndarray) -> None:
    with pytest.raises(ValueError, match="KV pool of"):
        ring_pool(memory, LAYOUT)


@pytest.mark.parametrize("window_bytes", [36 * 64, 1 << 20, 32 << 20])
def test_what_a_ring_has_for_receiving_takes_any_frame(window_bytes: int) -> None:
    """A frame of the layer with the smallest blocks too, which has most of them."""
    shapes = (LayerShape(1, 36, 4), LayerShape(1, 1, 4))
    layout = KVLayout.of_layers(shapes, model_digest="m", block_size=4, dtype="float32")
    limits = Limits(window_bytes=window_bytes)
    num_receiving = limits.ring_slots(layout) // 4
    for layer in layout.layers:
        assert num_receiving * layer.num_bytes >= max(window_bytes, limits.max_frame_bytes)


@pytest.mark.parametrize(
    "memory",
    [
        np.zeros(SHAPE.num_bytes + 1, np.uint8),
        np.zeros(0, np.uint8),
        np.zeros(SHAPE.num_bytes, np.int8),
        np.zeros(2 * SHAPE.num_bytes, np.uint8)[::2],
    ],
    ids=["a byte too many", "nothing", "signed", "with gaps"],
)
def test_what_is_no_pool_of_the_layout_is_named(memory: np.ndarray) -> None:
    with pytest.raises(ValueError, match="wanted contiguous uint8, whole blocks of 224 bytes"):
        host_pool(memory, LAYOUT)


def test_bytes_in_the_shape_of_another_layout_are_refused() -> None:
    usual = KVLayout(
        model_digest="m", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32"
    )
    memory = np.zeros(usual.pool_shape(4), np.uint8)
    assert host_pool(memory, usual).num_blocks == 4
    with pytest.raises(ValueError, match="KV pool is uint8"):
        host_pool(memory.reshape(2, 3, 4, -1), usual)
    with pytest.raises(ValueError, match="the KV pool is of another layout: wanted"):
        as_pool(host_pool(memory, usual), LAYOUT)


def test_memory_of_another_size_is_no_pool() -> None:
    with pytest.raises(ValueError, match="KV pool of 1791 bytes: wanted 1792"):
        Pool(SHAPE, DeviceMemory(SHAPE.num_bytes - 1))


def test_what_copies_with_the_processor_refuses_the_memory_of_a_device() -> None:
    pool = Pool(SHAPE, DeviceMemory(SHAPE.num_bytes))
    with pytest.raises(ValueError, match="lane zmq wants a KV pool in host memory"):
        InlineLane("zmq", pool, Limits())
    blocks = as_blocks([0])
    with pytest.raises(ValueError, match="in host memory"):
        PieceRows().sums(pool, 0, blocks, blocks)
    with pytest.raises(ValueError, match="in host memory"):
        pool.planes(0)


def test_the_memory_of_a_device_is_registered_written_and_fenced_like_the_hosts() -> None:
    engine, changed = FakeEngine(), threading.Event()
    source, target = (DeviceMemory(SHAPE.num_bytes) for _ in range(2))
    source.content[:] = np.random.default_rng(1).integers(0, 256, SHAPE.num_bytes, np.uint8)
    sender, receiver = (
        RdmaLane(Pool(SHAPE, memory), engine, max_slabs=2) for memory in (source, target)
    )
    sender.attach(changed.set)
    offer = sender.offer(PEER)
    assert offer is not None
    try:
        reply = receiver.open(b"session", offer)
        assert reply is not None
        for layer, blocks in ((0, [1, 2, 5]), (1, [6])):
            sender.accept(PEER, reply)
            numbers = as_blocks(blocks)
            sender.write(PEER, LayerChunk(layer, numbers, numbers), numbers)
            sender.send_after(PEER, [memoryview(b"done")])
            while not sender.take_ready():
                assert changed.wait(20)
                changed.clear()
            # The next write goes to another address of the same memory.
            reply = receiver.move(1)
            receiver.fence(1)
        wanted = np.zeros(SHAPE.num_bytes, np.uint8)
        for size, start, blocks in ((64, 0, [1, 2, 5]), (64, 512, [1, 2, 5]), (96, 1024, [6])):
            for block in blocks:
                piece = slice(start + block * size, start + (block + 1) * size)
                wanted[piece] = source.content[piece]
        assert np.array_equal(target.content, wanted)
        assert target.num_aliases == 1
    finally:
        sender.close()
        receiver.close()
    assert engine.regions == {}
