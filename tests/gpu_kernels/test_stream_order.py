"""Copies of a cache beside steps, on a card that runs nothing that need not have run.

What they read was written by a step that is still queued, and what they write over is read by one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.late_device import LateDevice, LateKernel  # isort: skip

import numpy as np
import pytest

from engine.runner.gpu.cache.pool import GpuCache
from engine.runner.gpu.cuda_driver import GpuError
from tests.gpu_kernels.small_cache import LAYOUT, NUM_BLOCKS, content
from tests.support.engine.fake_card import bytes_sum
from tests.support.engine.moved_blocks import new_ring

STEPS = 1
"""The stream of the steps."""
OLD, STEP, NEW = 1, 2, 3
"""Values of bytes: before the step, those that it writes, and those of a copy."""
BLOCKS = np.array([5, 3])
SLOTS = np.array([0, 2])
NUM_SLOTS = 4


@pytest.fixture(params=["lazy", "seed 1", "seed 2"])
def device(request: pytest.FixtureRequest) -> LateDevice:
    _, _, seed = request.param.partition(" ")
    return LateDevice(seed=int(seed) if seed else None)


def cache_on(device: Any) -> GpuCache:
    """A cache whose bytes are all OLD."""
    cache = GpuCache(
        device, lambda spec: LateKernel(device, spec), STEPS, LAYOUT,
        NUM_BLOCKS * LAYOUT.block_bytes,
    )  # fmt: skip
    device.synchronize_all()
    content(cache)[:] = OLD
    return cache


@pytest.fixture
def cache(device: LateDevice) -> GpuCache:
    return cache_on(device)


def write(device: LateDevice, cache: GpuCache, layer: int) -> None:
    """Queue what a step does in a layer: it writes the blocks."""
    pieces = content(cache)[layer]
    for plane in pieces:
        for block in BLOCKS:
            piece = plane[block]
            device.fill(piece.ctypes.data, STEP, piece.nbytes, STEPS)


def run_step(
    device: LateDevice, cache: GpuCache, on_layer: Callable[[int], None] | None = None
) -> None:
    """Queue a step that writes the blocks in all layers."""
    out = cache.layers_out(BLOCKS * LAYOUT.block_size, on_layer)
    for layer in range(LAYOUT.num_layers):
        write(device, cache, layer)
        out.on_computed(layer)
    out.finish()


def ignored(_: int) -> None:
    """Take a layer that can be sent."""


@pytest.mark.parametrize("on_layer", [ignored, None], ids=["told", "untold"])
def test_sums_are_of_what_the_step_wrote(
    device: LateDevice, cache: GpuCache, on_layer: Callable[[int], None] | None
) -> None:
    run_step(device, cache, on_layer)
    for layer in range(LAYOUT.num_layers):
        found = cache.card_pool.begin_sums(layer, BLOCKS).wait()
        written = np.full(LAYOUT.piece_bytes, STEP, np.uint8)
        assert found is not None
        assert (found == np.uint64(bytes_sum(written))).all()


def refuse_to_pin(*_: object) -> NoReturn:
    raise GpuError("cuMemHostRegister_v2: not supported (801)")


def ring_of(cache: GpuCache) -> np.ndarray:
    memory = new_ring(LAYOUT, NUM_SLOTS)
    cache.card_pool.use_ring(memory)
    return memory.reshape(2, NUM_SLOTS, -1)


@pytest.fixture(params=["pinned", "buffers"])
def ring(
    request: pytest.FixtureRequest, cache: GpuCache, monkeypatch: pytest.MonkeyPatch
) -> np.ndarray:
    """The slots of the cache's ring, uint8 `[2, slots, piece_bytes]`."""
    if request.param == "buffers":
        monkeypatch.setattr(LateDevice, "register", refuse_to_pin)
    return ring_of(cache)


@pytest.mark.parametrize("on_layer", [ignored, None], ids=["told", "untold"])
def test_a_ring_gets_what_the_step_wrote(
    device: LateDevice,
    cache: GpuCache,
    ring: np.ndarray,
    on_layer: Callable[[int], None] | None,
) -> None:
    run_step(device, cache, on_layer)
    for layer in range(LAYOUT.num_layers):
        ring[:] = OLD
        cache.card_pool.begin_out(layer, BLOCKS, SLOTS).wait()
        assert (ring[:, SLOTS] == STEP).all()


