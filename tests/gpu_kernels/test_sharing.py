"""Caches on cards that share their memory: sums of the kernel, handoffs, and what is refused."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Callable, Iterator
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import (  # isort: skip
    InterpretedDevice,
    InterpretedEvent,
    InterpretedKernel,
)

import numpy as np
import pytest

from common.errors import HandoffFailed
from common.ids import AttemptId, Incarnation
from engine.runner.gpu.cache.pool import GpuCache
from engine.runner.gpu.cuda_driver import GpuError
from engine.runner.gpu.shareable import allocate_shareable, open_shareable
from kv_transfer.contract import Commit, ConnectorEvent, Landed, Ticket, TransferEnded
from kv_transfer.lanes.card_pool import CardPool
from kv_transfer.lanes.ipc.ipc_lane import IpcLane
from kv_transfer.lanes.lane import Lane
from kv_transfer.lanes.pool_memory import ring_pool
from kv_transfer.zmq.connector import ZmqConnector
from tests.gpu_kernels.small_cache import LAYOUT, NUM_BLOCKS, content
from tests.support.engine.fake_card import bytes_sum
from tests.support.engine.moved_blocks import new_ring

WAIT_S = 20.0
NUM_SLOTS = 12


def cache_on(device: Any, num_blocks: int = NUM_BLOCKS) -> GpuCache:
    return GpuCache(device, InterpretedKernel, 1, LAYOUT, num_blocks * LAYOUT.block_bytes)


def filled(device: Any, seed: int, num_blocks: int = NUM_BLOCKS) -> GpuCache:
    cache = cache_on(device, num_blocks)
    content(cache)[:] = np.random.default_rng(seed).integers(0, 256, content(cache).shape, np.uint8)
    return cache


@pytest.fixture
def device() -> InterpretedDevice:
    return InterpretedDevice()


@pytest.fixture
def cache(device: InterpretedDevice) -> GpuCache:
    return filled(device, 1)


def test_the_kernels_sums_are_those_of_numpy(cache: GpuCache) -> None:
    blocks = np.array([5, 0, 3], np.uint32)
    sums = cache.card_pool.begin_sums(1, blocks).wait()
    assert sums is not None
    wanted = [[bytes_sum(content(cache)[1, kind, block]) for block in blocks] for kind in (0, 1)]
    assert np.array_equal(sums, np.array(wanted, np.uint64))


@pytest.mark.parametrize("change", ["a bit", "two words change places", "a word of zeros moves"])
def test_a_sum_shows_what_changed(cache: GpuCache, change: str) -> None:
    piece = content(cache)[0, 1, 2].view(np.uint64)
    piece[100], piece[101] = 0, 7
    before = cache.card_pool.begin_sums(0, np.array([2])).wait()
    if change == "a bit":
        piece[-1] ^= 1 << 63
    elif change == "two words change places":
        piece[[3, 5000]] = piece[[5000, 3]]
    else:
        piece[100], piece[101] = 7, 0
    after = cache.card_pool.begin_sums(0, np.array([2])).wait()
    assert before is not None
    assert after is not None
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_what_is_sent_waits_for_the_step_that_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for one of which nobody was told: what it wrote can be found when it has returned."""
    recorded: list[InterpretedEvent] = []
    waited: list[InterpretedEvent] = []

    class RecordedEvent(InterpretedEvent):
        def record(self, stream: int) -> None:
            recorded.append(self)

        def delay(self, stream: int) -> None:
            waited.append(self)

    monkeypatch.setattr(InterpretedDevice, "event", lambda _: RecordedEvent())
    cache = cache_on(InterpretedDevice())
    told: list[int] = []
    for block, on_layer in ((1, told.append), (2, None), (3, told.append)):
        layers = cache.layers_out(np.array([block * LAYOUT.block_size + 3]), on_layer)
        for layer in range(LAYOUT.num_layers):
            layers.on_computed(layer)
        layers.finish()
    assert told == [0, 1, 0, 1]
    ends = recorded.copy()  # two layers, a whole step, two layers

    def is_behind(block: int) -> int:
        waited.clear()
        cache.card_pool.begin_sums(0, np.array([block])).wait()
        return ends.index(waited[0])

    assert [is_behind(block) for block in (2, 3)] == [2, 3]
    assert is_behind(1) == 2  # What lies behind two steps and more waits for the one before.


