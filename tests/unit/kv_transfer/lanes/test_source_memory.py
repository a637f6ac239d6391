"""What is sent from beside a pool: where its blocks are, and what is refused."""

from __future__ import annotations

import dataclasses

import msgpack  # type: ignore[import-untyped]
import numpy as np
import pytest

from common.errors import PeerProtocolError
from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from kv_transfer.lanes.pool_memory import SourceMemory, host_pool
from kv_transfer.lanes.shm.shared_pool import SharedPool
from kv_transfer.lanes.shm.shm_lane import ShmLane
from kv_transfer.receiving.effects import Write
from kv_transfer.shared.block_arrays import as_blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.wire.frames import Data
from tests.support.kv.kv_cluster import LAYOUT

PEER = Peer("", Incarnation("anyone", 1))


def pool_of(num_blocks: int, layout: KVLayout = LAYOUT) -> np.ndarray:
    return np.zeros(num_blocks * layout.block_bytes, np.uint8)


def chunk_of(*blocks: int) -> LayerChunk:
    return LayerChunk(1, as_blocks(range(len(blocks))), as_blocks(blocks))


def test_a_chunk_is_in_one_of_two_memories() -> None:
    pool, host = host_pool(pool_of(4), LAYOUT), host_pool(pool_of(3), LAYOUT)
    memory = SourceMemory(pool, host)
    assert (memory.num_blocks, memory.num_pool_blocks, memory.num_host_blocks) == (7, 4, 3)
    for blocks, wanted, numbers in (((0, 3), pool, [0, 3]), ((4, 6), host, [0, 2])):
        chunk = chunk_of(*blocks)
        found, placed = memory.place(chunk)
        assert found is wanted
        assert placed.source_blocks.tolist() == numbers
        assert (placed.layer, placed.ordinals.tolist()) == (1, [0, 1])


def test_without_other_memory_all_blocks_are_the_pools() -> None:
    pool = host_pool(pool_of(4), LAYOUT)
    memory = SourceMemory(pool)
    chunk = chunk_of(1, 2)
    assert memory.place(chunk) == (pool, chunk)
    assert memory.num_blocks == 4


def test_blocks_of_two_layouts_are_not_sent_as_those_of_one_pool() -> None:
    other = dataclasses.replace(LAYOUT, block_size=8)
    pool, host = host_pool(pool_of(4), LAYOUT), host_pool(pool_of(4, other), other)
    with pytest.raises(ValueError, match="two layouts"):
        SourceMemory(pool, host)


def write_of(*blocks: int) -> Write:
    ordinals = tuple(range(len(blocks)))
    data = Data(0, 101, 7, 0, ordinals, (), blocks, b"", False)
    return Write(b"s", "shm", "off", data, as_blocks([0] * len(blocks)))


def test_a_receiver_maps_both_and_refuses_a_frame_of_both() -> None:
    shared, beside = (SharedPool(n * LAYOUT.block_bytes, is_touched=False) for n in (4, 3))
    shared.memory[:], beside.memory[:] = 1, 2
    sender, receiver = ShmLane(LAYOUT, shared, beside), ShmLane(LAYOUT)
    offer = sender.offer(PEER)
    assert offer is not None
    assert receiver.open(b"s", offer) == b""
    pool = host_pool(pool_of(1), LAYOUT)
    for block, byte in ((3, 1), (4, 2), (6, 2)):
        receiver.copy(write_of(block), [], pool)
        assert (pool.planes(0)[0] == byte).all()
    for blocks, why in (((3, 4), "wanted those of one memory"), ((7,), "has 4, and 3 beside it")):
        with pytest.raises(PeerProtocolError, match=why):
            receiver.copy(write_of(*blocks), [], pool)
    receiver.close()


def test_without_other_memory_an_offer_is_what_earlier_releases_take() -> None:
    shared = SharedPool(4 * LAYOUT.block_bytes, is_touched=False)
    assert ShmLane(LAYOUT, shared).offer(PEER) == shared.offer(4)


@pytest.mark.parametrize(
    "offer",
    [
        [],
        [b"x"],
        [b"x", b"y", b"z"],
        [b"x", 3],
        [[b"x"]],
        {"a": 1},
        b"x",
    ],
    ids=repr,
)
def test_any_other_offer_is_passed_over(offer: object) -> None:
    assert ShmLane(LAYOUT).open(b"s", msgpack.packb(offer)) is None


def test_one_lying_offer_of_two_is_passed_over_and_nothing_stays_mapped() -> None:
    shared = SharedPool(4 * LAYOUT.block_bytes, is_touched=False)
    lie = msgpack.unpackb(shared.offer(4))
    lie[3] = b"n" * len(lie[3])
    receiver = ShmLane(LAYOUT)
    offer = msgpack.packb([shared.offer(4), msgpack.packb(lie)])
    assert receiver.open(b"s", offer) is None
    with pytest.raises(PeerProtocolError, match="without shared memory"):
        receiver.copy(write_of(0), [], host_pool(pool_of(1), LAYOUT))
