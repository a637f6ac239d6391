"""The DATA frames that a connector is to send, by connection and in order, and their slots.

A frame is sent when it and all before it on its connection are ready. With a ring its blocks are
first copied from the card to slots, which it holds until it was acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

from common.errors import HandoffFailed
from kv_transfer.connector.card_ring import CardRing
from kv_transfer.lanes.lane import Lane, Payload
from kv_transfer.sending.effects import SendChunk
from kv_transfer.sending.sent_slots import SentSlots
from kv_transfer.shared.block_arrays import Blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.slots import Slots


@dataclass(eq=False, slots=True)
class FrameToSend:
    """A frame; `payload` is None until it was read and hashed.

    `chunk` is what its lane reads: with a ring it is in `slots`. `is_dropped`: its connection is
    over.
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

    def copy_out(
        self, ring: CardRing, frame: FrameToSend, then: Callable[[bool, HandoffFailed | None], None]
    ) -> None:
        """Copy a frame's blocks to slots when there are enough, unless it is needed no more.

        `then` is called with whether it is in them, so that a lane may read it, or with the error
        of the card.
        """
        self._slots.ask(len(frame.chunk), partial(self._on_slots, ring, frame, then))

    def _on_slots(
        self,
        ring: CardRing,
        frame: FrameToSend,
        then: Callable[[bool, HandoffFailed | None], None],
        slots: Blocks,
    ) -> None:
        frame.slots = slots

        def on_copied(error: HandoffFailed | None) -> None:
            is_needed = self._is_needed(frame)
            if not is_needed:
                self.give_back(frame)
            then(is_needed, error)

        if not self._is_needed(frame):
            on_copied(None)
            return
        layer, blocks = frame.chunk.layer, frame.chunk.source_blocks
        frame.chunk = LayerChunk(layer, frame.chunk.ordinals, slots)
        ring.copy_out(layer, blocks, slots, on_copied)

    def _is_needed(self, frame: FrameToSend) -> bool:
        return not frame.is_dropped and self._is_sending(frame.effect.lease_token)

    def give_back(self, frame: FrameToSend) -> None:
        """Free the slots of a frame that is not sent with its bytes."""
        slots, frame.slots = frame.slots, None
        if slots is not None:
            self._slots.give_back(slots)

    def on_sent(self, frame: FrameToSend) -> bool:
        """Keep the slots of a frame that is sent now; return whether it has any."""
        slots, effect = frame.slots, frame.effect
        if slots is not None:
            self._sent.add(effect.peer, effect.seq, effect.lease_token, slots)
        return slots is not None

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
