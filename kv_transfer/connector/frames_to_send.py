"""The DATA frames that a connector is to send, by connection and in order, and their slots.

A frame is sent when it and all before it on its connection are ready. With a ring its blocks are
first copied from the card to slots, which it holds until it was acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np

from common.errors import HandoffFailed
from kv_transfer.connector.card_ring import CardRing, OnCopied
from kv_transfer.lanes.lane import Lane, Payload
from kv_transfer.sending.effects import SendChunk
from kv_transfer.sending.sent_slots import SentSlots
from kv_transfer.shared.block_arrays import Blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.lanes import PULLING_LANES
from kv_transfer.shared.ring_slots import Slots

CopyOut = Callable[[int, Blocks, Blocks, OnCopied], None]
"""Has blocks of a layer copied to slots, and says when."""
OnCopiedOut = Callable[[bool, HandoffFailed | None], None]


@dataclass(eq=False, slots=True)
class FrameToSend:
    """A frame; `payload` is None until it was read and hashed.

    `chunk` is what its lane reads: with a ring that is in slots, of which the frame holds `slots`
    until it is sent. `is_dropped`: its connection is over.
    """

    effect: SendChunk
    lane: Lane
    chunk: LayerChunk
    slots: Blocks | None = None
    payload: Payload | None = None
    is_dropped: bool = False


class FramesToSend:
    """The frames of all connections. The connector's thread owns it.

    `is_sending` says whether the pieces of a transfer are still needed.
    """

    def __init__(self, ring: CardRing | None, is_sending: Callable[[int], bool]) -> None:
        self._slots = ring.sending if ring is not None else Slots(0, 0)
        self._is_sending = is_sending
        self._waiting: dict[Peer, deque[FrameToSend]] = {}
        self._sent = SentSlots(self._slots)

    def add(self, effect: SendChunk, lane: Lane) -> FrameToSend:
        """Put a frame behind those of its connection."""
        frame = FrameToSend(effect, lane, effect.chunk)
        self._waiting.setdefault(effect.peer, deque()).append(frame)
        return frame

    def take_ready(self, frame: FrameToSend, payload: Payload) -> Iterator[FrameToSend]:
        """Record the payload of a frame; yield those of its connection that may be sent now."""
        frame.payload = payload
        if frame.is_dropped:
            self.give_back(frame)
            return
        # The queue is gone when the connection ends meanwhile.
        while waiting := self._waiting.get(frame.effect.peer):
            if waiting[0].payload is None:
                return
            yield waiting.popleft()

    def copy_out(self, copy: CopyOut, frame: FrameToSend, then: OnCopiedOut) -> None:
        """Copy a frame's blocks to slots when there are enough, unless it was dropped.

        What an earlier connection left in slots is read there. `then` is called with whether all
        is in slots, so that a lane may read it, or with the error of the card.
        """
        chunk = frame.chunk
        kept = self._sent.kept(frame.effect.lease_token, chunk)
        slots = np.zeros(len(chunk), np.uint32)
        is_missing = np.ones(len(chunk), bool)
        is_missing[list(kept)], slots[list(kept)] = False, list(kept.values())

        def on_slots(lent: Blocks) -> None:
            frame.slots, slots[is_missing] = lent, lent
            frame.chunk = LayerChunk(chunk.layer, chunk.ordinals, slots)
            if lent.size and self._is_needed(frame):
                copy(chunk.layer, chunk.source_blocks[is_missing], lent, on_copied)
            else:
                on_copied(None)

        def on_copied(error: HandoffFailed | None) -> None:
            then(self._is_needed(frame), error)

        self._slots.ask(int(is_missing.sum()), on_slots)

    def _is_needed(self, frame: FrameToSend) -> bool:
        return not frame.is_dropped and self._is_sending(frame.effect.lease_token)

    def give_back(self, frame: FrameToSend) -> None:
        """Free the slots of a frame that is not sent with its bytes."""
        slots, frame.slots = frame.slots, None
        if slots is not None:
            self._slots.give_back(slots)

    def on_sent(self, frame: FrameToSend) -> bool:
        """Keep the slots of a frame that is sent now; return whether it has any."""
        if frame.slots is None:
            return False
        effect, slots = frame.effect, frame.chunk.source_blocks
        self._sent.add(
            effect.peer, effect.seq, effect.lease_token, effect.chunk, slots,
            is_pulled=frame.lane.name in PULLING_LANES,
        )  # fmt: skip
        return True

    def acknowledge(self, peer: Peer, consumed: int) -> None:
        """Free the slots of the first `consumed` frames of a connection."""
        self._sent.acknowledge(peer, consumed)

    def drop(self, peer: Peer, open_tokens: Collection[int]) -> None:
        """Forget the frames of a connection that is over; `open_tokens` are open transfers."""
        for frame in self._waiting.pop(peer, ()):
            frame.is_dropped = True
            if frame.payload is not None:  # Nobody reads its slots any more.
                self.give_back(frame)
        self._sent.break_off(peer, open_tokens)

    def on_ended(self, token: int) -> None:
        """Free what was kept for a transfer that is over."""
        self._sent.end(token)