def test_what_comes_from_a_ring_is_not_lost_to_a_step_before(
    device: LateDevice, cache: GpuCache, ring: np.ndarray
) -> None:
    """The slots are free when it is over, and not before."""
    for layer in range(LAYOUT.num_layers):
        run_step(device, cache)
        ring[:] = NEW
        cache.card_pool.begin_in(layer, SLOTS, BLOCKS).wait()
        ring[:] = OLD
        device.synchronize_all()
        assert (content(cache)[layer][:, BLOCKS] == NEW).all()


def opened_by(cache: GpuCache, other: GpuCache) -> Any:
    descriptor = other.card_pool.export()
    opened = cache.card_pool.open(descriptor, other.card_pool.shared_bytes, NUM_BLOCKS)
    os.close(descriptor)
    return opened


@pytest.mark.parametrize("is_summed", [True, False])
def test_what_comes_from_another_cache_is_not_lost_to_a_step_before(
    device: LateDevice, cache: GpuCache, is_summed: bool
) -> None:
    """Also where only the first copy of a landing waits for the steps."""
    other = cache_on(LateDevice())
    content(other)[:] = NEW
    opened = opened_by(cache, other)
    run_step(device, cache)
    copies = [
        cache.card_pool.begin_copy(
            opened, layer, BLOCKS, BLOCKS, queue=0, is_behind_steps=layer == 0, is_summed=is_summed
        )
        for layer in range(LAYOUT.num_layers)
    ]
    for layer, copy in enumerate(copies):
        sums = copy.wait()
        assert (content(cache)[layer][:, BLOCKS] == NEW).all()
        assert (sums is not None) == is_summed
        device.synchronize(STEPS)
        assert (content(cache)[layer][:, BLOCKS] == NEW).all()
    opened.close()


@pytest.mark.parametrize("is_out", [True, False], ids=["out", "in"])
def test_blocks_are_swapped_behind_the_steps(
    device: LateDevice, cache: GpuCache, is_out: bool
) -> None:
    host = np.full((LAYOUT.num_layers, 2, NUM_SLOTS, LAYOUT.piece_bytes), NEW, np.uint8)
    run_step(device, cache)
    copy = cache.begin_copy(BLOCKS.tolist(), host, SLOTS.tolist(), is_out=is_out)
    while not copy.is_done():
        pass
    if is_out:
        assert (host[:, :, SLOTS] == STEP).all()
        return
    assert (content(cache)[:, :, BLOCKS] == NEW).all()
    device.synchronize_all()
    assert (content(cache)[:, :, BLOCKS] == NEW).all()


def begin_sums(cache: GpuCache) -> None:
    cache.card_pool.begin_sums(0, BLOCKS)


def begin_out(cache: GpuCache) -> None:
    ring_of(cache)
    cache.card_pool.begin_out(0, BLOCKS, SLOTS)


def begin_in(cache: GpuCache) -> None:
    ring_of(cache)
    cache.card_pool.begin_in(0, SLOTS, BLOCKS)


def begin_swap(cache: GpuCache) -> None:
    host = np.zeros((LAYOUT.num_layers, 2, NUM_SLOTS, LAYOUT.piece_bytes), np.uint8)
    cache.begin_copy(BLOCKS.tolist(), host, SLOTS.tolist(), is_out=True)


def begin_copy(cache: GpuCache) -> None:
    cache.card_pool.begin_copy(
        opened_by(cache, cache_on(LateDevice())), 0, BLOCKS, BLOCKS, queue=3,
        is_behind_steps=False, is_summed=True,
    )  # fmt: skip


KINDS = [begin_sums, begin_out, begin_in, begin_swap, begin_copy]


@pytest.mark.parametrize("begin", KINDS)
@pytest.mark.parametrize("way", ["close", "move"])
def test_memory_is_there_until_the_copies_have_ended(
    begin: Callable[[GpuCache], None], way: str
) -> None:
    device = LateDevice()
    cache = cache_on(device)
    begin(cache)
    assert device.num_queued > device.num_done
    if way == "close":
        cache.close()
        assert device.call.live["mappings"] == int(begin is begin_copy)
    else:
        cache.allocate(2 * LAYOUT.block_bytes)
    assert device.faults == []


def test_a_cache_that_was_opened_is_there_until_the_copies_have_ended() -> None:
    device = LateDevice()
    cache = cache_on(device)
    opened = opened_by(cache, cache_on(LateDevice()))
    for queue in range(2):
        cache.card_pool.begin_copy(
            opened, 0, BLOCKS, BLOCKS, queue=queue, is_behind_steps=True, is_summed=False
        )
    write(device, cache, 0)  # a step behind the copies, which it need not wait for
    opened.close()
    assert device.num_queued > device.num_done
    assert device.faults == []
