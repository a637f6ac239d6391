"""Layers are reported in order, as soon as their copies are done, and none is left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from engine.runner.framework import paddle
from engine.runner.layers_out import MAX_UNDER_WAY, DeviceCopy, LayersOut


class Device:
    """Copies that are done when the test says so, or when a thread waits for them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.done: set[int] = set()

    def start(self, layer: int) -> _Copy:
        self.log.append(f"copy {layer}")
        return _Copy(self, layer)

    def told(self) -> list[str]:
        """Return the events since the last call."""
        log, self.log = self.log, []
        return log


class _Copy:
    def __init__(self, device: Device, layer: int) -> None:
        self._device, self._layer = device, layer

    def is_done(self) -> bool:
        return self._layer in self._device.done

    def finish(self) -> None:
        if not self.is_done():
            self._device.log.append(f"wait {self._layer}")


def layers_on(device: Device) -> LayersOut:
    return LayersOut(lambda layer: device.log.append(f"tell {layer}"), device.start)


def test_a_layer_is_told_of_when_its_copy_is_done_and_not_before() -> None:
    device = Device()
    layers = layers_on(device)
    layers.on_computed(0)
    assert device.told() == ["copy 0"]
    layers.on_computed(1)
    assert device.told() == ["copy 1"]
    device.done |= {0, 1}
    layers.on_computed(2)
    assert device.told() == ["copy 2", "tell 0", "tell 1"]
    layers.finish()
    assert device.told() == ["wait 2", "tell 2"]
    layers.finish()
    assert device.told() == []


def test_a_copy_that_overtakes_another_is_told_of_behind_it() -> None:
    device = Device()
    layers = layers_on(device)
    layers.on_computed(0)
    device.done.add(1)
    layers.on_computed(1)
    assert device.told() == ["copy 0", "copy 1"]
    layers.finish()
    assert device.told() == ["wait 0", "tell 0", "tell 1"]


def test_the_thread_that_feeds_the_device_does_not_run_ahead_of_the_copies() -> None:
    device = Device()
    layers = layers_on(device)
    for layer in range(MAX_UNDER_WAY):
        layers.on_computed(layer)
    assert device.told() == [f"copy {layer}" for layer in range(MAX_UNDER_WAY)]
    layers.on_computed(MAX_UNDER_WAY)
    assert device.told() == [f"copy {MAX_UNDER_WAY}", "wait 0", "tell 0"]


def test_where_nothing_is_copied_a_computed_layer_is_told_of_at_once() -> None:
    told: list[int] = []
    layers = LayersOut(told.append, None)
    layers.on_computed(0)
    assert told == [0]
    layers.on_computed(1)
    layers.finish()
    assert told == [0, 1]
    silent = LayersOut(None, None)
    silent.on_computed(0)
    silent.finish()


class PlayedGpu:
    """Streams and events of a GPU, written down in the order in which a CPU is asked for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.done = False
        self._stream = "compute"
        for name in ("wait_event", "record_event"):
            assert hasattr(paddle.device.Stream, name)
        for name in ("query", "synchronize"):
            assert hasattr(paddle.device.Event, name)
        monkeypatch.setattr(paddle.device, "current_stream", lambda: _Stream(self, self._stream))
        monkeypatch.setattr(paddle.device, "stream_guard", self._guard)
        monkeypatch.setattr(
            paddle.Tensor,
            "pin_memory",
            lambda tensor, blocking=True: self._pin(tensor, is_blocking=blocking),
        )

    def stream(self, name: str) -> Any:
        return _Stream(self, name)

    @contextmanager
    def _guard(self, stream: _Stream) -> Iterator[None]:
        self._stream, before = stream.name, self._stream
        yield
        self._stream = before

    def _pin(self, tensor: paddle.Tensor, *, is_blocking: bool) -> paddle.Tensor:
        assert not is_blocking
        self.log.append(f"copy on {self._stream}")
        return tensor.clone()


class _Stream:
    def __init__(self, gpu: PlayedGpu, name: str) -> None:
        self.gpu, self.name = gpu, name

    def record_event(self) -> _Stream:
        self.gpu.log.append(f"record {self.name}")
        return self

    def wait_event(self, event: _Stream) -> None:
        self.gpu.log.append(f"{self.name} waits for {event.name}")

    def query(self) -> bool:
        return self.gpu.done

    def synchronize(self) -> None:
        self.gpu.log.append(f"wait for {self.name}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copy_from_a_gpu_waits_for_the_layer_and_the_host_for_the_copy(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = PlayedGpu(monkeypatch)
    parts = [paddle.rand([6, 2, 4, 8]).astype(dtype) for _ in range(2)]
    wanted = [part.view("uint8").numpy().reshape(6, -1) for part in parts]
    target = np.zeros((2, 6, wanted[0].shape[1]), np.uint8)
    copy = DeviceCopy(parts, np.array([1, 4]), target, gpu.stream("side"))
    assert gpu.log == [
        "record compute",
        "side waits for compute",
        *["copy on side"] * 2,
        "record side",
    ]
    assert not copy.is_done()
    gpu.done = True
    assert copy.is_done()
    assert not target.any()
    copy.finish()
    assert gpu.log[-1] == "wait for side"
    for part in range(2):
        np.testing.assert_array_equal(target[part, [1, 4]], wanted[part][[1, 4]])
        assert not target[part, [0, 2, 3, 5]].any()
