"""KV between a device and host memory: what the thread that runs steps copies, which is nothing.

The device is played on a CPU. A copy that is asked for without waiting is made when the test lets
the device do it; what would wait, or read memory of the host, is counted by its thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from common.kv.kv_layout import KVLayout
from engine.runner.cache import device_copies
from engine.runner.cache.device_copies import GpuSide
from engine.runner.cache.kv_cache import KVCache
from engine.runner.paddle_import import paddle

NUM_BLOCKS = 6
BLOCK_IDS = [4, 1, 2]
WAITING = ("numpy", "cpu", "item", "tolist")


class PlayedDevice:
    """A GPU whose queued work is done by `run`; `busy` counts, by thread, what is not queued."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.busy: Counter[str] = Counter()
        self.log: list[str] = []
        self.num_queued = self.num_done = 0
        self.run_at_once = False
        self._stream = "compute"
        patch = monkeypatch.setattr
        patch(paddle, "CUDAPinnedPlace", paddle.CPUPlace)
        patch(paddle, "to_tensor", self._counted_unless_ids(paddle.to_tensor))
        patch(paddle.device, "Stream", lambda: Stream(self, "copies"))
        patch(paddle.device, "current_stream", lambda: Stream(self, self._stream))
        patch(paddle.device, "stream_guard", self._guard)
        patch(paddle.Tensor, "cuda", lambda tensor, blocking=True: self._copy(tensor, blocking))
        patch(
            paddle.Tensor, "pin_memory", lambda tensor, blocking=True: self._copy(tensor, blocking)
        )
        for name in WAITING:
            patch(paddle.Tensor, name, self._counted(getattr(paddle.Tensor, name)))

    def count(self) -> None:
        self.busy[threading.current_thread().name] += 1

    def run(self) -> None:
        """Do all work that is queued."""
        self.num_done = self.num_queued

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **rest: Any) -> Any:
            self.count()
            return call(*args, **rest)

        return counted

    def _counted_unless_ids(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Numbers of blocks are not KV."""

        def counted(data: Any, *args: Any, **rest: Any) -> Any:
            if getattr(data, "dtype", None) != np.int64:
                self.count()
            return call(data, *args, **rest)

        return counted

    def _copy(self, tensor: paddle.Tensor, is_blocking: bool) -> paddle.Tensor:
        if is_blocking:
            self.count()
        self.log.append(f"copy on {self._stream}")
        return tensor.clone()

    @contextmanager
    def _guard(self, stream: Stream) -> Iterator[None]:
        self._stream, before = stream.name, self._stream
        yield
        self._stream = before


class Stream:
    """A stream, and the events recorded on it."""

    def __init__(self, device: PlayedDevice, name: str) -> None:
        self.device, self.name = device, name

    def record_event(self) -> Event:
        self.device.num_queued += 1
        return Event(self.device, self.name, self.device.num_queued)

    def wait_event(self, event: Event) -> None:
        self.device.log.append(f"{self.name} wait for {event.name}")


class Event:
    """Done when the device did what was queued before it."""

    def __init__(self, device: PlayedDevice, name: str, number: int) -> None:
        self.device, self.name, self.number = device, name, number

    def query(self) -> bool:
        return self.device.run_at_once or self.device.num_done >= self.number

    def synchronize(self) -> None:
        self.device.count()


class CountedBytes(np.ndarray):
    """The host's mirror; reading or writing some of its blocks is counted."""

    played: PlayedDevice

    def __array_finalize__(self, source: Any) -> None:
        if hasattr(source, "played"):
            self.played = source.played

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, np.ndarray):
            self.played.count()
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, np.ndarray):
            self.played.count()
        super().__setitem__(key, value)


