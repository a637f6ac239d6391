"""Renews the node's lease in the placement store, and takes none from a process that lives."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from common.errors import ConfigError, PlacementUnavailable, StaleEpoch
from common.nodes import NodeLoad, NodeRecord
from common.observing.clock import Clock
from common.observing.lasting_failure import LastingFailure
from placement.store import PlacementRefused, PlacementSlow, PlacementStore

log = logging.getLogger("pdserve.node")

RENEWALS_PER_LEASE = 4
"""How often a failure that lasts is logged again."""
_LOOKS_PER_LEASE = 16


async def refuse_second_life(
    store: PlacementStore,
    node_id: str,
    control_address: str,
    *,
    lease_s: float,
    clock: Clock,
    was_away: bool,
) -> None:
    """Return when no other process lives as `node_id`; `ConfigError` when one renews its lease.

    Two that restart by themselves would take the lease from each other for ever, and end each
    other's answers. The lease of a process that is dead is not renewed for half of its length,
    which is `lease_s` where its record does not tell. What has passed of that counts, unless the
    store `was_away`, where nobody renewed. One at this process's own `control_address`, whose port
    is bound here, is of a dead process at once.
    """
    try:
        nodes = [node.record for node in await store.live_nodes()]
        other = next((one for one in nodes if one.node_id == node_id), None)
        if other is None or other.control_address == control_address:
            return
        lease_s = other.lease_ms / 1000 or lease_s
        look_s = lease_s / _LOOKS_PER_LEASE
        # Latest and earliest, so that no slow call looks like a renewal.
        left_s = await store.lease_left_s(node_id)
        latest_end_s = clock.now_s() + left_s
        for _ in range(_LOOKS_PER_LEASE // 2):
            if not was_away and left_s <= lease_s / 2:
                return
            await asyncio.sleep(look_s)
            asked_at_s = clock.now_s()
            left_s = await store.lease_left_s(node_id)
            # A renewal adds a quarter, and a clock that is set in the store's machine less.
            if asked_at_s + left_s > latest_end_s + look_s:
                raise ConfigError(
                    f"another process serves as {node_id}, at {other.control_address}: wanted a "
                    "--node-id of its own, or the end of that process first"
                )
    except PlacementUnavailable as error:
        log.warning("whether another process serves as %s is not known: %s", node_id, error)


class LeaseKeeper:
    """Sends heartbeats. Each carries the whole record, so an emptied store fills again by itself.

    While the store is unavailable or refuses writes, the node serves on and retries; only new nodes
    cannot join. `failures` counts the heartbeats without success, by the error's code.
    """

    def __init__(
        self,
        store: PlacementStore,
        current_record: Callable[[], NodeRecord],
        current_load: Callable[[], NodeLoad],
        *,
        lease_s: float,
        clock: Clock,
    ) -> None:
        self._store = store
        self._current_record = current_record
        self._current_load = current_load
        self._lease_s = lease_s
        self.failures = Counter(
            {kind.code: 0 for kind in (PlacementUnavailable, PlacementSlow, PlacementRefused)}
        )
        self._failing = LastingFailure(clock)
        self._has_news = asyncio.Event()
        self._renewing = asyncio.Lock()

    def renew_soon(self) -> None:
        """Send the next heartbeat at once, because the load has changed significantly."""
        self._has_news.set()

    async def run(self) -> None:
        """Renew until cancelled. Raises `StaleEpoch` when a later incarnation holds the lease."""
        while True:
            self._has_news.clear()
            await self.renew()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / RENEWALS_PER_LEASE):
                    await self._has_news.wait()

    async def renew(self) -> None:
        """Send one heartbeat. Raises `StaleEpoch` when a later incarnation holds the lease."""
        # One at a time: an older record must not arrive after a newer one.
        async with self._renewing:
            await self._renew()

    async def claim(self, record: NodeRecord, others: Sequence[str]) -> bool:
        """Register with another role if one of `others` stays; see `PlacementStore.take_role`.

        Raises `PlacementUnavailable`. The role may have been written then, and where the call ends
        before the answer as its router does, so a heartbeat follows soon.
        """
        async with self._renewing:
            try:
                return await self._store.take_role(
                    record, self._current_load(), lease_s=self._lease_s, others=others
                )
            except (PlacementUnavailable, asyncio.CancelledError):
                self.renew_soon()
                raise

    async def _renew(self) -> None:
        record = self._current_record()
        try:
            await self._store.heartbeat(record, self._current_load(), lease_s=self._lease_s)
        except PlacementUnavailable as error:
            self._on_failure(error)
        except StaleEpoch:
            log.error(
                "another process took over as %s, so this one ends: this one was not heard for too "
                "long, or two have one --node-id",
                record.node_id,
            )
            raise
        else:
            if num_failed := self._failing.end():
                log.info("the lease is renewed again, after %d failures", num_failed)

    def _on_failure(self, error: PlacementUnavailable) -> None:
        self.failures[error.code] += 1
        if self._failing.is_news():
            log.warning(
                "the lease was not renewed (failure %d), serving on: %s", self._failing.num, error
            )

    async def leave(self) -> None:
        """Take the node out of placement."""
        try:
            await self._store.leave(self._current_record().incarnation)
        except PlacementUnavailable as error:
            log.warning("could not leave the placement store; the lease will expire: %s", error)
