"""Copy landed KV to the device beside running steps, through pinned memory.

A thread of its own gathers blocks from the host's mirror into pinned memory, because that takes as
long as reading them. The step thread begins each copy on a separate stream, since a process has one
current stream, and looks at the stream's events whether it is complete. It never waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import numpy as np

from engine.runner.framework import paddle

MAX_BYTES_UNDER_WAY = 256 << 20
"""The most pinned memory that gathered layers hold, unless a single one is larger."""

Submit = Callable[[Callable[[], Any]], "Future[Any]"]


class DeviceSide(Protocol):
    """What a copy of a layer to the device consists of."""

    def gather(self, layer: int, block_ids: np.ndarray) -> Any:
        """Return a layer of these blocks in pinned memory. Called on another thread."""

    def begin(self, layer: int, block_ids: np.ndarray, gathered: Any) -> Callable[[], bool]:
        """Begin to copy a layer to the device; return what tells whether the copy is complete."""


class LandingCopy:
    """A copy of landed blocks, all layers."""

    def __init__(self, owner: LandingsIn, num_layers: int) -> None:
        self._owner = owner
        self.num_layers_left = num_layers

    def is_done(self) -> bool:
        """Advance all copies without waiting; return whether steps can read these blocks."""
        self._owner.advance()
        return self.num_layers_left == 0


class LandingsIn:
    """Copies landings one after the other, layer by layer. The step thread owns it.

    `block_bytes` is the size of a block in one layer. `submit` starts a gathering (None: on a
    thread).
    """

    def __init__(
        self,
        device: DeviceSide,
        *,
        num_layers: int,
        block_bytes: int,
        submit: Submit | None = None,
    ) -> None:
        self._device = device
        self._num_layers, self._block_bytes = num_layers, block_bytes
        self._submit = submit or _thread()
        self._waiting: deque[tuple[LandingCopy, int, np.ndarray]] = deque()
        self._gathering: deque[tuple[LandingCopy, int, np.ndarray, Future[Any]]] = deque()
        self._copying: deque[tuple[LandingCopy, int, Callable[[], bool]]] = deque()
        self._bytes_under_way = 0

    def begin(self, block_ids: Sequence[int]) -> LandingCopy:
        """Begin to copy these blocks."""
        ids = np.asarray(block_ids)
        copy = LandingCopy(self, self._num_layers)
        self._waiting += [(copy, layer, ids) for layer in range(self._num_layers)]
        self.advance()
        return copy

    def advance(self) -> None:
        """Do what can be done without waiting. Raises what a gathering thread raised."""
        while self._copying and self._copying[0][2]():
            copy, size, _ = self._copying.popleft()
            copy.num_layers_left -= 1
            self._bytes_under_way -= size
        while self._gathering and self._gathering[0][3].done():
            copy, layer, ids, future = self._gathering.popleft()
            is_complete = self._device.begin(layer, ids, future.result())
            self._copying.append((copy, len(ids) * self._block_bytes, is_complete))
        while self._waiting:
            size = len(self._waiting[0][2]) * self._block_bytes
            if self._bytes_under_way and self._bytes_under_way + size > MAX_BYTES_UNDER_WAY:
                return
            copy, layer, ids = self._waiting.popleft()
            self._bytes_under_way += size
            future = self._submit(partial(self._device.gather, layer, ids))
            self._gathering.append((copy, layer, ids, future))


class GpuSide:
    """The `DeviceSide` of a GPU. `layer` returns a layer's keys and values in the cache."""

    def __init__(
        self,
        layer: Callable[[int], Sequence[paddle.Tensor]],
        mirror: np.ndarray,
        dtype: str,
    ) -> None:
        self._layer, self._mirror, self._dtype = layer, mirror, dtype
        self._stream = paddle.device.Stream()

    def gather(self, layer: int, block_ids: np.ndarray) -> list[paddle.Tensor]:
        parts = [block_ids, *(part[block_ids] for part in self._mirror[layer])]
        return [paddle.to_tensor(part, place=paddle.CUDAPinnedPlace()) for part in parts]

    def begin(
        self, layer: int, block_ids: np.ndarray, gathered: list[paddle.Tensor]
    ) -> Callable[[], bool]:
        # Behind the steps that used these blocks before.
        self._stream.wait_event(paddle.device.current_stream().record_event())
        with paddle.no_grad(), paddle.device.stream_guard(self._stream):
            places, *pieces = (pinned.cuda(blocking=False) for pinned in gathered)
            for target, piece in zip(self._layer(layer), pieces, strict=True):
                shape = [len(block_ids), *target.shape[1:]]
                target[places] = piece.view(self._dtype).reshape(shape)
            done = self._stream.record_event()
        kept = [gathered, places, pieces]

        def is_complete() -> bool:
            if not done.query():
                return False
            kept.clear()  # not before: their memory would be reused under the copy
            return True

        return is_complete


def _thread() -> Submit:
    return ThreadPoolExecutor(1, "pdserve-landings").submit
