"""The slots of a ring that hold the bytes of frames which were sent, pure.

A slot is free again when its frame was acknowledged: then the receiver has the bytes. A frame whose
connection broke is not acknowledged, and its receiver may still read the slot, or the network send
it: other bytes there would arrive as the frame's. So its slots are kept until its transfer is over,
after which nothing of it can land.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from kv_transfer.shared.block_arrays import Blocks
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.slots import Slots


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """A frame, by its number on its connection."""

    seq: int
    token: int
    slots: Blocks


class SentSlots:
    """Slots of frames that were not acknowledged, by connection."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._sent: dict[Peer, deque[_Sent]] = {}
        self._kept: dict[int, list[Blocks]] = {}

    def add(self, peer: Peer, seq: int, token: int, slots: Blocks) -> None:
        """Record a frame that is sent now, with a number above those before it."""
        self._sent.setdefault(peer, deque()).append(_Sent(seq, token, slots))

    def acknowledge(self, peer: Peer, consumed: int) -> None:
        """Record that the peer consumed the first `consumed` frames of its connection."""
        sent = self._sent.get(peer)
        while sent and sent[0].seq < consumed:
            self._slots.give_back(sent.popleft().slots)

    def break_off(self, peer: Peer, open_tokens: Collection[int]) -> None:
        """Record that a connection is over; `open_tokens` are the transfers that are not."""
        for one in self._sent.pop(peer, ()):
            if one.token in open_tokens:
                self._kept.setdefault(one.token, []).append(one.slots)
            else:
                self._slots.give_back(one.slots)

    def end(self, token: int) -> None:
        """Record that a transfer is over."""
        for slots in self._kept.pop(token, ()):
            self._slots.give_back(slots)
