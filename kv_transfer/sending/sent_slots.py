"""The slots of a ring that hold the bytes of frames which were sent, pure.

A slot is free again when its frame was acknowledged: then the receiver has the bytes. A frame whose
connection broke is not acknowledged, and its receiver may still read the slot, or the network send
it: other bytes there might arrive as the frame's. So its slots are kept for the same pieces, which
are sent again out of them, and are free when that was acknowledged: from then on the receiver drops
what still comes of the first connection. Where the receiver itself reads the slots, it may have
begun before; these are kept until the transfer is over, after which nothing of it can land.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kv_transfer.shared.block_arrays import Blocks, as_blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.ring_slots import Slots

Piece = tuple[int, int]
"""Layer, and ordinal of the block in its ticket."""


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """A frame on its way; the slots of its blocks that are `own` are free with it."""

    seq: int
    token: int
    chunk: LayerChunk
    slots: Blocks
    own: npt.NDArray[np.bool_]
    is_pulled: bool

    def own_slots(self) -> dict[Piece, int]:
        pieces = ((self.chunk.layer, ordinal) for ordinal in self.chunk.ordinals[self.own].tolist())
        return dict(zip(pieces, self.slots[self.own].tolist(), strict=True))


@dataclass(slots=True)
class _Kept:
    """Slots of a transfer's pieces whose connection broke; the `read` ones are kept to its end."""

    slot_of: dict[Piece, int] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)


class SentSlots:
    """Slots of frames that were not acknowledged, by connection."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._sent: dict[Peer, deque[_Sent]] = {}
        self._kept: dict[int, _Kept] = {}

    def kept(self, token: int, chunk: LayerChunk) -> dict[int, int]:
        """Return the slots that have blocks of a chunk already, by their index in it."""
        kept = self._kept.get(token)
        if kept is None:
            return {}
        found = (kept.slot_of.get((chunk.layer, one)) for one in chunk.ordinals.tolist())
        return {index: slot for index, slot in enumerate(found) if slot is not None}

    def add(
        self, peer: Peer, seq: int, token: int, chunk: LayerChunk, slots: Blocks, *, is_pulled: bool
    ) -> None:
        """Record a frame that is sent now, with a number above those before it.

        `slots` has each block of the chunk; with `is_pulled` its receiver reads them.
        """
        own = np.ones(slots.size, bool)
        kept = self._kept.get(token)
        for index, slot in self.kept(token, chunk).items():
            assert kept is not None
            if slot in kept.read:
                own[index] = False
            else:
                del kept.slot_of[chunk.layer, int(chunk.ordinals[index])]
        sent = _Sent(seq, token, chunk, slots, own, is_pulled)
        self._sent.setdefault(peer, deque()).append(sent)

    def acknowledge(self, peer: Peer, consumed: int) -> None:
        """Record that the peer consumed the first `consumed` frames of its connection."""
        sent = self._sent.get(peer)
        while sent and sent[0].seq < consumed:
            one = sent.popleft()
            self._slots.give_back(one.slots[one.own])

    def break_off(self, peer: Peer, open_tokens: Collection[int]) -> None:
        """Record that a connection is over; `open_tokens` are the transfers that are not."""
        for one in self._sent.pop(peer, ()):
            if one.token in open_tokens:
                self._keep(one)
            else:
                self._slots.give_back(one.slots[one.own])

    def _keep(self, sent: _Sent) -> None:
        kept = self._kept.setdefault(sent.token, _Kept())
        for piece, slot in sent.own_slots().items():
            # A piece that was asked for again may have been on its way twice.
            is_first = kept.slot_of.setdefault(piece, slot) == slot
            if sent.is_pulled or not is_first:
                kept.read.add(slot)

    def end(self, token: int) -> None:
        """Record that a transfer is over."""
        kept = self._kept.pop(token, None)
        if kept is not None:
            self._slots.give_back(as_blocks(sorted(kept.read.union(kept.slot_of.values()))))
