"""Copies beside the steps: in order, layer by layer, bounded, and never waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from engine.runner.cache import device_copies
from engine.runner.cache.device_copies import DeviceCopies, copying_thread

NUM_LAYERS, BLOCK_BYTES, NUM_BLOCKS = 3, 10, 20


class FakeDevice:
    """Its thread works when `work_next` is called; the device copies until `finish_next`."""

    def __init__(self) -> None:
        self.host = np.arange(NUM_LAYERS * NUM_BLOCKS).reshape(NUM_LAYERS, NUM_BLOCKS)
        self.cache = np.zeros_like(self.host)
        self.asked: list[tuple[Callable[[], Any], Future[Any]]] = []
        self.copying: list[tuple[list[Exception | None], Callable[[], None]]] = []
        self.order: list[tuple[int, list[int]]] = []

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.asked.append((work, future))
        return future

    def work_next(self) -> None:
        work, future = self.asked.pop(0)
        try:
            future.set_result(work())
        except ValueError as error:
            future.set_exception(error)

    def gather(self, host: np.ndarray, host_ids: np.ndarray, block_ids: np.ndarray) -> np.ndarray:
        return np.array(host[host_ids])

    def begin_in(self, layer: int, block_ids: np.ndarray, gathered: Any) -> Callable[[], bool]:
        def copy() -> None:
            self.cache[layer, block_ids] = gathered

        return self._begin(layer, block_ids, copy)

    def begin_out(
        self, layer: int, block_ids: np.ndarray, host: np.ndarray, host_ids: np.ndarray
    ) -> tuple[Any, Callable[[], bool]]:
        pinned = np.zeros(len(block_ids), int)

        def copy() -> None:
            pinned[:] = self.cache[layer, block_ids]

        return pinned, self._begin(layer, block_ids, copy)

    def scatter(self, pinned: Any, host: np.ndarray, host_ids: np.ndarray) -> None:
        host[host_ids] = pinned

    def _begin(
        self, layer: int, block_ids: np.ndarray, copy: Callable[[], None]
    ) -> Callable[[], bool]:
        self.order.append((layer, block_ids.tolist()))
        ends: list[Exception | None] = []
        self.copying.append((ends, copy))

        def is_done() -> bool:
            for error in ends:
                if error is not None:
                    raise error
            return bool(ends)

        return is_done

    def finish_next(self) -> None:
        ends, copy = self.copying.pop(0)
        copy()
        ends.append(None)

    def fail_next(self, error: Exception) -> None:
        self.copying.pop(0)[0].append(error)


def copies(device: FakeDevice) -> DeviceCopies:
    sizes = [BLOCK_BYTES] * NUM_LAYERS
    return DeviceCopies(device, block_bytes=sizes, submit=device.submit)


def test_a_copy_in_is_done_when_every_layer_is_copied() -> None:
    device = FakeDevice()
    copy = copies(device).begin([4, 7], device.host, [5, 6], is_out=False)
    for layer in range(NUM_LAYERS):
        assert not copy.is_done()
        device.work_next()
        assert not copy.is_done()
        assert device.order[-1] == (layer, [4, 7])
        device.finish_next()
    assert copy.is_done()
    assert copy.is_done()
    np.testing.assert_array_equal(device.cache[:, [4, 7]], device.host[:, [5, 6]])
    assert not np.delete(device.cache, [4, 7], axis=1).any()


def test_a_copy_out_is_done_when_the_thread_has_written_every_layer() -> None:
    device = FakeDevice()
    device.cache[:] = 100 + device.host
    before = device.host.copy()
    copy = copies(device).begin([4, 7], device.host, [5, 6], is_out=True)
    assert device.order == [(layer, [4, 7]) for layer in range(NUM_LAYERS)]
    for _ in range(NUM_LAYERS):
        assert not copy.is_done()
        device.finish_next()
    for _ in range(NUM_LAYERS):
        assert not copy.is_done()
        device.work_next()
    assert copy.is_done()
    np.testing.assert_array_equal(device.host[:, [5, 6]], device.cache[:, [4, 7]])
    rest = np.delete(device.host, [5, 6], axis=1)
    np.testing.assert_array_equal(rest, np.delete(before, [5, 6], axis=1))


def test_what_was_copied_out_can_be_copied_in_behind_it() -> None:
    """The thread does one after the other, so the second copy reads what the first one wrote."""
    device = FakeDevice()
    device.cache[:] = 100 + device.host
    owner = copies(device)
    out = owner.begin([4], device.host, [5], is_out=True)
    back = owner.begin([9], device.host, [5], is_out=False)
    for _ in range(NUM_LAYERS):
        device.finish_next()
    while not back.is_done():
        if device.asked:
            device.work_next()
        elif device.copying:
            device.finish_next()
    assert out.is_done()
    np.testing.assert_array_equal(device.cache[:, 9], device.cache[:, 4])


def test_copies_are_made_in_order() -> None:
    device = FakeDevice()
    owner = copies(device)
    first = owner.begin([1], device.host, [1], is_out=False)
    second = owner.begin([2, 3], device.host, [2, 3], is_out=False)
    while device.asked:
        device.work_next()
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


@pytest.mark.parametrize("is_out", [False, True])
def test_pinned_memory_is_bounded_and_a_large_layer_still_goes(
    is_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copies, "MAX_BYTES_UNDER_WAY", 4 * BLOCK_BYTES)
    device = FakeDevice()
    owner = copies(device)
    small = owner.begin([1, 2], device.host, [1, 2], is_out=is_out)
    large = owner.begin([3, 4, 5, 6, 7], device.host, [3, 4, 5, 6, 7], is_out=is_out)
    assert len(device.asked) == 2  # two layers of two blocks
    most = 0
    while not (small.is_done() and large.is_done()):
        if device.copying:
            device.finish_next()
        elif device.asked:
            device.work_next()
        owner.advance()
        under_way = max(len(device.asked), len(device.copying))
        most = max(most, under_way)
        assert under_way <= 2
    assert most == 2
    np.testing.assert_array_equal(device.cache[:, 1:8], device.host[:, 1:8])


def test_while_a_step_runs_nothing_begins_on_the_device() -> None:
    device = FakeDevice()
    copy = copies(device).begin([1], device.host, [1], is_out=False)
    device.work_next()
    assert not copy.is_done(may_begin=False)
    assert not device.order
    assert not copy.is_done()
    assert len(device.order) == 1


@pytest.mark.parametrize("name", ["gather", "begin_in", "begin_out", "scatter"])
def test_an_error_ends_its_copy_and_no_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    is_out = name in ("begin_out", "scatter")
    real, has_failed = getattr(device, name), list[bool]()

    def fail_once(*given: Any) -> Any:
        if has_failed:
            return real(*given)
        has_failed.append(True)
        raise ValueError("no pinned memory")

    monkeypatch.setattr(device, name, fail_once)
    owner = copies(device)
    bad = owner.begin([1], device.host, [1], is_out=is_out)
    good = owner.begin([2], device.host, [2], is_out=is_out)
    for _ in range(30):
        if device.copying:
            device.finish_next()
        elif device.asked:
            device.work_next()
        owner.advance()
    with pytest.raises(ValueError, match="no pinned memory"):
        bad.is_done()
    assert good.is_done()
    np.testing.assert_array_equal(device.cache[:, 2], device.host[:, 2])


def test_a_device_that_fails_later_ends_the_copy_it_made_and_no_other() -> None:
    device = FakeDevice()
    owner = copies(device)
    bad = owner.begin([1], device.host, [1], is_out=False)
    while device.asked:
        device.work_next()
    good = owner.begin([2], device.host, [2], is_out=False)
    owner.advance()
    device.fail_next(RuntimeError("the device is lost"))
    assert not good.is_done()
    for _ in range(30):
        if device.copying:
            device.finish_next()
        elif device.asked:
            device.work_next()
        owner.advance()
    assert good.is_done()
    with pytest.raises(RuntimeError, match="the device is lost"):
        bad.is_done()


def test_the_copying_thread_answers_in_order_and_keeps_no_process_alive() -> None:
    """The interpreter waits for other threads when it ends, and a device may hang."""
    before = set(threading.enumerate())
    submit = copying_thread()
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    done: list[int] = []
    first, second = submit(lambda: done.append(1)), submit(lambda: 1 // 0)
    assert submit(lambda: done).result(10) == [1]
    assert first.result(0) is None
    with pytest.raises(ZeroDivisionError):
        second.result(0)
