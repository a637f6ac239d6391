"""Renews the node's lease in the placement store, with its record and load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from common.errors import StaleEpoch
from common.nodes import NodeLoad, NodeRecord
from placement.store import PlacementStore, PlacementUnavailable

log = logging.getLogger("pdserve.node")

RENEWALS_PER_LEASE = 4


class LeaseKeeper:
    """Sends heartbeats. Each carries the whole record, so an emptied store fills again by itself.

    While the store is unavailable the node serves on and retries; only new nodes cannot join.
    """

    def __init__(
        self,
        store: PlacementStore,
        record: NodeRecord,
        current_load: Callable[[], NodeLoad],
        *,
        lease_s: float,
    ) -> None:
        self._store = store
        self._record = record
        self._current_load = current_load
        self._lease_s = lease_s
        self._is_away = False
        self._has_news = asyncio.Event()

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
        try:
            await self._store.heartbeat(self._record, self._current_load(), lease_s=self._lease_s)
        except PlacementUnavailable as error:
            if not self._is_away:
                log.warning("the placement store is unavailable, serving without it: %s", error)
            self._is_away = True
        except StaleEpoch:
            log.error("another process took over as %s", self._record.node_id)
            raise
        else:
            if self._is_away:
                log.info("the placement store is available again")
            self._is_away = False

    async def leave(self) -> None:
        """Take the node out of placement."""
        try:
            await self._store.leave(self._record.incarnation)
        except PlacementUnavailable as error:
            log.warning("could not leave the placement store; the lease will expire: %s", error)
