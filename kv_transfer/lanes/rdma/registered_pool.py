"""The pool of a receiver that is written by RDMA: its memory keys, and the places of its slabs.

A slab that is fenced moves: it is registered at an address that was never used before, beside the
old one, and the old one is removed when the senders know the new one. The addresses are those of
aliases of the whole pool. A slab moves to the newest alias, or to the next one if it is there
already, so the slabs of one dead sender share an alias. An alias that all slabs have left is
dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kv_transfer.lanes.pool_memory import Pool
from kv_transfer.lanes.rdma.mooncake_engine import RdmaUnavailable
from kv_transfer.lanes.rdma.peer_batches import Engine
from kv_transfer.lanes.rdma.slabs import PlacedPool, SlabbedPool

logger = logging.getLogger("pdserve.kv_transfer")


class RegisteredPool:
    """Raises `RdmaUnavailable` when the pool cannot be registered."""

    def __init__(self, pool: Pool, shape: SlabbedPool, engine: Engine) -> None:
        self._shape = shape
        self._engine = engine
        self._memory = pool  # Registered memory must not be freed.
        self._first_start = pool.memory.address
        self._aliases = pool.memory.aliases()
        # For writers and readers: the start of the pool as each slab is addressed.
        self._starts = [self._first_start] * shape.num_slabs
        # The earlier start of a slab that moves.
        self._left: dict[int, int] = {}
        self._registered: set[tuple[int, int]] = set()
        self._newest = self._first_start
        self._spare = self._make_spare()
        self._register_all()
        # Every write asks for it, and it changes only with a fence.
        self._placed: PlacedPool | None = None

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(self._starts)

    @property
    def placed(self) -> PlacedPool:
        """The pool as this engine reads it: where each slab is registered now."""
        if self._placed is None:
            starts = (
                start if (slab, start) in self._registered else self._left.get(slab, start)
                for slab, start in enumerate(self._starts)
            )
            self._placed = PlacedPool(self._shape, tuple(starts))
        return self._placed

    @property
    def is_writable(self) -> bool:
        """Whether senders may write it: every slab is registered, and can be fenced."""
        present = {(slab, start) for slab, start in enumerate(self._starts)}
        return self._spare is not None and present <= self._registered

    def move(self, slab: int) -> None:
        """Register a slab at a further address; the present one stays until `fence`.

        Without enough locked memory for both, the new one follows in `fence`. Without a further
        address nothing changes.
        """
        self._placed = None
        if self._starts[slab] == self._newest:
            if self._spare is None:
                return
            self._newest = self._spare
            self._spare = self._make_spare()
        self._left[slab], self._starts[slab] = self._starts[slab], self._newest
        try:
            self._register(slab)
        except OSError as error:
            logger.info("slab %d of the KV pool cannot be registered twice: %s", slab, error)

    def fence(self, slab: int) -> None:
        """Remove the earlier key of a slab that moved, or its only key if it did not."""
        self._placed = None
        left = self._left.pop(slab, self._starts[slab])
        self._unregister(slab, left)
        if left == self._starts[slab]:
            logger.error("slab %d of the KV pool is lost to RDMA: no address is left", slab)
            return
        if left != self._first_start and left not in {*self._starts, *self._left.values()}:
            self._aliases.drop(left)
        if (slab, self._starts[slab]) not in self._registered:
            try:
                self._register(slab)
            except OSError as error:
                logger.error("slab %d of the KV pool is lost to RDMA: %s", slab, error)

    def close(self) -> None:
        """Remove all keys, as far as they can be. Idempotent."""
        for slab, start in sorted(self._registered):
            try:
                self._unregister(slab, start)
            except OSError:
                logger.exception("memory keys of the KV pool could not be removed")
        self._aliases.close()

    def _make_spare(self) -> int | None:
        """Return an address for the pool that was never used before; None if there is none."""
        try:
            return self._aliases.make()
        except OSError as error:
            level = logging.INFO if self._newest == self._first_start else logging.WARNING
            text = "nodes that connect from now on cannot send KV to this one by RDMA: %s"
            logger.log(level, text, error)
            return None

    def _register_all(self) -> None:
        try:
            for slab in range(self._shape.num_slabs):
                self._register(slab)
        except OSError as error:
            self.close()
            raise RdmaUnavailable(f"{error} (is the limit of locked memory too low?)") from None

    def _register(self, slab: int) -> None:
        """Register all of a slab's regions at its present address, or none. Raises `OSError`."""
        start = self._starts[slab]
        done: list[int] = []
        try:
            for offset, num_bytes in self._shape.regions(slab):
                self._engine.register(start + offset, num_bytes)
                done.append(start + offset)
        except OSError:
            self._remove(done)
            raise
        self._registered.add((slab, start))

    def _unregister(self, slab: int, start: int) -> None:
        if (slab, start) in self._registered:
            self._remove(start + offset for offset, _ in self._shape.regions(slab))
            self._registered.discard((slab, start))

    def _remove(self, addresses: Iterable[int]) -> None:
        """Remove keys. Raises `OSError` if one stays, when the others are removed."""
        errors: list[OSError] = []
        for address in addresses:
            try:
                self._engine.unregister(address)
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]
