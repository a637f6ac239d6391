"""Landed KV on its way to a device: what the thread that runs steps copies of it, which is nothing.

The device is played on a CPU. A copy that is asked for without waiting is made when the test lets
the device do it; what would wait, or read memory of the host, is counted by its thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, SupportsIndex

import numpy as np
import pytest

from common.kv_layout import KVLayout
from engine.runner import landings_in
from engine.runner.framework import paddle
from engine.runner.kv_cache import KVCache
from engine.runner.landings_in import GpuSide, LandingsIn

NUM_BLOCKS = 6
BLOCK_IDS = [4, 1, 2]
WAITING = ("numpy", "cpu", "item", "tolist")


class PlayedDevice:
    """A GPU whose queued work is done by `run`; `busy` counts, by thread, what is not queued."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.busy: Counter[str] = Counter()
        self.log: list[str] = []
        self.num_queued = self.num_done = 0
        self._stream = "compute"
        patch = monkeypatch.setattr
        patch(paddle, "CUDAPinnedPlace", paddle.CPUPlace)
        patch(paddle, "to_tensor", self._counted(paddle.to_tensor))
        patch(paddle.device, "Stream", lambda: Stream(self, "landings"))
        patch(paddle.device, "current_stream", lambda: Stream(self, self._stream))
        patch(paddle.device, "stream_guard", self._guard)
        patch(paddle.Tensor, "cuda", lambda tensor, blocking=True: self._copy(tensor, blocking))
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
        self.device.log.append(f"{self.name} waits for {event.name}")


class Event:
    """Done when the device did what was queued before it."""

    def __init__(self, device: PlayedDevice, name: str, number: int) -> None:
        self.device, self.name, self.number = device, name, number

    def query(self) -> bool:
        return self.device.num_done >= self.number

    def synchronize(self) -> None:
        self.device.count()


class CountedBytes(np.ndarray):
    """The host's mirror; reading some of its blocks is counted."""

    played: PlayedDevice

    def __array_finalize__(self, source: Any) -> None:
        if hasattr(source, "played"):
            self.played = source.played

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, SupportsIndex):
            self.played.count()
        return super().__getitem__(key)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_copy_is_made_on_the_step_thread(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KVLayout(
        model_digest="any", num_layers=3, num_kv_heads=2, head_dim=16, block_size=4, dtype=dtype
    )
    cache = KVCache(layout, NUM_BLOCKS * layout.block_bytes, is_mirrored=True)
    rng = np.random.default_rng(1)
    # No value is NaN, so that equal bytes are equal numbers.
    cache.host_bytes[:] = rng.integers(0, 60, cache.host_bytes.shape, dtype=np.uint8)
    cache.stage_in(range(NUM_BLOCKS))
    wanted = cache.tensor.astype("float32").numpy()
    cache.tensor.zero_()

    device = PlayedDevice(monkeypatch)
    mirror = cache.host_bytes.view(CountedBytes)
    mirror.played = device
    side = GpuSide(cache.layer, mirror, dtype)
    gathered = threading.Semaphore(0)
    submit = landings_in._thread()

    def submit_and_tell(gather: Callable[[], Any]) -> Any:
        future = submit(gather)
        future.add_done_callback(lambda _: gathered.release())
        return future

    landings = LandingsIn(
        side, num_layers=3, block_bytes=2 * layout.piece_bytes, submit=submit_and_tell
    )
    copy = landings.begin(BLOCK_IDS)
    for _ in range(layout.num_layers):
        assert gathered.acquire(timeout=20)
    assert not copy.is_done()
    device.run()
    assert copy.is_done()

    here = threading.current_thread().name
    assert device.busy[here] == 0
    assert sum(device.busy.values()) >= 3 * layout.num_layers
    # Each layer behind the steps that were queued before, on a stream of its own.
    one_layer = ["landings waits for compute", *["copy on landings"] * 3]
    assert device.log == one_layer * layout.num_layers
    monkeypatch.undo()
    found = cache.tensor.astype("float32").numpy()
    np.testing.assert_array_equal(found[:, :, BLOCK_IDS], wanted[:, :, BLOCK_IDS])
    assert not np.delete(found, BLOCK_IDS, axis=2).any()
