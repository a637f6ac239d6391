"""Pinned buffers are used again, and not kept without a bound."""

from __future__ import annotations

from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice  # isort: skip

import pytest

from engine.runner.gpu.cache import pinned
from engine.runner.gpu.cache.pinned import PinnedBuffers
from engine.runner.gpu.cuda_driver import Memory


class CountingDevice(InterpretedDevice):
    """Counts the pinned memory that is allocated and not freed."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned_bytes = 0

    def allocate_pinned(self, num_bytes: int) -> Memory:
        self.pinned_bytes += num_bytes
        made = super().allocate_pinned(num_bytes)

        def free() -> None:
            self.pinned_bytes -= num_bytes

        return Memory(made.address, num_bytes, free, made.host)


def test_buffers_are_used_again_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned, "MOST_FREE_BYTES", 4096)
    device: Any = CountingDevice()
    buffers = PinnedBuffers(device)
    for size in (1000, 1024, 600):
        buffers.give_back(buffers.take(size))
    assert device.pinned_bytes == 1024
    held = [buffers.take(size) for size in (1024, 2048, 2048, 4096)]
    assert device.pinned_bytes == 1024 + 2048 + 2048 + 4096
    for buffer in held:
        buffers.give_back(buffer)
    assert device.pinned_bytes == 1024 + 2048


def test_small_buffers_are_kept_beside_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each copy of few bytes would pin memory of its own while swaps have filled the rest."""
    monkeypatch.setattr(pinned, "MOST_FREE_BYTES", 4096)
    device: Any = CountingDevice()
    buffers = PinnedBuffers(device)
    for held in [[buffers.take(2048), buffers.take(2048)], [buffers.take(64)]]:
        for buffer in held:
            buffers.give_back(buffer)
    before = device.pinned_bytes
    assert before == 2048 + 64
    assert buffers.take(50).memory.num_bytes == 64
    assert device.pinned_bytes == before
