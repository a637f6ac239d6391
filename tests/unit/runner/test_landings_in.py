"""Copies of landed KV: in order, layer by layer, bounded, and never waited for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from engine.runner import landings_in
from engine.runner.landings_in import LandingsIn

NUM_LAYERS, BLOCK_BYTES = 3, 10


class FakeDevice:
    """Gathers when `gather_next` is called, and copies until `finish_next`."""

    def __init__(self) -> None:
        self.host = np.arange(NUM_LAYERS * 20).reshape(NUM_LAYERS, 20)
        self.cache = np.zeros_like(self.host)
        self.asked: list[tuple[Callable[[], Any], Future[Any]]] = []
        self.copying: list[list[Any]] = []
        self.order: list[tuple[int, list[int]]] = []

    def submit(self, gather: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.asked.append((gather, future))
        return future

    def gather_next(self) -> None:
        gather, future = self.asked.pop(0)
        try:
            future.set_result(gather())
        except ValueError as error:
            future.set_exception(error)

    def gather(self, layer: int, block_ids: np.ndarray) -> np.ndarray:
        return np.array(self.host[layer, block_ids])

    def begin(self, layer: int, block_ids: np.ndarray, gathered: Any) -> Callable[[], bool]:
        self.order.append((layer, block_ids.tolist()))
        copy = [False, layer, block_ids, gathered]
        self.copying.append(copy)
        return lambda: bool(copy[0])

    def finish_next(self) -> None:
        copy = self.copying.pop(0)
        copy[0] = True
        _, layer, block_ids, gathered = copy
        self.cache[layer, block_ids] = gathered


def landings(device: FakeDevice) -> LandingsIn:
    return LandingsIn(device, num_layers=NUM_LAYERS, block_bytes=BLOCK_BYTES, submit=device.submit)


def test_a_landing_is_done_when_every_layer_is_copied() -> None:
    device = FakeDevice()
    copy = landings(device).begin([4, 7])
    for layer in range(NUM_LAYERS):
        assert not copy.is_done()
        device.gather_next()
        assert not copy.is_done()
        assert device.order[-1] == (layer, [4, 7])
        device.finish_next()
    assert copy.is_done()
    assert copy.is_done()
    np.testing.assert_array_equal(device.cache[:, [4, 7]], device.host[:, [4, 7]])
    assert not np.delete(device.cache, [4, 7], axis=1).any()


def test_landings_are_copied_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    owner = landings(device)
    first, second = owner.begin([1]), owner.begin([2, 3])
    while device.asked:
        device.gather_next()
        owner.advance()
    assert [ids for _, ids in device.order] == [[1]] * 3 + [[2, 3]] * 3
    for _ in range(NUM_LAYERS):
        assert not first.is_done()
        device.finish_next()
    assert first.is_done()
    assert not second.is_done()
    for _ in range(NUM_LAYERS):
        device.finish_next()
    assert second.is_done()


def test_pinned_memory_is_bounded_and_a_large_layer_still_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(landings_in, "MAX_BYTES_UNDER_WAY", 4 * BLOCK_BYTES)
    device = FakeDevice()
    owner = landings(device)
    small = owner.begin([1, 2])
    large = owner.begin([3, 4, 5, 6, 7])
    assert len(device.asked) == 2  # two layers of two blocks
    most = 0
    while not (small.is_done() and large.is_done()):
        if device.asked:
            device.gather_next()
        elif device.copying:
            device.finish_next()
        owner.advance()
        under_way = len(device.asked) + len(device.copying)
        most = max(most, under_way)
        assert under_way <= 2
    assert most == 2
    np.testing.assert_array_equal(device.cache[:, 1:8], device.host[:, 1:8])


def test_an_error_of_the_gathering_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()

    def fail(layer: int, block_ids: np.ndarray) -> np.ndarray:
        raise ValueError("no pinned memory")

    monkeypatch.setattr(device, "gather", fail)
    copy = landings(device).begin([1])
    device.gather_next()
    with pytest.raises(ValueError, match="no pinned memory"):
        copy.is_done()
