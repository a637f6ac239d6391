"""Lanes: how the bytes of DATA frames get from a sender's pool into a receiver's.

Every pair of nodes has one control connection (`transport`), in order, with all frames. HELLO and
WELCOME agree on the lane for the bytes: after the header (`inline_lane`), between cards (`ipc`),
through shared memory (`shm`) or by RDMA (`rdma`, `rdma_read`). A lane object serves one connector,
in both directions, on the connector's thread unless a method says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from common.errors import HandoffFailed
from kv_transfer.lanes.pieces import NO_SUMS, Sums
from kv_transfer.lanes.pool_memory import Pool, SourceMemory
from kv_transfer.receiving.effects import Write
from kv_transfer.shared.block_arrays import Blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.transport import Parts


@dataclass(frozen=True, slots=True)
class Payload:
    """The description of a DATA frame's bytes (see `frames.Data`), and the parts after its header.

    `sums` are the piece sums of the chunk, if they were asked for.
    """

    runs: tuple[int, ...] = ()
    source_blocks: tuple[int, ...] = ()
    parts: Parts = ()
    sums: Sums = NO_SUMS


class Lane(Protocol):
    """Both ends of a lane. `name` is one of `shared.lanes.LANES_BY_SPEED`."""

    @property
    def name(self) -> str: ...

    # The sender's end.

    def offer(self, peer: Peer) -> bytes | None:
        """Return this end's data for HELLO to `peer`, at most `MAX_LANE_BYTES`; None: not now."""

    def accept(self, peer: Peer, reply: bytes) -> None:
        """Use this lane to `peer`, which chose it; `reply` is from its end.

        Raises `HandoffFailed` if that is not possible.
        """

    def payload(self, memory: SourceMemory, chunk: LayerChunk, *, is_summed: bool) -> Payload:
        """Return the chunk's bytes out of this end's `memory`; nothing long is copied.

        Of `POOL_ONLY_LANES` chunks of the pool alone are asked.
        """

    def forget(self, peer: Peer) -> None:
        """Drop what was queued for `peer`, whose connection is gone."""

    # The receiver's end.

    def open(self, session: bytes, offer: bytes) -> bytes | None:
        """Return the reply to a sender that offers this lane; None if the pair cannot use it.

        `offer` may come from any sender and is not trusted.
        """

    def drop(self, session: bytes) -> None:
        """Release what the session used; it is over."""

    def close(self) -> None:
        """Release everything, in bounded time. Afterwards no sender can write the pool."""


class CopyingLane(Lane, Protocol):
    """A lane on which the receiver copies the bytes into its pool, and waits for it."""

    def copy(self, write: Write, parts: Parts, pool: Pool) -> Sums:
        """Copy the blocks of `write` into `pool`; called on any thread, without a lock.

        Several may run at once, mostly for different pieces: one that is sent again may overlap its
        first copy. Nothing else writes the pool. `parts` followed the header. Returns the sums of
        the bytes that were copied, even if their source changed meanwhile, unless `write.verify` is
        off. Raises `PeerProtocolError`, before `pool` is touched.
        """


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy that was begun is over: nothing of it reaches the pool any more.

    `sums` are those of the bytes that were copied, unless `write.verify` is off. With `error` the
    copy failed, and what the target blocks hold is unknown.
    """

    write: Write
    sums: Sums = NO_SUMS
    error: HandoffFailed | None = None


@runtime_checkable
class LateCopyingLane(Lane, Protocol):
    """A lane whose copies are completed later, for example by a device's engine.

    The frame of a copy is acknowledged, its landing lands and the blocks of one that was revoked
    are released when the copy is over, and not before. Where the receiver has a ring, copies go to
    its slots, but on `CARD_LANES`; a copy to slots that fails ends the connection, and its landing
    goes on over the next one.
    """

    def attach(self, wake: Callable[[], None]) -> None:
        """Store `wake`, which is called, from any thread, when `take_copied` has something."""

    def begin_copy(self, write: Write, parts: Parts, pool: Pool) -> None:
        """Begin to copy the blocks of `write` into `pool`; returns at once.

        `parts`, the source and the pool's blocks may be used until the copy is over, whatever
        becomes of its landing; `drop` of its session follows after that. Raises
        `PeerProtocolError`, before `pool` is touched.
        """

    def take_copied(self) -> list[Copied]:
        """Return the copies that are over, each once, in any order. `close` waits for the rest."""


OnPayload = Callable[[Payload | HandoffFailed], None]


@runtime_checkable
class LateSummingLane(Lane, Protocol):
    """A lane on which a sender's sums are known later, for example because a device computes them.

    A frame is sent when its sums are known, in the order of the frames.
    """

    def begin_payload(self, chunk: LayerChunk, on_payload: OnPayload, *, is_summed: bool) -> None:
        """Begin to sum a chunk; `on_payload` is called, on any thread, with the payload.

        By then the chunk is computed, which its payload waits for also if it has no sums. It is
        called with the error if the sums cannot be had. Raises `HandoffFailed` if that is known at
        once.
        """


@dataclass(frozen=True, slots=True)
class Ready:
    """Earlier writes to `peer` are done: `parts` may be sent now."""

    peer: Peer
    parts: Parts


@dataclass(frozen=True, slots=True)
class Broken:
    """A write to `peer` failed, and may continue: the lane dropped what was queued for it."""

    peer: Peer
    error: HandoffFailed


class LaneFull(HandoffFailed):
    """The lane serves as many peers as it can."""


@runtime_checkable
class OneSidedLane(Lane, Protocol):
    """A lane on which the sender writes the receiver's pool itself (`ONE_SIDED_LANES`).

    It writes on threads of its own. The receiver's pool is divided into slabs of `blocks_per_slab`
    blocks, in every layer, which are fenced one by one: see `core.slab_fences`.
    """

    @property
    def blocks_per_slab(self) -> int: ...

    def attach(self, wake: Callable[[], None]) -> None:
        """Store `wake`, which is called, from any thread, when `take_ready` has something.

        The connector calls this once.
        """

    def is_full_for(self, peer: Peer) -> bool:
        """Return whether `offer` makes none because others take all the room.

        `accept` raises `LaneFull` where it finds that.
        """

    def write(self, peer: Peer, chunk: LayerChunk, target_blocks: Blocks) -> None:
        """Queue a write of the chunk's blocks to `target_blocks[i]`; returns at once."""

    def send_after(self, peer: Peer, parts: Parts) -> None:
        """Return `parts` in a `Ready` when all writes queued to `peer` before are done."""

    def take_ready(self) -> list[Ready | Broken]:
        """Return what became ready, in order for each peer; `Broken` is the last of a peer."""

    def move(self, slab: int) -> bytes:
        """Let senders write a slab at a further address, beside the present one, until `fence`.

        Returns the new reply of `open`, which senders need to continue after that. May take some
        tens of milliseconds.
        """

    def fence(self, slab: int) -> None:
        """Remove the earlier address of a slab that moved, in each of its layers.

        Afterwards no write to it, begun or not, reaches the slab. Writes in progress fail.
        """
