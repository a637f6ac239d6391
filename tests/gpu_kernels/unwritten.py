"""A card whose memory holds what a test says, wherever nobody has written.

Fresh memory does, and what a step leaves in its buffers does when the next one begins: a step needs
nothing of the one before but the tokens that it drew, the cache, and what was sent for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.interpreted import InterpretedDevice  # isort: skip
from tests.gpu_kernels.interpreted_runner import put_interpreter_in_place  # isort: skip

import pytest

from engine.runner.gpu.decoder import GpuDecoder
from engine.runner.gpu.steps.decode_step import DecodeSteps
from engine.runner.gpu.steps.staging import Staging
from engine.runner.model_runner import ModelRunner
from tests.gpu_kernels import checked_launch
from tests.gpu_kernels.known_memory import known

OF_A_STEP = frozenset({
    "hidden", "normed", "qkv", "queries", "attended", "activated", "chosen", "logits",
    "first_pieces", "piece_sequences", "piece_starts", "piece_lasts", "piece_blocks", "totals",
    "tops", "gate_products", "experts", "expert_weights", "pairs", "tiles", "num_tiles",
    "pair_activated", "pair_results", "shared", "best_scores", "best_tokens", "counts", "weights",
    "cuts", "listed", "keys", "records",
})  # fmt: skip
"""Buffers in which nothing outlives a step; a list of pieces has the name of its window too."""


def leave(patch: pytest.MonkeyPatch, byte: int) -> None:
    """Let nodes' cards have this byte in memory that nobody has written."""
    put_interpreter_in_place(patch, lambda: InterpretedDevice(garbage=byte))
    patch.setattr(checked_launch, "off_byte", byte)

    def forget(plain: Callable[..., Any], self: Any, *given: Any) -> Any:
        for part in known.parts(OF_A_STEP):
            ctypes.memset(part.start, byte, part.end - part.start)
        return plain(self, *given)

    def wait(plain: Callable[..., None], self: Any) -> None:
        plain(self)
        self._side.pinned.host_bytes()[:] = byte

    for owner, name, call in (
        (GpuDecoder, "begin", forget), (DecodeSteps, "launch", forget), (Staging, "wait", wait),
    ):  # fmt: skip
        plain = getattr(owner, name)
        patch.setattr(owner, name, _method(partial(call, plain)))


def _method(call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *given: call(self, *given)


def leave_in_blocks(runner: ModelRunner, byte: int) -> None:
    """Write this byte into all blocks of a runner's cache."""
    cache: Any = runner.cache
    ctypes.memset(cache.pool.address, byte, cache.num_blocks * cache.layout.block_bytes)
