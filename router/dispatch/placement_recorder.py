"""Writes placements to the store beside the data path: bounded, and nothing waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice

from common.errors import PdserveError
from common.ids import AttemptId
from common.observing.clock import Clock
from common.observing.logs import log_fields
from placement.store import Placement, PlacementStore
from router.watch.router_metrics import RouterMetrics

log = logging.getLogger("pdserve.router.placements")

MAX_REMOVALS = 8192
"""Removals that wait for the store; records whose removal is dropped expire by themselves."""
BATCH = 256
GATHER_S = 0.25
"""How long a change waits for others to travel with."""
TTL_S = 12.0
"""How long a record outlives a router that died; a living one renews it in time."""
RENEWALS_PER_TTL = 3
RETRY_S = 1.0
"""How soon a removal that was not written is tried again."""


class PlacementRecorder:
    """Changes that wait for the store. Of an attempt only the latest change is written.

    Records of running attempts are renewed, so that those of a router that died are soon gone.
    None of them is dropped, as a router has no more than it runs; removals are bounded.
    Changes that an unreachable store did not take are counted. The next renewal writes placements
    again; removals are retried until the record has expired by itself.
    """

    def __init__(
        self, store: PlacementStore, router_id: str, clock: Clock, metrics: RouterMetrics
    ) -> None:
        self._store = store
        self._router_id = router_id
        self._clock = clock
        self._metrics = metrics
        self._placed: OrderedDict[AttemptId, Placement] = OrderedDict()
        """Records of running attempts that are not written yet."""
        self._gone: OrderedDict[AttemptId, None] = OrderedDict()
        """Attempts whose records are not removed yet, in order."""
        self._has_pending = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._recorded: set[AttemptId] = set()
        self._running: dict[AttemptId, Placement] = {}
        self._unwritten: dict[AttemptId, float] = {}
        """Removals that failed, and when the record of each expires by itself."""
        self._renewed_at_s = clock.now_s()

    def place_nowait(self, placement: Placement) -> None:
        """Record soon, and renew until `unplace_nowait`."""
        self._gone.pop(placement.attempt, None)
        self._running[placement.attempt] = self._placed[placement.attempt] = placement
        self._wake()

    def unplace_nowait(self, attempt: AttemptId) -> None:
        """Remove the record soon; one that was not written yet is dropped."""
        self._running.pop(attempt, None)
        self._placed.pop(attempt, None)
        if attempt not in self._recorded:
            return
        if len(self._gone) >= MAX_REMOVALS:
            dropped, _ = self._gone.popitem(last=False)
            self._recorded.discard(dropped)
            self._metrics.store_errors.labels("record_dropped").inc()
        self._gone[attempt] = None
        self._wake()

    async def wait_idle(self) -> None:
        """Return when every queued change was tried."""
        await self._is_idle.wait()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s):
                    await self._has_pending.wait()
            # Changes of the next moment travel together; attempts that end by then are not written.
            await asyncio.sleep(GATHER_S)
            self._has_pending.clear()
            self._renew()
            self._retry()
            # What comes meanwhile waits for others in its turn.
            for _ in range(0, len(self._placed) + len(self._gone), BATCH):
                await self._write(*self._take_batch())
            if not self._placed and not self._gone:
                self._is_idle.set()

    @property
    def _pause_s(self) -> float:
        return RETRY_S if self._unwritten else TTL_S / RENEWALS_PER_TTL

    def _renew(self) -> None:
        """Queue every running record again, once in a third of its lifetime."""
        now_s = self._clock.now_s()
        if now_s - self._renewed_at_s >= TTL_S / RENEWALS_PER_TTL:
            self._renewed_at_s = now_s
            self._placed |= self._running

    def _retry(self) -> None:
        """Queue the removals that the store did not take and whose records may still exist."""
        now_s = self._clock.now_s()
        self._unwritten = {a: until_s for a, until_s in self._unwritten.items() if now_s < until_s}
        self._gone |= dict.fromkeys(self._unwritten)

    def _wake(self) -> None:
        self._is_idle.clear()
        self._has_pending.set()

    def _take_batch(self) -> tuple[list[Placement], list[AttemptId]]:
        """Take at most `BATCH` changes, removals first; return records and removals."""
        gone = list(islice(self._gone, BATCH))
        placed = list(islice(self._placed.values(), BATCH - len(gone)))
        for attempt in gone:
            del self._gone[attempt]
            self._recorded.discard(attempt)
        for placement in placed:
            del self._placed[placement.attempt]
            # From here on the store may hold the record, whether the call fails or not.
            self._recorded.add(placement.attempt)
        return placed, gone

    async def _write(self, placed: Sequence[Placement], gone: Sequence[AttemptId]) -> None:
        if not placed and not gone:  # removed before they were written
            return
        try:
            await self._store.record(placed, gone, router_id=self._router_id, ttl_s=TTL_S)
        except PdserveError as away:
            self._metrics.store_errors.labels("place").inc(len(placed))
            self._metrics.store_errors.labels("unplace").inc(len(gone))
            for attempt in (*(placement.attempt for placement in placed), *gone):
                log.debug(
                    "placement of %s was not written: %s", attempt, away, extra=log_fields(attempt)
                )
            until_s = self._clock.now_s() + TTL_S
            for attempt in gone[: max(0, MAX_REMOVALS - len(self._unwritten))]:
                self._unwritten.setdefault(attempt, until_s)
        else:
            for attempt in gone:
                self._unwritten.pop(attempt, None)
