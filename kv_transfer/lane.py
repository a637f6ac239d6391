"""Lanes: how the bytes of DATA frames get from a sender's pool into a receiver's.

Every pair of nodes has one control connection (`transport`), in order, with all frames. What it
agrees on with HELLO and WELCOME is the lane for the bytes: behind the header (`inline_lane`),
through shared memory (`shm`) or by RDMA (`rdma`). A lane object serves one connector, in both
directions, on the connector's thread unless a method says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import HandoffFailed
from kv_transfer.core.chunks import Chunk
from kv_transfer.core.effects import Peer, Write
from kv_transfer.pieces import NO_SUMS, Pool, Sums
from kv_transfer.transport import Parts


@dataclass(frozen=True, slots=True)
class Payload:
    """What a DATA frame says of its bytes (see `frames.Data`), and the parts behind its header.

    `sums` are the piece sums of the chunk, where they were wanted.
    """

    runs: tuple[int, ...] = ()
    source_blocks: tuple[int, ...] = ()
    parts: Parts = ()
    sums: Sums = NO_SUMS


class Lane(Protocol):
    """Both ends of a lane. `name` is one of `core.lanes.LANES_BY_SPEED`."""

    @property
    def name(self) -> str: ...

    # The sender's end.

    def offer(self, peer: Peer) -> bytes | None:
        """What HELLO to `peer` says of this end, at most `MAX_LANE_BYTES`; None: not now."""

    def accept(self, peer: Peer, reply: bytes) -> None:
        """`peer` chose this lane; `reply` is what its end says. Raises `HandoffFailed`."""

    def payload(self, pool: Pool, chunk: Chunk, *, is_summed: bool) -> Payload:
        """How the chunk's bytes travel out of this end's `pool`; nothing long is copied."""

    def forget(self, peer: Peer) -> None:
        """The connection to `peer` is gone: drop what was queued for it."""

    # The receiver's end.

    def open(self, session: bytes, offer: bytes) -> bytes | None:
        """A sender offers this lane: the reply, or None when it cannot be used between the two.

        `offer` is whatever a stranger sent.
        """

    def drop(self, session: bytes) -> None:
        """The session is over."""

    def close(self) -> None:
        """Release everything; bounded in time. Nobody can write the pool any more then."""


class CopyingLane(Lane, Protocol):
    """A lane on which the receiver copies the bytes into its pool: every one but those of
    `ONE_SIDED_LANES`.
    """

    def copy(self, write: Write, parts: Parts, pool: Pool) -> Sums:
        """Copy what `write` is about into `pool`: the only writer of it, with the receiving lock.

        `parts` came behind the header. Returns the sums of what was copied, whatever its source
        became meanwhile; unless `write.verify` is off. Raises `PeerProtocolError`, before `pool`
        is touched.
        """


@dataclass(frozen=True, slots=True)
class Ready:
    """What was written to `peer` before is done: `parts` may be sent now."""

    peer: Peer
    parts: Parts


@dataclass(frozen=True, slots=True)
class Broken:
    """A write to `peer` failed, and perhaps goes on: the lane forgot what was queued for it."""

    peer: Peer
    error: HandoffFailed


class OneSidedLane(Lane, Protocol):
    """A lane on which the sender writes the receiver's pool by itself (`ONE_SIDED_LANES`).

    It writes on threads of its own. The receiver's pool is divided into slabs of
    `blocks_per_slab` blocks, in every layer, which can be fenced.
    """

    @property
    def blocks_per_slab(self) -> int: ...

    def attach(self, wake: Callable[[], None]) -> None:
        """Called once by the connector; `wake` is to be called, from any thread, when
        `take_ready` has something.
        """

    def write(self, peer: Peer, chunk: Chunk, target_blocks: Sequence[int]) -> None:
        """Queue a write of the chunk's blocks to `target_blocks[i]`; returns at once."""

    def send_after(self, peer: Peer, parts: Parts) -> None:
        """Give `parts` back in a `Ready` when every write queued to `peer` before is done."""

    def take_ready(self) -> list[Ready | Broken]:
        """What became ready, in order for each peer; nothing of a peer follows its `Broken`."""

    def fence(self, slabs: Sequence[int]) -> bytes:
        """When it returns, nothing that anybody wrote before can reach these slabs any more.

        Writers that are at it fail. Returns what `open` replies from now on: those who may go on
        writing have to know. May take some tens of milliseconds.
        """
