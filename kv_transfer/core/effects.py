"""What the sending and the receiving machine ask their shell to do, in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from common.ids import Incarnation
from kv_transfer.connector import KVEvent
from kv_transfer.core.chunks import Chunk
from kv_transfer.core.frames import Data, Frame


@dataclass(frozen=True, slots=True)
class Peer:
    """A decode node as a ticket names it: the address alone would prove nothing."""

    endpoint: str
    incarnation: Incarnation

    def __str__(self) -> str:
        return f"{self.incarnation} at {self.endpoint}"


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a fresh connection to `peer`; what an earlier one still had to send is dropped."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection to `peer`."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class SendToPeer:
    """Send a header to a decode node."""

    peer: Peer
    frame: Frame


@dataclass(frozen=True, slots=True)
class SendChunk:
    """Send a DATA frame: checksums and payload are read from the pool when it leaves."""

    peer: Peer
    seq: int
    lease_token: int
    generation: int
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Reply:
    """Send a header back on a connection that a sender opened."""

    session: bytes
    frame: Frame


@dataclass(frozen=True, slots=True)
class Write:
    """Verify the payload's checksums, then copy block `i` of it to `target_blocks[i]`.

    Before copying ask `Receiver.may_write` under the lock that `revoke` takes.
    """

    session: bytes
    data: Data
    target_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Emit:
    """Tell the connector's owner."""

    event: KVEvent


class DropReason(Enum):
    """Why a received message was dropped without touching memory.

    LATE (its landing is closed) and DUPLICATE are expected of honest senders.
    """

    MALFORMED = "malformed"
    NO_SESSION = "no_session"
    UNKNOWN_LEASE = "unknown_lease"
    LATE = "late"
    STALE_GENERATION = "stale_generation"
    WRONG_SENDER = "wrong_sender"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True)
class Dropped:
    """Count it; log it now and then."""

    reason: DropReason
    detail: str


SenderEffect = Connect | Disconnect | SendToPeer | SendChunk | Emit
ReceiverEffect = Reply | Write | Emit | Dropped
Effect = SenderEffect | ReceiverEffect
