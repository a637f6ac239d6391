"""Layers are reported in order, as soon as their copies are done, and none is left out."""

from __future__ import annotations

from engine.runner.cache.layers_out import MAX_UNDER_WAY, LayersOut


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
