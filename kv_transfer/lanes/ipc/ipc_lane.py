"""The lane between cards of one host: both ends.

The receiver maps the sender's pool (`descriptors`) and its card copies blocks out of it, summing
what it copies. The sender's card sums the same blocks; nothing passes through the host. Copies end
later, and `Waits` tells when; those of one transfer are made in order, those of others beside them.
The first copy of a transfer begins when the steps that are queued then are over: they may still
write a block that was given to the transfer. Later ones follow it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgpack  # type: ignore[import-untyped]
import numpy as np

from common.errors import HandoffFailed, PeerProtocolError
from common.kv.kv_layout import KVLayout
from kv_transfer.lanes.card_pool import CardPool, CardSums, OpenedPool, Waits
from kv_transfer.lanes.ipc.descriptors import NONCE_BYTES, OfferedDescriptor, fetch_descriptor
from kv_transfer.lanes.lane import Copied, OnPayload, Payload
from kv_transfer.lanes.pieces import NO_SUMS, Sums, piece_seed
from kv_transfer.lanes.pool_memory import Pool, SourceMemory
from kv_transfer.receiving.effects import Write
from kv_transfer.shared.block_arrays import Blocks, as_blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.transport import Parts

logger = logging.getLogger("pdserve.kv_transfer")

VERSION = 1
NUM_QUEUES = 4
"""Copies of so many transfers run beside each other; each queue has a thread that waits."""
_MOST_LEASES = 4096
_LARGEST_INT = (1 << 63) - 1
_PLACE_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Odd, so that no two places add the same."""


def placed_sums(sums: CardSums, layer: int, ordinals: Blocks) -> Sums:
    """Return a card's sums with the blocks' places in their ticket added, as they are sent."""
    seeds = ordinals.astype(np.uint64) + np.uint64(piece_seed(layer, 1))
    return (sums + _PLACE_FACTOR * seeds).astype("<u8", copy=False).tobytes()


@dataclass(frozen=True, slots=True)
class _Source:
    """A sender's pool."""

    memory: OpenedPool
    num_blocks: int