class PlayedCache:
    """A cache on a played device, with a mirror and other host memory; counts by thread."""

    def __init__(self, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layout = KVLayout(
            model_digest="any", num_layers=3, num_kv_heads=2, head_dim=16, block_size=4, dtype=dtype
        )
        self.cache = KVCache(self.layout, NUM_BLOCKS * self.layout.block_bytes, is_mirrored=True)
        rng = np.random.default_rng(1)
        # No value is NaN, so that equal bytes are equal numbers.
        values = rng.integers(0, 60, (2, *self.cache.host_bytes.shape), dtype=np.uint8)
        self.in_mirror, self.on_device = values
        self.mirror = self.cache.host_bytes
        self.mirror[:] = self.in_mirror
        self.bytes_of_cache()[:] = self.on_device
        self._monkeypatch = monkeypatch
        self.device = PlayedDevice(monkeypatch)
        counted = self.mirror.view(CountedBytes)
        counted.played = self.device
        self.cache.host_bytes = counted
        self.num_worked = threading.Semaphore(0)
        submit = device_copies.copying_thread()

        def submit_and_tell(work: Callable[[], Any]) -> Any:
            future = submit(work)
            future.add_done_callback(lambda _: self.num_worked.release())
            return future

        # The memory is a CPU's, but it is copied as if it were not.
        side = GpuSide(self.cache.layer, dtype)
        monkeypatch.setitem(self.cache.__dict__, "_device_side", side)
        monkeypatch.setitem(self.cache.__dict__, "_submit", submit_and_tell)

    def bytes_of_cache(self) -> np.ndarray:
        return self.cache.slots().reshape(self.layout.pool_shape(NUM_BLOCKS))

    def wait_for_thread(self) -> None:
        for _ in range(self.layout.num_layers):
            assert self.num_worked.acquire(timeout=20)

    def check_nothing_was_copied_here(self) -> None:
        assert self.device.busy[threading.current_thread().name] == 0
        assert sum(self.device.busy.values()) >= 3 * self.layout.num_layers
        self._monkeypatch.undo()


@pytest.fixture(params=["float32", "bfloat16"])
def played(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PlayedCache:
    return PlayedCache(request.param, monkeypatch)


@pytest.mark.parametrize("host_ids", [BLOCK_IDS, [0, 5, 3]], ids=["landing", "swap in"])
def test_nothing_is_copied_in_on_the_step_thread(played: PlayedCache, host_ids: list[int]) -> None:
    copy = played.cache.begin_copy(BLOCK_IDS, played.cache.host_bytes, host_ids, is_out=False)
    played.wait_for_thread()
    assert not copy.is_done()
    played.device.run()
    assert copy.is_done()
    # Each layer behind the steps that were queued before, on a stream of its own.
    one_layer = ["copies wait for compute", *["copy on copies"] * 3]
    assert played.device.log == one_layer * played.layout.num_layers
    played.check_nothing_was_copied_here()
    found = played.bytes_of_cache()
    np.testing.assert_array_equal(found[:, :, BLOCK_IDS], played.in_mirror[:, :, host_ids])
    rest = np.delete(found, BLOCK_IDS, axis=2)
    np.testing.assert_array_equal(rest, np.delete(played.on_device, BLOCK_IDS, axis=2))


@pytest.mark.parametrize("host_ids", [BLOCK_IDS, [0, 5, 3]], ids=["staging out", "swap out"])
def test_nothing_is_copied_out_on_the_step_thread(played: PlayedCache, host_ids: list[int]) -> None:
    copy = played.cache.begin_copy(BLOCK_IDS, played.cache.host_bytes, host_ids, is_out=True)
    assert not copy.is_done()
    played.device.run()
    played.wait_for_thread()
    assert copy.is_done()
    one_layer = ["copies wait for compute", *["copy on copies"] * 3]
    assert played.device.log == one_layer * played.layout.num_layers
    played.check_nothing_was_copied_here()
    np.testing.assert_array_equal(played.mirror[:, :, host_ids], played.on_device[:, :, BLOCK_IDS])
    rest = np.delete(played.mirror, host_ids, axis=2)
    np.testing.assert_array_equal(rest, np.delete(played.in_mirror, host_ids, axis=2))


def test_no_layer_of_a_step_is_copied_out_on_the_thread_that_runs_it(played: PlayedCache) -> None:
    told: list[int] = []
    slots = np.array([block * played.layout.block_size for block in BLOCK_IDS])
    layers = played.cache.layers_out(slots, told.append)
    played.device.run_at_once = True
    for layer in range(played.layout.num_layers):
        layers.on_computed(layer)
    layers.finish()
    assert told == list(range(played.layout.num_layers))
    played.check_nothing_was_copied_here()
    np.testing.assert_array_equal(played.mirror[:, :, BLOCK_IDS], played.on_device[:, :, BLOCK_IDS])
