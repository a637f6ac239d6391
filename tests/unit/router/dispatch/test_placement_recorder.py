"""Placements are written beside the data path, in order, latest word only."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry

from common.errors import PlacementUnavailable
from common.ids import AttemptId, Incarnation
from placement.store import Placement
from router.dispatch import placement_recorder
from router.dispatch.placement_recorder import (
    BATCH,
    GATHER_S,
    MAX_REMOVALS,
    RENEWALS_PER_TTL,
    TTL_S,
    PlacementRecorder,
)
from router.watch.router_metrics import RouterMetrics
from tests.support.clocks.manual_clock import ManualClock
from tests.support.clocks.stopped_time import StoppedTime
from tests.support.http.http_server import eventually
from tests.support.stores.memory_store import MemoryStore


class GatedStore(MemoryStore):
    """Calls wait for `gate`, are listed in `calls`, and fail while `is_away`."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.gate = asyncio.Event()
        self.calls: list[str] = []
        self.is_away = False

    async def record(
        self,
        placed: Sequence[Placement],
        gone: Sequence[AttemptId],
        *,
        router_id: str,
        ttl_s: float,
    ) -> None:
        self.calls += [f"place {placement.attempt}" for placement in placed]
        self.calls += [f"unplace {attempt}" for attempt in gone]
        await self._pass()
        await super().record(placed, gone, router_id=router_id, ttl_s=ttl_s)

    async def _pass(self) -> None:
        await self.gate.wait()
        if self.is_away:
            raise PlacementUnavailable("away")


class Setup:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = GatedStore(self.clock)
        self.registry = CollectorRegistry()
        metrics = RouterMetrics(self.registry)
        self.recorder = PlacementRecorder(self.store, "r0", self.clock, metrics)

    def num_errors(self, operation: str) -> float:
        name = "pdserve_router_store_errors_total"
        return self.registry.get_sample_value(name, {"operation": operation}) or 0.0


@asynccontextmanager
async def running() -> AsyncIterator[Setup]:
    setup = Setup()
    task = asyncio.create_task(setup.recorder.run())
    yield setup
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def placement(index: int = 0, reason: str = "why") -> Placement:
    node = Incarnation("d0", 1)
    return Placement(
        attempt=AttemptId(f"req-{index}", 1),
        router_id="r0",
        decode=node,
        prefill=None,
        reason=reason,
    )


async def test_a_placement_is_written_and_removed() -> None:
    async with running() as setup:
        setup.store.gate.set()
        setup.recorder.place_nowait(placement())
        await setup.recorder.wait_idle()
        assert await setup.store.placements() == [placement()]
        setup.recorder.unplace_nowait(placement().attempt)
        await setup.recorder.wait_idle()
        assert await setup.store.placements() == []


@pytest.mark.covers("F122")
def test_records_of_a_dead_router_are_soon_gone() -> None:
    assert TTL_S <= 15
    assert TTL_S / RENEWALS_PER_TTL >= 2, "each running attempt is written as often"


@pytest.mark.covers("F122")
async def test_a_running_attempt_is_renewed_and_a_dead_routers_record_ends() -> None:
    async with running() as setup:
        setup.store.gate.set()
        setup.recorder.place_nowait(placement(0))
        await setup.recorder.wait_idle()
        setup.clock.advance(TTL_S / RENEWALS_PER_TTL)
        setup.recorder.place_nowait(placement(1))
        await setup.recorder.wait_idle()
        setup.clock.advance(TTL_S * 0.9)
        assert await setup.store.placements() == [placement(0), placement(1)]
        setup.clock.advance(TTL_S * 0.2)
        assert await setup.store.placements() == []


async def test_an_ended_attempt_is_not_renewed() -> None:
    async with running() as setup:
        setup.store.gate.set()
        setup.recorder.place_nowait(placement(0))
        await setup.recorder.wait_idle()
        setup.recorder.unplace_nowait(placement(0).attempt)
        setup.clock.advance(TTL_S / RENEWALS_PER_TTL)
        setup.recorder.place_nowait(placement(1))
        await setup.recorder.wait_idle()
        assert await setup.store.placements() == [placement(1)]


async def test_a_removal_is_never_lost_whenever_it_comes() -> None:
    for num_ticks in range(8):
        async with running() as setup:
            setup.recorder.place_nowait(placement())
            for _ in range(num_ticks):
                await asyncio.sleep(0)
            setup.recorder.unplace_nowait(placement().attempt)
            setup.store.gate.set()
            await setup.recorder.wait_idle()
            assert await setup.store.placements() == [], f"after {num_ticks} ticks"


async def test_what_was_never_written_is_never_removed() -> None:
    async with running() as setup:
        setup.recorder.place_nowait(placement())
        setup.recorder.unplace_nowait(placement().attempt)
        setup.store.gate.set()
        setup.recorder.place_nowait(placement(1))
        await setup.recorder.wait_idle()
        assert setup.store.calls == ["place req-1/1"]


async def test_only_the_latest_word_of_an_attempt_is_written() -> None:
    async with running() as setup:
        setup.store.gate.set()
        setup.recorder.place_nowait(placement(reason="first"))
        setup.recorder.place_nowait(placement(reason="second"))
        await setup.recorder.wait_idle()
        assert setup.store.calls == ["place req-0/1"]
        assert (await setup.store.placements())[0].reason == "second"