class IpcLane:
    """A `lane.LateCopyingLane` and a `lane.LateSummingLane`, from and to the pool on `card`."""

    name = "ipc"

    def __init__(self, layout: KVLayout, card: CardPool, *, is_offered: bool) -> None:
        """Make the lane; `is_offered`: others may read this pool, so that this end can send.

        Raises `HandoffFailed` where the pool cannot be shared.
        """
        self._layout, self._card = layout, card
        self._offered: OfferedDescriptor | None = None
        self._offer: bytes | None = None
        if is_offered:
            try:
                self._offered = OfferedDescriptor(card.export())
            except OSError as error:
                raise HandoffFailed(f"card memory cannot be offered: {error}") from error
            self._offer = msgpack.packb(
                [VERSION, self._offered.nonce, card.shared_bytes, card.num_blocks]
            )
        # The last one is read; a session that came again may still be copied from before.
        self._sources_of: dict[bytes, list[_Source]] = {}
        self._begun: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._wake: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._copied: list[Copied] = []
        self._sums = Waits("pdserve-kv-sums")
        self._copies = [Waits(f"pdserve-kv-copy-{place}") for place in range(NUM_QUEUES)]

    def attach(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        for waits in (self._sums, *self._copies):
            waits.start()
        if self._offered is not None:
            self._offered.start()

    # The sender's end.

    def offer(self, peer: Peer) -> bytes | None:
        return self._offer

    def accept(self, peer: Peer, reply: bytes) -> None:
        logger.info("KV to %s goes from card to card", peer)

    def payload(self, memory: SourceMemory, chunk: LayerChunk, *, is_summed: bool) -> Payload:
        blocks = chunk.source_blocks
        sums = self._card.begin_sums(chunk.layer, blocks).wait() if is_summed else None
        return _payload(chunk, sums)

    def begin_payload(self, chunk: LayerChunk, on_payload: OnPayload, *, is_summed: bool) -> None:
        def told(sums: CardSums | None, error: HandoffFailed | None) -> None:
            on_payload(_payload(chunk, sums if is_summed else None) if error is None else error)

        self._sums.put(self._card.begin_sums(chunk.layer, chunk.source_blocks), told)

    def forget(self, peer: Peer) -> None:
        pass

    # The receiver's end.

    def open(self, session: bytes, offer: bytes) -> bytes | None:
        try:
            source = self._map(offer)
        except HandoffFailed as error:
            logger.info("card memory was offered and cannot be used: %s", error)
            return None
        self._sources_of.setdefault(session, []).append(source)
        return b""

    def _map(self, offer: bytes) -> _Source:
        """Return the pool that is offered. Raises `HandoffFailed`, whatever `offer` is."""
        nonce, num_bytes, num_blocks = _unpacked(offer)
        if num_blocks * self._layout.block_bytes > num_bytes:
            raise HandoffFailed(
                f"{num_bytes} bytes are not {num_blocks} blocks of {self._layout.block_bytes}"
            )
        descriptor = fetch_descriptor(nonce)
        try:
            return _Source(self._card.open(descriptor, num_bytes, num_blocks), num_blocks)
        finally:
            os.close(descriptor)

    def begin_copy(self, write: Write, parts: Parts, pool: Pool) -> None:
        """See `LateCopyingLane`. Raises `PeerProtocolError` for blocks that the sender lacks."""
        if write.session not in self._sources_of:
            raise PeerProtocolError("DATA without card memory: wanted the sender's pool")
        source = self._sources_of[write.session][-1]
        last = max(write.data.source_blocks)
        if last >= source.num_blocks:
            raise PeerProtocolError(
                f"source block {last}: the sender's pool has {source.num_blocks}"
            )
        place = write.data.lease_token % NUM_QUEUES
        try:
            queued = self._card.begin_copy(
                source.memory,
                write.data.layer,
                as_blocks(write.data.source_blocks),
                write.target_blocks,
                queue=place,
                is_behind_steps=self._is_first(write),
                is_summed=write.verify != "off",
            )
        except HandoffFailed as error:
            self._on_copied(write, None, error)
        else:
            self._copies[place].put(queued, partial(self._on_copied, write))

    def _is_first(self, write: Write) -> bool:
        """Return whether a landing's copies begin with this one.

        Of many landings only the latest are known; treating one as new costs a wait only.
        """
        lease = (write.data.lease_token, write.data.generation)
        if lease in self._begun:
            return False
        self._begun[lease] = None
        if len(self._begun) > _MOST_LEASES:
            self._begun.popitem(last=False)
        return True

    def _on_copied(self, write: Write, sums: CardSums | None, error: HandoffFailed | None) -> None:
        """Record the end of a copy; called on any thread."""
        found = NO_SUMS
        if sums is not None:
            found = placed_sums(sums, write.data.layer, as_blocks(write.data.ordinals))
        with self._lock:
            self._copied.append(Copied(write, found, error))
        self._wake()

    def take_copied(self) -> list[Copied]:
        with self._lock:
            copied, self._copied = self._copied, []
            return copied

    def drop(self, session: bytes) -> None:
        for source in self._sources_of.pop(session, ()):
            source.memory.close()

    def close(self) -> None:
        for waits in (self._sums, *self._copies):
            waits.close()
        for session in list(self._sources_of):
            self.drop(session)
        if self._offered is not None:
            self._offered.close()


def _payload(chunk: LayerChunk, sums: CardSums | None) -> Payload:
    placed = NO_SUMS if sums is None else placed_sums(sums, chunk.layer, chunk.ordinals)
    return Payload(source_blocks=tuple(chunk.source_blocks.tolist()), sums=placed)


def _unpacked(offer: bytes) -> tuple[bytes, int, int]:
    """Return nonce, bytes and blocks of an offer. Raises `HandoffFailed`, whatever it is."""
    try:
        fields = msgpack.unpackb(offer)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        raise HandoffFailed("the offer is not msgpack") from None
    match fields:
        case [version, bytes(nonce), int(num_bytes), int(num_blocks)] if (
            version == VERSION
            and len(nonce) == NONCE_BYTES
            and 0 < num_blocks <= num_bytes <= _LARGEST_INT
        ):
            return nonce, num_bytes, num_blocks
    raise HandoffFailed(f"the offer is not one of version {VERSION}: {offer!r:.80}")
