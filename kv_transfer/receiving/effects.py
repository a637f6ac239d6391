"""What the receiving machine asks its connector to do, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from kv_transfer.shared.block_arrays import Blocks
from kv_transfer.shared.effects import Emit
from kv_transfer.wire.frames import Data, Frame


@dataclass(frozen=True, slots=True)
class SendBack:
    """Send a header back on a connection that a sender opened."""

    session: bytes
    frame: Frame


@dataclass(frozen=True, slots=True)
class OpenLane:
    """Choose a lane among `offers` and report it to `Receiver.on_lane`."""

    session: bytes
    offers: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class CloseLane:
    """Close a session's lane."""

    session: bytes
    lane: str


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """Copy block `i` of `data` to `target_blocks[i]` if the lane copies; verify it by `verify`.

    On any thread: call `Receiver.may_write` before, and report the end to the `Receiver`, once. The
    blocks are not released meanwhile.
    """

    session: bytes
    lane: str
    verify: str
    data: Data
    target_blocks: Blocks


@dataclass(frozen=True, slots=True)
class MoveSlab:
    """Let senders write a slab at a further address, then call `Receiver.on_moved`."""

    lane: str
    slab: int


@dataclass(frozen=True, slots=True)
class Fence:
    """Remove the earlier address of a slab that moved, then call `Receiver.on_fenced`.

    Then no earlier write can reach it.
    """

    lane: str
    slab: int


class DropReason(Enum):
    """Why a received message was dropped without touching memory.

    LATE (its landing is closed) and DUPLICATE are expected of correct senders. Of a DAMAGED one
    some pieces had a wrong checksum; only those do not count. Of an UNREAD one the lane could not
    get the bytes. REFUSED is a connection, for example because there are too many.
    """

    MALFORMED = "malformed"
    NO_SESSION = "no_session"
    UNKNOWN_LEASE = "unknown_lease"
    LATE = "late"
    STALE_GENERATION = "stale_generation"
    WRONG_SENDER = "wrong_sender"
    DUPLICATE = "duplicate"
    DAMAGED = "damaged"
    UNREAD = "unread"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Dropped:
    """Count a dropped message; log it once per interval."""

    reason: DropReason
    detail: str


ReceiverEffect = SendBack | OpenLane | CloseLane | Write | MoveSlab | Fence | Emit | Dropped