async def changes_of_next_call(setup: Setup) -> list[str]:
    """Place the request with number 1; return what is written together with it."""
    setup.store.calls.clear()
    setup.recorder.place_nowait(placement(1))
    await setup.recorder.wait_idle()
    return setup.store.calls


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_changes_that_come_while_others_are_written_wait_for_more() -> None:
    """Else a busy router calls the store again after each call, for attempts that soon end."""
    time = StoppedTime()
    async with running() as setup:
        setup.recorder.place_nowait(placement(0))
        await turns()
        time.advance(GATHER_S)
        await eventually(lambda: setup.store.calls == ["place req-0/1"])
        setup.recorder.place_nowait(placement(1))
        setup.recorder.place_nowait(placement(2))
        setup.store.gate.set()
        await turns()
        setup.recorder.unplace_nowait(placement(1).attempt)
        assert setup.store.calls == ["place req-0/1"]
        time.advance(GATHER_S)
        await setup.recorder.wait_idle()
        assert setup.store.calls == ["place req-0/1", "place req-2/1"]


async def test_all_that_waited_is_written_however_many_calls_that_takes() -> None:
    async with running() as setup:
        setup.store.gate.set()
        for index in range(2 * BATCH + 1):
            setup.recorder.place_nowait(placement(index))
        await setup.recorder.wait_idle()
        assert len(await setup.store.placements()) == 2 * BATCH + 1


async def test_a_store_that_is_away_is_counted_and_forgotten() -> None:
    async with running() as setup:
        setup.store.gate.set()
        setup.store.is_away = True
        setup.recorder.place_nowait(placement())
        await setup.recorder.wait_idle()
        setup.recorder.unplace_nowait(placement().attempt)
        await setup.recorder.wait_idle()
        assert (setup.num_errors("place"), setup.num_errors("unplace")) == (1, 1)
        setup.clock.advance(TTL_S)
        setup.recorder.unplace_nowait(placement().attempt)
        assert await changes_of_next_call(setup) == [f"place {placement(1).attempt}"]


async def fail_to_remove(setup: Setup) -> None:
    """Write a placement, and try to remove it from a store that is away."""
    setup.store.gate.set()
    setup.recorder.place_nowait(placement())
    await setup.recorder.wait_idle()
    setup.store.is_away = True
    setup.recorder.unplace_nowait(placement().attempt)
    await eventually(lambda: setup.num_errors("unplace") >= 2)


async def test_a_removal_that_was_not_written_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the store would tell of it until the record expires by itself."""
    monkeypatch.setattr(placement_recorder, "RETRY_S", 0.0)
    async with running() as setup:
        await fail_to_remove(setup)
        assert await setup.store.placements() == [placement()]
        setup.store.is_away = False
        setup.recorder.place_nowait(placement(1))
        await setup.recorder.wait_idle()
        assert await setup.store.placements() == [placement(1)]
        setup.recorder.unplace_nowait(placement(1).attempt)
        await setup.recorder.wait_idle()
        assert await changes_of_next_call(setup) == [f"place {placement(1).attempt}"]


async def test_a_removal_is_not_tried_for_longer_than_its_record_can_live(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement_recorder, "RETRY_S", 0.0)
    async with running() as setup:
        await fail_to_remove(setup)
        setup.clock.advance(TTL_S)
        assert await changes_of_next_call(setup) == [f"place {placement(1).attempt}"]


async def test_every_running_attempt_keeps_its_record() -> None:
    """Each choice of a request is an attempt: 1024 requests may have a hundred times as many."""
    num_running = MAX_REMOVALS + BATCH
    async with running() as setup:
        setup.store.gate.set()
        for index in range(num_running):
            setup.recorder.place_nowait(placement(index))
        for _ in range(RENEWALS_PER_TTL + 1):
            await setup.recorder.wait_idle()
            assert len(await setup.store.placements()) == num_running
            setup.clock.advance(TTL_S / RENEWALS_PER_TTL)
            setup.recorder.place_nowait(placement(0))  # it wakes the recorder
        assert setup.num_errors("record_dropped") == 0


async def test_a_store_that_hangs_does_not_fill_the_memory_with_removals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement_recorder, "MAX_REMOVALS", 8)
    num_written = BATCH + 8 + 3
    async with running() as setup:
        setup.store.gate.set()
        for index in range(num_written):
            setup.recorder.place_nowait(placement(index))
        await setup.recorder.wait_idle()
        setup.store.gate.clear()
        setup.store.calls.clear()
        for index in range(num_written):
            setup.recorder.unplace_nowait(placement(index).attempt)
        assert setup.num_errors("record_dropped") == BATCH + 3
        setup.store.gate.set()
        await setup.recorder.wait_idle()
        assert setup.store.calls == [f"unplace req-{BATCH + 3 + at}/1" for at in range(8)]


async def test_removals_go_before_records_and_none_is_written_twice() -> None:
    async with running() as setup:
        setup.store.gate.set()
        for index in range(BATCH):
            setup.recorder.place_nowait(placement(index))
        await setup.recorder.wait_idle()
        setup.store.calls.clear()
        for index in range(BATCH):
            setup.recorder.place_nowait(placement(BATCH + index))
            setup.recorder.unplace_nowait(placement(index).attempt)
        await setup.recorder.wait_idle()
        assert setup.store.calls == [
            *(f"unplace req-{index}/1" for index in range(BATCH)),
            *(f"place req-{BATCH + index}/1" for index in range(BATCH)),
        ]
