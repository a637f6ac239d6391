"""What touches the same bytes is ordered; where an order is left out, it is found."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted_runner import on_card, put_interpreter_in_place  # isort: skip
from tests.gpu_kernels.ordered_device import (  # isort: skip
    OrderedCard,
    OrderedDevice,
    OrderedEvent,
    OrderedKernel,
)

import numpy as np
import pytest

from engine.core.step.step_batch import batch_of
from engine.runner.gpu.cache.layer_ends import LayerEnds
from engine.runner.gpu.cache.pool import GpuCache
from engine.runner.gpu.cuda_driver import Memory
from engine.runner.gpu.steps.staging import Staging
from tests.gpu_kernels.checked_launch import MemoryFault
from tests.gpu_kernels.small_cache import LAYOUT, NUM_BLOCKS, content
from tests.gpu_kernels.stepped_node import DRAWN, FILTERED, GREEDY, PENALISED, Node
from tests.support.engine.moved_blocks import new_ring
from tests.support.models.running import logits_of, scheduled
from tests.support.models.tiny_checkpoints import prompt_of

HERE, THERE = 5, 6
STEPS = 1
"""The stream of the steps."""
BLOCKS, SLOTS, NUM_SLOTS = np.array([5, 3]), np.array([0, 2]), 4


@pytest.fixture
def device() -> OrderedDevice:
    return OrderedDevice()


@pytest.fixture
def memory(device: OrderedDevice) -> Memory:
    return device.allocate(256)


def test_two_streams_that_nothing_orders(device: OrderedDevice, memory: Memory) -> None:
    device.fill(memory.address, 1, 32, HERE)
    device.fill(memory.address + 32, 1, 32, THERE)  # other bytes
    for queue in (
        lambda: device.fill(memory.address + 16, 1, 8, THERE),
        lambda: device.copy(memory.address + 128, memory.address + 31, 1, THERE),
        lambda: device.download(memory.address, 1),
    ):
        with pytest.raises(MemoryFault, match="a fill on stream 5, and nothing orders them"):
            queue()
    assert len(device.faults) == 3


def test_what_an_event_a_wait_or_the_stream_itself_orders(
    device: OrderedDevice, memory: Memory
) -> None:
    event = device.event()
    for stream in (HERE, HERE):
        device.fill(memory.address, 1, 32, stream)
    event.record(HERE)
    event.delay(THERE)
    device.copy(memory.address + 64, memory.address, 32, THERE)
    with pytest.raises(MemoryFault, match="a fill on stream 5 writes bytes of a copy on stream 6"):
        device.fill(memory.address, 2, 32, HERE)
    device.synchronize(THERE)  # by the host, which queues all that follows
    device.fill(memory.address, 2, 32, HERE)
    device.synchronize_all()
    assert device.download(memory.address, 2) == b"\2\2"


def test_an_event_is_of_the_time_at_which_it_was_recorded(
    device: OrderedDevice, memory: Memory
) -> None:
    event = device.event()
    event.record(HERE)
    device.fill(memory.address, 1, 32, HERE)
    event.delay(THERE)
    with pytest.raises(MemoryFault):
        device.fill(memory.address, 1, 32, THERE)


def test_reads_need_no_order_and_a_write_behind_them_does(
    device: OrderedDevice, memory: Memory
) -> None:
    for stream, place in ((HERE, 64), (THERE, 128)):
        device.copy(memory.address + place, memory.address, 32, stream)
    with pytest.raises(MemoryFault, match="of a copy on stream 6"):
        device.fill(memory.address, 1, 1, HERE)


def test_the_host_uses_pinned_memory_when_the_card_does_not(
    device: OrderedDevice, memory: Memory
) -> None:
    pinned = device.allocate_pinned(64)
    view = pinned.host_bytes().view(np.int32)
    view[:4] = 1
    device.copy(memory.address, pinned.address, 32, HERE)
    view[8:] = 2
    with pytest.raises(MemoryFault, match="the host writes bytes of a copy on stream 5"):
        view[7] = 2
    device.synchronize(HERE)
    view[7] = 2
    device.copy(pinned.address, memory.address, 32, HERE)
    for look in (lambda: view[:8].copy(), lambda: view[4:].sum(), lambda: view[0]):
        with pytest.raises(MemoryFault, match="the host reads bytes of a copy on stream 5"):
            look()
    assert view[8:].sum() == 16


def step(device: OrderedDevice, cache: GpuCache, *, is_told: bool) -> None:
    """Queue a step that writes the blocks in all layers."""
    on_layer: Callable[[int], None] = lambda _: None  # noqa: E731
    out = cache.layers_out(BLOCKS * LAYOUT.block_size, on_layer if is_told else None)
    for layer in range(LAYOUT.num_layers):
        for plane in content(cache)[layer]:
            for block in BLOCKS:
                device.fill(plane[block].ctypes.data, 1, plane[block].nbytes, STEPS)
        out.on_computed(layer)
    out.finish()


def new_cache(device: OrderedDevice) -> GpuCache:
    played: Any = device
    return GpuCache(
        played, lambda spec: OrderedKernel(device, spec), STEPS, LAYOUT,
        NUM_BLOCKS * LAYOUT.block_bytes,
    )  # fmt: skip


def blocks_leave(device: OrderedDevice, cache: GpuCache, *, is_told: bool) -> None:
    """Sum blocks behind a step, and copy them into the ring."""
    step(device, cache, is_told=is_told)
    pool = cache.card_pool
    for layer in range(LAYOUT.num_layers):
        moved: list[Any] = [pool.begin_sums(layer, BLOCKS)]
        moved.append(pool.begin_out(layer, BLOCKS, SLOTS))
        for one in moved:
            one.wait()


def blocks_come(device: OrderedDevice, cache: GpuCache) -> None:
    """Copy blocks out of another cache, and out of the ring, behind a step; then swap them."""
    peer = new_cache(device).card_pool
    descriptor = peer.export()
    opened = cache.card_pool.open(descriptor, peer.shared_bytes, NUM_BLOCKS)
    os.close(descriptor)
    step(device, cache, is_told=True)
    copies = [
        cache.card_pool.begin_copy(
            opened, layer, BLOCKS, BLOCKS, queue=2, is_behind_steps=layer == 0, is_summed=True
        )
        for layer in range(LAYOUT.num_layers)
    ]
    for copy in copies:
        copy.wait()
    step(device, cache, is_told=False)
    for layer in range(LAYOUT.num_layers):
        cache.card_pool.begin_in(layer, SLOTS, BLOCKS).wait()
    step(device, cache, is_told=True)
    host = np.zeros((LAYOUT.num_layers, 2, NUM_SLOTS, LAYOUT.piece_bytes), np.uint8)
    for is_out in (True, False):
        swap = cache.begin_copy(BLOCKS.tolist(), host, SLOTS.tolist(), is_out=is_out)
        while not swap.is_done():
            pass
    step(device, cache, is_told=True)


def moves(device: OrderedDevice) -> None:
    """Let blocks leave and come, as steps write them."""
    cache = new_cache(device)
    cache.card_pool.use_ring(new_ring(LAYOUT, NUM_SLOTS))
    for is_told in (True, False):
        blocks_leave(device, cache, is_told=is_told)
    blocks_come(device, cache)
    cache.close()


def test_blocks_move_beside_steps_in_an_order(device: OrderedDevice) -> None:
    moves(device)
    assert device.faults == []


@pytest.mark.parametrize(
    ("owner", "name"),
    [(LayerEnds, "mark"), (LayerEnds, "mark_whole"), (OrderedEvent, "delay"),
     (OrderedEvent, "wait")],
)  # fmt: skip
def test_an_order_of_moves_that_is_left_out_is_found(
    device: OrderedDevice, owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, lambda self, *_: None)
    with pytest.raises(MemoryFault):
        moves(device)


def steps(folder: Path, device: OrderedDevice, patch: pytest.MonkeyPatch) -> None:
    """Let a node go on with rows of many kinds, and bring logits to the host."""
    put_interpreter_in_place(patch, lambda: device, OrderedCard)
    runner = on_card(folder)
    node = Node(runner, goes_on=True)
    node.add(5, 5, 1, **GREEDY)
    node.add(6, 5, 2, **DRAWN, logprobs=2)
    node.add(7, 4, 3, **FILTERED, **PENALISED)
    while node.scheduler.running or node.scheduler.waiting:
        node.step()
    assert node.num_begun >= 2
    runner.execute(batch_of([scheduled(prompt_of(17), 0, [2, 3])]))
    logits_of(runner, scheduled([4], 17, [2, 3]), scheduled([4], 3, [2, 3]))


def test_steps_go_on_in_an_order(
    one_layer: Path, device: OrderedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(one_layer, device, monkeypatch)
    assert device.faults == []


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Staging, "wait"), (OrderedEvent, "wait"), (OrderedDevice, "synchronize")],
)
def test_an_order_of_steps_that_is_left_out_is_found(
    one_layer: Path, device: OrderedDevice, owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, lambda self, *_: None)
    with pytest.raises(MemoryFault):
        steps(one_layer, device, monkeypatch)
