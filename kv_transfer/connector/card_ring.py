"""A card's pool for lanes of the host: blocks pass through a ring of slots in host memory.

A lane reads and writes slots. Blocks are copied to them before it reads, and to the card after it
has written and the bytes were verified: until then a piece has not arrived. The card is given the
ring with the first copy: a node that hands KV over from card to card alone needs none.

Slots for sending and for receiving are apart. Those for receiving are free again when this card has
their blocks, whatever peers do, so two nodes that send to each other never wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from common.errors import HandoffFailed
from kv_transfer.connector.workers import Finish
from kv_transfer.lanes.card_pool import CardPool, CardSums, Queued, Waits
from kv_transfer.lanes.pool_memory import Bytes, Pool
from kv_transfer.shared.block_arrays import Blocks
from kv_transfer.shared.limits import receiving_slots
from kv_transfer.shared.ring_slots import Slots

OnCopied = Callable[[HandoffFailed | None], None]


class CardRing:
    """Copies between a card and slots, in order. The connector's thread owns it."""

    def __init__(self, card: CardPool, ring: Pool, post: Callable[[Finish], None]) -> None:
        """Take `post`, which has the connector's thread do something."""
        self._card, self._post = card, post
        self._memory: Bytes | None = ring.memory.bytes()
        num_receiving = receiving_slots(ring.num_blocks)
        num_sending = ring.num_blocks - num_receiving
        self.sending = Slots(0, num_sending)
        self.receiving = Slots(num_sending, num_receiving)
        self._out, self._in = Waits("pdserve-kv-out"), Waits("pdserve-kv-in")
        for waits in (self._out, self._in):
            waits.start()

    def copy_out(self, layer: int, blocks: Blocks, slots: Blocks, on_copied: OnCopied) -> None:
        """Copy blocks to slots; `on_copied` is called on the connector's thread."""
        self._begin(self._out, partial(self._card.begin_out, layer, blocks, slots), on_copied)

    def copy_in(self, layer: int, slots: Blocks, blocks: Blocks, on_copied: OnCopied) -> None:
        """Copy slots to blocks; `on_copied` is called on the connector's thread."""
        self._begin(self._in, partial(self._card.begin_in, layer, slots, blocks), on_copied)

    def close(self) -> None:
        """Wait until every copy has ended."""
        self._out.close()
        self._in.close()

    def _begin(self, waits: Waits, begin: Callable[[], Queued], on_copied: OnCopied) -> None:
        def told(sums: CardSums | None, error: HandoffFailed | None) -> None:
            self._post(partial(on_copied, error))

        try:
            if self._memory is not None:
                self._card.use_ring(self._memory)
                self._memory = None
            queued = begin()
        except HandoffFailed as error:
            on_copied(error)
        else:
            waits.put(queued, told)