@pytest.mark.parametrize("is_summed", [True, False])
def test_blocks_are_copied_out_of_another_cache(
    device: InterpretedDevice, cache: GpuCache, is_summed: bool
) -> None:
    other = filled(InterpretedDevice(), 2, num_blocks=4)
    descriptor = other.card_pool.export()
    opened = cache.card_pool.open(descriptor, other.card_pool.shared_bytes, 4)
    os.close(descriptor)
    wanted = content(cache).copy()
    wanted[1][:, [6, 2]] = content(other)[1][:, [3, 0]]
    sums = cache.card_pool.begin_copy(
        opened, 1, np.array([3, 0]), np.array([6, 2]), queue=0, is_behind_steps=True,
        is_summed=is_summed,
    ).wait()  # fmt: skip
    assert np.array_equal(content(cache), wanted)
    if is_summed:
        mine = cache.card_pool.begin_sums(1, np.array([6, 2])).wait()
        assert np.array_equal(np.asarray(sums), np.asarray(mine))
    else:
        assert sums is None
    opened.close()
    assert device.call.live == {"handles": 1, "addresses": 1, "mappings": 1}


def test_memory_outlives_its_maker(cache: GpuCache) -> None:
    maker = InterpretedDevice()
    other = filled(maker, 2)
    wanted = content(other)[:, :, 4].copy()
    descriptor = other.card_pool.export()
    opened = cache.card_pool.open(descriptor, other.card_pool.shared_bytes, NUM_BLOCKS)
    os.close(descriptor)
    other.allocate(3 * LAYOUT.block_bytes)
    assert maker.call.live == {"handles": 1, "addresses": 1, "mappings": 1}
    for layer in range(LAYOUT.num_layers):
        cache.card_pool.begin_copy(
            opened, layer, np.array([4]), np.array([1]), queue=0, is_behind_steps=False,
            is_summed=False,
        ).wait()  # fmt: skip
    assert np.array_equal(content(cache)[:, :, 1], wanted)
    opened.close()


STEPS = ("cuMemAddressReserve", "cuMemMap", "cuMemSetAccess")


@pytest.mark.parametrize("failing", ["cuMemCreate", *STEPS])
def test_nothing_is_left_of_memory_that_cannot_be_made(
    device: InterpretedDevice, failing: str
) -> None:
    device.call.failing.add(failing)
    with pytest.raises(GpuError, match=failing):
        allocate_shareable(device, 100)  # type: ignore[arg-type]
    assert set(device.call.live.values()) == {0}


@pytest.mark.parametrize(
    "failing",
    ["cuMemImportFromShareableHandle", "cuMemGetAllocationPropertiesFromHandle", *STEPS],
)
def test_nothing_is_left_of_memory_that_cannot_be_opened(
    device: InterpretedDevice, failing: str
) -> None:
    memory = allocate_shareable(device, 100)  # type: ignore[arg-type]
    with _closing(memory.export()) as descriptor:
        other = InterpretedDevice()
        other.call.failing.add(failing)
        with pytest.raises(GpuError, match=failing):
            open_shareable(other, descriptor, memory.num_bytes)  # type: ignore[arg-type]
        assert set(other.call.live.values()) == {0}


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    yield descriptor
    os.close(descriptor)


def far_card(device: InterpretedDevice) -> None:
    device.call.location, device.call.can_read_peers = (1, 3), False


def hosts_memory(device: InterpretedDevice) -> None:
    device.call.location = (2, 0)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (far_card, "card 0 cannot read the memory of card 3"),
        (hosts_memory, "the memory is not a card's"),
    ],
)
def test_memory_that_this_card_cannot_read(
    device: InterpretedDevice,
    cache: GpuCache,
    place: Callable[[InterpretedDevice], None],
    said: str,
) -> None:
    place(device)
    other = filled(InterpretedDevice(), 2).card_pool
    with _closing(other.export()) as descriptor, pytest.raises(HandoffFailed, match=said):
        cache.card_pool.open(descriptor, 4096, 1)
    assert device.call.live["mappings"] == 1


