"""How a node that drains hands its prefix cache over before it leaves. Pure.

When it is empty it offers the blocks that were used last, once: those of its pool, and behind them
what only its host memory has. A router chooses a node that stays, which pulls what it lacks of
them, in parts. This node stays as long as it is asked, for a moment
after that, and no longer than `MOST_S`: what is not asked for by then is lost.
"""

from __future__ import annotations

from engine.core.prefix_transfers import PrefixTransfers
from node.flow.messages import Effect, OfferBlocks

MOST_BLOCKS = 8192
UNASKED_S = 1.0
"""A node that is not asked leaves after this time."""
MOST_S = 4.0
"""Less than what a drain lasts beyond its time-out."""


class HandOver:
    """The offer of one node, and for how long it stays because of it."""

    def __init__(self, transfers: PrefixTransfers) -> None:
        self._transfers = transfers
        self._ends_at_s: float | None = None
        self._unasked_at_s = 0.0

    def begin(self, now_s: float) -> list[Effect]:
        """Offer what is in memory, if anything is; the first call counts."""
        if self._ends_at_s is not None:
            return []
        block_hashes = self._transfers.latest(MOST_BLOCKS)
        self._ends_at_s = now_s + (MOST_S if block_hashes else 0.0)
        self._unasked_at_s = now_s + UNASKED_S
        return [OfferBlocks(block_hashes)] if block_hashes else []

    def on_asked(self, now_s: float) -> None:
        """Stay for a moment longer: a pull came, or its transfer has ended."""
        self._unasked_at_s = now_s + UNASKED_S

    @property
    def ends_at_s(self) -> float | None:
        """The time at which the node leaves if nobody asks; None: nothing was offered yet."""
        return None if self._ends_at_s is None else min(self._ends_at_s, self._unasked_at_s)
