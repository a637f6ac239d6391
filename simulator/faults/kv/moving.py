"""Types of the modules that move bytes: their end, their frames, and pieces that landed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from common.errors import InternalError
from common.ids import Incarnation
from kv_transfer.receiving.effects import ReceiverEffect, Write
from kv_transfer.receiving.machine import Receiver
from kv_transfer.sending.effects import SendChunk, SenderEffect
from kv_transfer.sending.machine import Sender
from kv_transfer.shared.effects import Peer
from kv_transfer.wire import frames
from simulator.faults.contents import KVMemory, Numbers, Slots
from simulator.faults.hosts import ProcessClock
from simulator.faults.kv.flights import Flights

_SUM_BYTES = 16
"""Bytes of the sums of one block: one sum of its keys and one of its values."""


@dataclass(slots=True, eq=False)
class Parcel:
    """A frame on its way.

    DATA with bytes has the numbers of its blocks, or with `is_in_ring` of its slots, and their
    contents at the time of sending.
    """

    frame: frames.Frame
    blocks: Sequence[int] = ()
    values: Numbers | None = None
    is_in_ring: bool = False


class MovingEnd(Protocol):
    """The part of a node's connector that the modules which move bytes call."""

    me: Incarnation
    clock: ProcessClock
    flights: Flights
    memory: KVMemory
    sender: Sender
    receiver: Receiver
    batch_bytes: int
    """The most bytes that are moved in one batch."""

    def send(self, peer: Peer, parcel: Parcel) -> None:
        """Send a frame on the connection to `peer`, if there is one."""

    def send_without_bytes(self, effect: SendChunk) -> None:
        """Send the header of a chunk whose transfer is over; DATA is numbered."""

    def lose_link(self, peer: Peer) -> None:
        """Close a connection whose lane has failed, or that is to have another lane."""

    def perform(self, effects: Iterable[SenderEffect | ReceiverEffect]) -> None:
        """Perform the effects of a machine, in order."""

    def end_write(self, write: Write, effects: Iterable[ReceiverEffect]) -> None:
        """Perform the receiver's effects at the end of a write, maybe the last of a session."""

    def bytes_in(self, num_blocks: int) -> int:
        """Return the size of blocks in one layer."""
        ...

    def put(self, layer: int, blocks: Sequence[int], values: Numbers) -> None:
        """Write blocks. Raises `InternalError` where they may have been used again."""

    def record(self, write: Write, parcel: Parcel, damaged: frozenset[int]) -> None:
        """Report to the receiver that a write is in the pool."""

    def end_of(self, me: Incarnation) -> MovingEnd:
        """Return the connector of another process, which may be dead."""
        ...

    def put_written(self, effect: SendChunk, addresses: Sequence[int], values: Numbers) -> bool:
        """Write the blocks that another node sends; return False if the address was removed.

        Raises `InternalError` where the blocks are not held for this lease.
        """
        ...

    def bytes_of(self, parcel: Parcel, layer: int) -> Numbers:
        """Return the bytes that follow a header of this node, as they are when they arrive."""
        ...

    def slots_at(self, slots: Sequence[int]) -> Numbers:
        """Return the contents of slots of the ring."""
        ...

    def damaged_in(
        self, write: Write, parcel: Parcel, source: MovingEnd, values: Numbers
    ) -> frozenset[int]:
        """Return the ordinals of the blocks that differ from those sent.

        Raises `InternalError` where the sender has changed blocks that it still sends.
        """
        ...


def data_of(
    effect: SendChunk,
    *,
    runs: Sequence[int] = (),
    source_blocks: Sequence[int] = (),
    is_summed: bool = False,
) -> frames.Data:
    """Return the DATA frame of a chunk; without a description of its bytes it has none."""
    return frames.Data(
        seq=effect.seq,
        lease_token=effect.lease_token,
        generation=effect.generation,
        layer=effect.chunk.layer,
        ordinals=tuple(effect.chunk.ordinals.tolist()),
        runs=tuple(runs),
        source_blocks=tuple(source_blocks),
        sums=bytes(_SUM_BYTES * len(effect.chunk)) if is_summed else b"",
        wants_ack=effect.wants_ack,
    )


class SentPieces:
    """The pieces that senders of open landings have sent, by their block."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._of_lease: dict[int, dict[tuple[int, int], Slots]] = {}

    def add(self, write: Write, values: Numbers, but_for: Set[int] = frozenset()) -> None:
        """Record the arrival of a write's pieces; `values` are those that were sent."""
        data = write.data
        of_lease = self._of_lease.setdefault(data.lease_token, {})
        blocks = write.target_blocks.tolist()
        for ordinal, block, slots in zip(data.ordinals, blocks, values, strict=True):
            if ordinal not in but_for:
                of_lease[data.layer, block] = slots

    def check(self, me: object, lease_token: int) -> None:
        """Raise `InternalError` where pieces that have landed differ from those sent."""
        for (layer, block), sent in self._of_lease.get(lease_token, {}).items():
            if self._memory.read(layer, [block]) != [sent]:
                raise InternalError(f"{me} lands block {block} with something else in it")

    def forget(self, lease_token: int) -> None:
        """Forget a landing that is over."""
        self._of_lease.pop(lease_token, None)
