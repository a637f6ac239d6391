"""What the device that answers late orders: a stream's own work, and what events order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

# First: it puts Triton into its interpreter before any kernel is decorated.
from tests.gpu_kernels.late_device import LateDevice  # isort: skip

import pytest

from engine.runner.gpu.cuda_driver import GpuError

HERE, THERE, FAR = 5, 6, 7


@pytest.fixture
def device() -> LateDevice:
    return LateDevice()


@pytest.fixture
def done() -> list[str]:
    return []


@pytest.fixture
def queue(device: LateDevice, done: list[str]) -> Callable[[str, int], None]:
    """Queue work that notes its name."""
    return lambda name, stream: void(device.queue(partial(done.append, name), stream))


def void(_: object) -> None:
    """Return nothing."""


def recorded(device: LateDevice, stream: int) -> Any:
    event = device.event()
    event.record(stream)
    return event


def test_only_what_is_waited_for_has_run(
    device: LateDevice, done: list[str], queue: Callable[[str, int], None]
) -> None:
    for name, stream in (("a", HERE), ("b", THERE), ("c", HERE)):
        queue(name, stream)
    before = recorded(device, HERE)
    queue("d", HERE)
    assert done == []
    before.wait()
    assert done == ["a", "c"]
    device.synchronize(THERE)
    assert done == ["a", "c", "b"]
    device.synchronize_all()
    assert done == ["a", "c", "b", "d"]


def test_a_stream_waits_for_an_event_as_it_was_recorded_then(
    device: LateDevice, done: list[str], queue: Callable[[str, int], None]
) -> None:
    """And so on through streams; one that was not recorded holds nothing."""
    queue("a", HERE)
    event = recorded(device, HERE)
    event.delay(THERE)
    queue("b", HERE)
    event.record(HERE)
    event.close()
    queue("c", THERE)
    recorded(device, THERE).delay(FAR)
    device.event().delay(FAR)
    queue("d", FAR)
    device.synchronize(FAR)
    assert done == ["a", "c", "d"]


def test_an_event_is_late_and_reached_in_the_end(device: LateDevice) -> None:
    event = device.event()
    assert event.is_reached(), "nothing was recorded"
    event.record(HERE)
    assert [event.is_reached() for _ in range(2)] == [False, True]
    event.close()
    with pytest.raises(GpuError, match="invalid resource handle"):
        event.record(HERE)


def test_a_graph_is_queued_when_it_is_launched(
    device: LateDevice, done: list[str], queue: Callable[[str, int], None]
) -> None:
    graph = device.capture(HERE, lambda: queue("a", HERE))
    device.synchronize(HERE)
    assert done == []
    for _ in range(2):
        graph.launch(HERE)
    graph.close()
    device.synchronize(HERE)
    assert done == ["a", "a"]
    with pytest.raises(GpuError, match="invalid resource handle"):
        graph.launch(HERE)


@pytest.mark.parametrize("kind", ["allocate", "allocate_pinned"])
def test_memory_that_is_given_back_too_early_or_used_afterwards_is_a_fault(
    device: LateDevice, kind: str
) -> None:
    memory, other = (getattr(device, kind)(256) for _ in range(2))
    graph = device.capture(HERE, lambda: device.fill(other.address + 8, 0, 8, HERE))
    device.fill(memory.address + 8, 0, 8, HERE)
    with pytest.raises(AssertionError, match="given back while work"):
        memory.close()
    device.synchronize(HERE)
    other.close()
    with pytest.raises(AssertionError, match="queued with memory that was given back"):
        graph.launch(HERE)
    assert len(device.faults) == 2


def test_a_seed_draws_an_order_that_events_allow() -> None:
    orders = set()
    for seed in range(20):
        device, done = LateDevice(seed=seed), list[str]()
        for name, stream in (("a", HERE), ("b", THERE), ("c", HERE), ("d", FAR)):
            device.queue(partial(done.append, name), stream)
        recorded(device, HERE).delay(THERE)
        device.queue(partial(done.append, "e"), THERE)
        device.synchronize_all()
        assert sorted(done) == ["a", "b", "c", "d", "e"]
        assert done.index("a") < done.index("c") < done.index("e") > done.index("b")
        orders.add(tuple(done))
    assert len(orders) > 3


def test_what_work_raises_is_told_to_whoever_waits(device: LateDevice) -> None:
    def lost() -> None:
        raise GpuError("an illegal memory access")

    device.queue(lost, HERE)
    with pytest.raises(GpuError, match="illegal memory access"):
        recorded(device, HERE).wait()
