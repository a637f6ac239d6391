"""A card's pool for lanes of the host, which read and write its mirror in host memory.

Blocks are copied to the mirror before such a lane reads them, and to the card after it has written
them and they were verified: until then a piece has not arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from common.errors import HandoffFailed
from kv_transfer.connector.workers import Finish
from kv_transfer.lanes.card_pool import CardPool, CardSums, Queued, Waits
from kv_transfer.shared.block_arrays import Blocks
from kv_transfer.shared.lanes import CARD_LANES

OnCopied = Callable[[HandoffFailed | None], None]


class CardMirror:
    """Copies of blocks in both directions, in order. The connector's thread owns it."""

    def __init__(self, card: CardPool, post: Callable[[Finish], None]) -> None:
        """Take `post`, which has the connector's thread do something."""
        self._card, self._post = card, post
        self._out, self._in = Waits("pdserve-kv-out"), Waits("pdserve-kv-in")
        for waits in (self._out, self._in):
            waits.start()

    @staticmethod
    def serves(lane: str) -> bool:
        """Return whether a lane reads and writes the mirror, and not the card."""
        return lane not in CARD_LANES

    def copy_out(self, layer: int, blocks: Blocks, on_copied: OnCopied) -> None:
        """Copy blocks to the mirror; `on_copied` is called on the connector's thread."""
        self._begin(self._out, self._card.begin_out, layer, blocks, on_copied)

    def copy_in(self, layer: int, blocks: Blocks, on_copied: OnCopied) -> None:
        """Copy blocks to the card; `on_copied` is called on the connector's thread."""
        self._begin(self._in, self._card.begin_in, layer, blocks, on_copied)

    def close(self) -> None:
        """Wait until every copy has ended."""
        self._out.close()
        self._in.close()

    def _begin(
        self,
        waits: Waits,
        begin: Callable[[int, Blocks], Queued],
        layer: int,
        blocks: Blocks,
        on_copied: OnCopied,
    ) -> None:
        def told(sums: CardSums | None, error: HandoffFailed | None) -> None:
            self._post(partial(on_copied, error))

        try:
            queued = begin(layer, blocks)
        except HandoffFailed as error:
            on_copied(error)
        else:
            waits.put(queued, told)
