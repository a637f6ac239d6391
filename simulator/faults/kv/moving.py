"""What the parts that move bytes share: their end, their frames, and pieces that landed."""

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
"""The sums of one block: those of its keys and of its values."""


@dataclass(slots=True, eq=False)
class Parcel:
    """A frame on its way. DATA with bytes has the blocks that they are in, or, with `is_in_ring`,
    the slots; and what these held when it was sent."""

    frame: frames.Frame
    blocks: Sequence[int] = ()
    values: Numbers | None = None
    is_in_ring: bool = False


class MovingEnd(Protocol):
    """What the parts that move bytes see of a node's connector, their own or another one's."""

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
        """Do what a machine asks for, in order."""

    def end_write(self, write: Write, effects: Iterable[ReceiverEffect]) -> None:
        """Do what the receiver asks for at the end of a write; it may be the last of a session."""

    def bytes_in(self, num_blocks: int) -> int:
        """Return the size of blocks in one layer."""
        ...

    def put(self, layer: int, blocks: Sequence[int], values: Numbers) -> None:
        """Write blocks. Raises `InternalError` where they may have been used again."""

    def record(self, write: Write, parcel: Parcel, damaged: frozenset[int]) -> None:
        """Tell the receiver that a write is in the pool."""

    def end_of(self, me: Incarnation) -> MovingEnd:
        """Return the connector of another process, which may be dead."""
        ...

    def put_written(self, effect: SendChunk, addresses: Sequence[int], values: Numbers) -> bool:
        """Take what another node writes; return False where its address was removed.

        Raises `InternalError` where the blocks are not held for this lease.
        """
        ...

    def bytes_of(self, parcel: Parcel, layer: int) -> Numbers:
        """Return the bytes that follow a header of this node, as they are when they arrive."""
        ...

    def slots_at(self, slots: Sequence[int]) -> Numbers:
        """Return what slots of the ring hold."""
        ...

    def damaged_in(
        self, write: Write, parcel: Parcel, source: MovingEnd, values: Numbers
    ) -> frozenset[int]:
        """Return the ordinals of blocks that are not what was sent.

        Raises `InternalError` where the sender has changed what it still sends.
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
    """What the senders of open landings have sent, by the block that it is for."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._of_lease: dict[int, dict[tuple[int, int], Slots]] = {}

    def add(self, write: Write, values: Numbers, but_for: Set[int] = frozenset()) -> None:
        """Record that pieces of a write count as arrived; `values` are those that were sent."""
        data = write.data
        of_lease = self._of_lease.setdefault(data.lease_token, {})
        blocks = write.target_blocks.tolist()
        for ordinal, block, slots in zip(data.ordinals, blocks, values, strict=True):
            if ordinal not in but_for:
                of_lease[data.layer, block] = slots

    def check(self, me: object, lease_token: int) -> None:
        """Raise `InternalError` where what has landed is not what was sent."""
        for (layer, block), sent in self._of_lease.get(lease_token, {}).items():
            if self._memory.read(layer, [block]) != [sent]:
                raise InternalError(f"{me} lands block {block} with something else in it")

    def forget(self, lease_token: int) -> None:
        """Forget a landing that is over."""
        self._of_lease.pop(lease_token, None)
