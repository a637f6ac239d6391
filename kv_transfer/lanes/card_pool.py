"""A pool on a card: what connectors and lanes ask of it, and a thread that waits for its work.

Work is queued on the card and is over later. `Waits` tells the end of what it is given, in order,
so neither a step nor the connector's thread waits for a card.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import numpy.typing as npt

from common.errors import HandoffFailed
from kv_transfer.lanes.pool_memory import Bytes
from kv_transfer.shared.block_arrays import Blocks

logger = logging.getLogger("pdserve.kv_transfer")

CardSums = npt.NDArray[np.uint64]
"""One sum of each block's bytes in one plane after the other: `[num_planes, num_blocks]`."""

CLOSE_WITHIN_S = 5.0


class Queued(Protocol):
    """Work that was queued on a card."""

    def wait(self) -> CardSums | None:
        """Block until it is over; return the sums that were asked for.

        Called once. Raises `HandoffFailed` when the card failed.
        """


class OpenedPool(Protocol):
    """Another process's pool. It stays readable until it is closed, also when its owner dies."""

    def close(self) -> None: ...


class CardPool(Protocol):
    """A pool on a card, in the shape of its layout. Any thread may call it.

    Methods that begin something return at once and raise `HandoffFailed` when the card failed. A
    sum is of bytes alone, not of their place.
    """

    @property
    def num_blocks(self) -> int: ...

    def use_ring(self, memory: Bytes) -> None:
        """Take the memory of the ring for `begin_out` and `begin_in`, once: uint8 `[num_bytes]`.

        It begins on a page, and is a ring for this layout (`pool_memory.ring_pool`). It was not
        touched yet, unless a lane has registered it.
        """

    @property
    def shared_bytes(self) -> int:
        """The size of what `export` shares: the pool, and what is left of its last page."""

    def export(self) -> int:
        """Return a new descriptor by which another process opens the pool; the caller closes it.

        Raises `HandoffFailed` where the card's memory cannot be shared.
        """

    def open(self, descriptor: int, num_bytes: int, num_blocks: int) -> OpenedPool:
        """Map the pool behind a descriptor. Raises `HandoffFailed` where this card cannot read it.

        A descriptor of anything else is refused, as is one of fewer than `num_bytes`.
        """

    def begin_sums(self, layer: int, blocks: Blocks) -> Queued: ...

    def begin_copy(
        self,
        source: OpenedPool,
        layer: int,
        source_blocks: Blocks,
        blocks: Blocks,
        *,
        queue: int,
        is_behind_steps: bool,
        is_summed: bool,
    ) -> Queued:
        """Begin to copy blocks out of another pool, pairwise, with the sums of what is copied.

        Copies of one `queue`, a small number, are made in order. `is_behind_steps`: none of that
        queue begins before the steps that are queued now are over.
        """

    def begin_out(self, layer: int, blocks: Blocks, slots: Blocks) -> Queued:
        """Begin to copy blocks to slots of the ring, pairwise, when the layer is computed."""

    def begin_in(self, layer: int, slots: Blocks, blocks: Blocks) -> Queued:
        """Begin to copy slots of the ring to blocks, pairwise, after the steps queued now."""


OnEnd = Callable[[CardSums | None, HandoffFailed | None], None]


class Waits:
    """A thread that waits for queued work, in order, and tells its result or its error."""

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[tuple[Queued, OnEnd] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to wait for what is put."""
        self._thread.start()

    def put(self, queued: Queued, on_end: OnEnd) -> None:
        """Queue an operation; the thread calls `on_end` when it is over."""
        self._work.put((queued, on_end))

    def close(self) -> None:
        """Wait until all operations have ended and were reported. Idempotent."""
        if self._thread.ident is None:
            return
        self._work.put(None)
        self._thread.join(CLOSE_WITHIN_S)
        if self._thread.is_alive():
            logger.error("work on the card did not end within %g s", CLOSE_WITHIN_S)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            queued, on_end = work
            try:
                sums = queued.wait()
            except HandoffFailed as error:
                on_end(None, error)
            except Exception as error:  # A thread that ends would leave blocks held for ever.
                logger.exception("waiting for the card failed")
                on_end(None, HandoffFailed(f"waiting for the card failed: {error!r}"))
            else:
                on_end(sums, None)
            del work, queued, on_end