def test_less_memory_than_was_said(cache: GpuCache) -> None:
    other = filled(InterpretedDevice(), 2, num_blocks=2)
    with _closing(other.card_pool.export()) as descriptor, pytest.raises(HandoffFailed):
        cache.card_pool.open(descriptor, 2 * other.card_pool.shared_bytes, 4)


def test_a_peer_that_can_be_read(device: InterpretedDevice, cache: GpuCache) -> None:
    device.call.location = (1, 3)
    other = filled(InterpretedDevice(), 2)
    with _closing(other.card_pool.export()) as descriptor:
        opened = cache.card_pool.open(descriptor, other.card_pool.shared_bytes, NUM_BLOCKS)
    opened.close()


def test_a_driver_without_shareable_memory(caplog: pytest.LogCaptureFixture) -> None:
    device = InterpretedDevice()
    device.call.failing.add("cuMemCreate")
    cache = cache_on(device)
    assert "other processes cannot map the KV cache" in caplog.text
    with pytest.raises(HandoffFailed, match="cannot be shared"):
        cache.card_pool.export()


def test_a_cache_that_moves_gives_its_memory_back(
    device: InterpretedDevice, cache: GpuCache
) -> None:
    cache.allocate(3 * LAYOUT.block_bytes)
    assert cache.card_pool.num_blocks == 3
    assert device.call.live == {"handles": 1, "addresses": 1, "mappings": 1}


class Node:
    """A connector of a cache on an interpreted card."""

    def __init__(self, name: str, seed: int, lane: str) -> None:
        self.incarnation = Incarnation(name, 1)
        self.cache = filled(InterpretedDevice(), seed)
        self.events: queue.Queue[ConnectorEvent] = queue.Queue()
        card: CardPool = self.cache.card_pool
        lanes: list[Lane] = [IpcLane(LAYOUT, card, is_offered=True)] if lane == "ipc" else []
        ring = ring_pool(new_ring(LAYOUT, NUM_SLOTS), LAYOUT)
        self.connector = ZmqConnector(
            ring, LAYOUT, self.incarnation, self.events.put,
            lanes=lanes, card=card,
        )  # fmt: skip


@pytest.mark.parametrize("lane", ["ipc", "zmq"])
def test_a_handoff_from_card_to_card(lane: str) -> None:
    """Over its own lane, and over one of the host through rings of few slots."""
    with contextlib.ExitStack() as at_end:
        prefill, decode = Node("p", 1, lane), Node("d", 2, lane)
        for node in (prefill, decode):
            at_end.callback(node.connector.close)
        ticket = Ticket(
            attempt=AttemptId("r", 0), decode_node=decode.incarnation,
            kv_endpoint=decode.connector.endpoint, lease_token=5, generation=1,
            target_block_ids=(4, 1, 6), num_cached_tokens=0, fingerprint=LAYOUT.fingerprint,
            lease_s=30.0,
        )  # fmt: skip
        wanted = content(decode.cache).copy()
        wanted[:, :, [4, 1, 6]] = content(prefill.cache)[:, :, [2, 5, 3]]
        decode.connector.expect(ticket, sender_deadline_s=30)
        prefill.connector.open(ticket, deadline_s=30)
        for layer in range(LAYOUT.num_layers):
            prefill.connector.push(5, layer=layer, ordinals=[0, 1, 2], source_blocks=[2, 5, 3])
        prefill.connector.commit(5, Commit(num_tokens=3 * LAYOUT.block_size, first_token_id=1))
        assert isinstance(decode.events.get(timeout=WAIT_S), Landed)
        assert prefill.events.get(timeout=WAIT_S) == TransferEnded(5, None)
        assert list(prefill.connector.statistics().lanes.values()) == [lane]
        assert np.array_equal(content(decode.cache), wanted)
