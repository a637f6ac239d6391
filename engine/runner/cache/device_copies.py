"""Copy KV blocks between a device and host memory beside running steps, through pinned memory.

A thread of its own reads and writes the host's memory: it gathers blocks into pinned memory for a
copy to the device, and scatters them from there after a copy from it. The step thread begins the
copies on a separate stream, since a process has one current stream, and looks whether they are
complete. It never waits and copies nothing itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

import numpy as np

from engine.runner.paddle_import import paddle

MAX_BYTES_UNDER_WAY = 256 << 20
"""The most pinned memory that layers under way hold, unless a single one is larger."""
_LOOK_S = 0.0002
"""How often the thread looks whether a copy from the device is complete.

Waiting for its event could hold the interpreter.
"""

Submit = Callable[[Callable[[], Any]], "Future[Any]"]
IsComplete = Callable[[], bool]


class DeviceSide(Protocol):
    """What copies of a layer consist of. `host` is `[2, blocks, piece_bytes]` of that layer.

    `begin_in` and `begin_out` queue work after the steps before and return what tells whether it
    is complete. `gather` and `scatter` are called on another thread.
    """

    def gather(self, host: np.ndarray, host_ids: np.ndarray, block_ids: np.ndarray) -> Any:
        """Return blocks of the host, and their places on the device, in pinned memory."""

    def begin_in(self, layer: int, block_ids: np.ndarray, gathered: Any) -> IsComplete:
        """Begin to copy what was gathered to blocks of the device."""

    def begin_out(
        self, layer: int, block_ids: np.ndarray, host: np.ndarray, host_ids: np.ndarray
    ) -> tuple[Any, IsComplete]:
        """Begin to copy blocks of the device; return the pinned memory where they come.

        They are to be written into blocks of the host, which may be pinned itself.
        """

    def scatter(self, pinned: Any, host: np.ndarray, host_ids: np.ndarray) -> None:
        """Write what was copied into blocks of the host."""


class BlocksCopy:
    """A copy of blocks, all layers."""

    def __init__(self, owner: DeviceCopies, num_layers: int) -> None:
        self._owner = owner
        self.num_layers_left = num_layers
        self.error: Exception | None = None

    def is_done(self, *, may_begin: bool = True) -> bool:
        """Advance all copies without waiting; return whether this one has ended.

        Raises its error when nothing of it is under way any more. With `may_begin` False nothing is
        queued on the device, so that another thread may run a step.
        """
        self._owner.advance(may_begin=may_begin)
        if self.num_layers_left:
            return False
        if self.error is not None:
            raise self.error
        return True


@dataclass(slots=True)
class _Layer:
    """A layer of a copy. `future` is the work of the thread, `is_complete` that of the device."""

    copy: BlocksCopy
    is_out: bool
    layer: int
    block_ids: np.ndarray
    host: np.ndarray
    host_ids: np.ndarray
    future: Future[Any] | None = None
    is_complete: IsComplete | None = None


class DeviceCopies:
    """Makes copies one after the other, layer by layer. The step thread owns it.

    `block_bytes` is the size of a block in each layer. `submit` starts work on the thread (None: on
    one of its own); it does one after the other, so what is scattered can be gathered after it.
    """

    def __init__(
        self, device: DeviceSide, *, block_bytes: Sequence[int], submit: Submit | None = None
    ) -> None:
        self._device = device
        self._block_bytes = block_bytes
        self._submit = submit or copying_thread()
        self._waiting: deque[_Layer] = deque()
        self._under_way: deque[_Layer] = deque()
        self._bytes_under_way = 0

    def begin(
        self,
        block_ids: Sequence[int],
        host: np.ndarray,
        host_ids: Sequence[int],
        *,
        is_out: bool,
    ) -> BlocksCopy:
        """Begin to copy blocks to or from those of `host` `[layers, 2, blocks, piece_bytes]`."""
        ours, theirs = np.asarray(block_ids), np.asarray(host_ids)
        copy = BlocksCopy(self, len(host))
        for layer, memory in enumerate(host):
            self._waiting.append(_Layer(copy, is_out, layer, ours, memory, theirs))
        self.advance()
        return copy

    def advance(self, *, may_begin: bool = True) -> None:
        """Do what can be done without waiting; without `may_begin`, only look what is complete."""
        if may_begin:
            for one in self._under_way:
                if one.future is None or not one.future.done():
                    break
                if not one.is_out and one.is_complete is None:
                    self._begin_in(one)
        while self._under_way and self._has_ended(self._under_way[0]):
            one = self._under_way.popleft()
            self._bytes_under_way -= self._size(one)
            one.copy.num_layers_left -= 1
        while may_begin and self._waiting:
            size = self._size(self._waiting[0])
            if self._bytes_under_way and self._bytes_under_way + size > MAX_BYTES_UNDER_WAY:
                return
            self._bytes_under_way += size
            one = self._waiting.popleft()
            self._under_way.append(one)
            self._begin(one)

    def _begin(self, one: _Layer) -> None:
        if one.is_out:
            try:
                one.future = begin_layer_out(
                    self._device, self._submit, one.layer, one.block_ids, one.host, one.host_ids
                )
            except Exception as error:
                _fail(one, error)
        else:
            read = partial(self._device.gather, one.host, one.host_ids, one.block_ids)
            one.future = self._submit(read)

    def _begin_in(self, one: _Layer) -> None:
        assert one.future is not None
        try:
            one.is_complete = self._device.begin_in(one.layer, one.block_ids, one.future.result())
        except Exception as error:
            _fail(one, error)

    def _has_ended(self, one: _Layer) -> bool:
        if one.future is None or not one.future.done():
            return False
        if one.is_out:
            one.copy.error = one.copy.error or _error_of(one.future)
            return True
        if one.is_complete is None:
            return False
        try:
            return one.is_complete()
        except Exception as error:  # of this copy, whichever one is being looked at
            one.copy.error = one.copy.error or error
            return True

    def _size(self, one: _Layer) -> int:
        return len(one.block_ids) * self._block_bytes[one.layer]


def _fail(one: _Layer, error: Exception) -> None:
    one.copy.error = one.copy.error or error
    one.future = Future()
    one.future.set_result(None)
    one.is_complete = lambda: True


def _error_of(future: Future[Any]) -> Exception | None:
    error = future.exception()
    if error is None or isinstance(error, Exception):
        return error
    raise error


def begin_layer_out(
    device: DeviceSide,
    submit: Submit,
    layer: int,
    block_ids: np.ndarray,
    host: np.ndarray,
    host_ids: np.ndarray,
) -> Future[Any]:
    """Begin to copy a layer of these blocks to `host_ids` of `host`, behind queued work.

    The thread that runs a step may call this. Returns the work of the copying thread.
    """
    pinned, is_complete = device.begin_out(layer, block_ids, host, host_ids)
    write = partial(device.scatter, pinned, host, host_ids)
    return submit(partial(_write_when_complete, is_complete, write))


def _write_when_complete(is_complete: IsComplete, write: Callable[[], None]) -> None:
    while not is_complete():
        time.sleep(_LOOK_S)
    write()


class GpuSide:
    """The `DeviceSide` of a GPU. `layer` returns a layer's keys and values in the cache."""

    def __init__(self, layer: Callable[[int], Sequence[paddle.Tensor]], dtype: str) -> None:
        self._layer, self._dtype = layer, dtype
        self._stream = paddle.device.Stream()

    def gather(
        self, host: np.ndarray, host_ids: np.ndarray, block_ids: np.ndarray
    ) -> list[paddle.Tensor]:
        parts = [block_ids, *(part[host_ids] for part in host)]
        return [paddle.to_tensor(part, place=paddle.CUDAPinnedPlace()) for part in parts]

    def begin_in(
        self, layer: int, block_ids: np.ndarray, gathered: list[paddle.Tensor]
    ) -> IsComplete:
        # After the steps that used these blocks before.
        self._stream.wait_event(paddle.device.current_stream().record_event())
        with paddle.no_grad(), paddle.device.stream_guard(self._stream):
            places, *pieces = (pinned.cuda(blocking=False) for pinned in gathered)
            for target, piece in zip(self._layer(layer), pieces, strict=True):
                shape = [len(block_ids), *target.shape[1:]]
                target[places] = piece.view(self._dtype).reshape(shape)
            done = self._stream.record_event()
        # Not freed before: their memory would be reused under the copy.
        return _KeptUntil(done, [gathered, places, pieces])

    def begin_out(
        self, layer: int, block_ids: np.ndarray, host: np.ndarray, host_ids: np.ndarray
    ) -> tuple[list[paddle.Tensor], IsComplete]:
        self._stream.wait_event(paddle.device.current_stream().record_event())
        with paddle.no_grad(), paddle.device.stream_guard(self._stream):
            ids = paddle.to_tensor(block_ids, place=paddle.CUDAPinnedPlace())
            places = ids.cuda(blocking=False)
            found = [part[places].view("uint8") for part in self._layer(layer)]
            pinned = [one.pin_memory(blocking=False) for one in found]
            done = self._stream.record_event()
        return pinned, _KeptUntil(done, [ids, places, found])

    def scatter(self, pinned: list[paddle.Tensor], host: np.ndarray, host_ids: np.ndarray) -> None:
        for part, copied in zip(host, pinned, strict=True):
            part[host_ids] = copied.numpy().reshape(len(host_ids), -1)


class _KeptUntil:
    """Tells whether an event is complete, and keeps tensors alive until then."""

    def __init__(self, event: Any, tensors: list[Any]) -> None:
        self._event, self._tensors = event, tensors

    def __call__(self) -> bool:
        if not self._event.query():
            return False
        self._tensors.clear()
        return True


def copying_thread() -> Submit:
    """Return what starts work on a new thread, which does one after the other.

    The thread is a daemon: a device that hangs must not keep the process from ending, which an
    executor's threads do.
    """
    work: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()

    def run() -> None:
        while True:
            _do(*work.get())

    Thread(target=run, name="pdserve-copies", daemon=True).start()

    def submit(call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        work.put((future, call))
        return future

    return submit


def _do(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)
