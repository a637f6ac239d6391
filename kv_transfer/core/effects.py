"""What the sending and the receiving machine ask their shell to do, in order."""

from __future__ import annotations

from collections.abc import Mapping
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
class SayHello:
    """Send a HELLO with what the lanes have to offer now."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class TakeLane:
    """The peer chose this lane for all that is sent to it on this connection."""

    peer: Peer
    lane: str
    lane_reply: bytes


@dataclass(frozen=True, slots=True)
class SendToPeer:
    """Send a header to a decode node; `is_behind_writes`: when what was written before is done."""

    peer: Peer
    frame: Frame
    is_behind_writes: bool = False


@dataclass(frozen=True, slots=True)
class SendChunk:
    """Send a DATA frame: checksums and payload are read from the pool when it leaves.

    `verify` is a mode of `core.lanes`; with `commit` the sums go to `Sender.on_summed`.
    """

    peer: Peer
    seq: int
    lease_token: int
    generation: int
    chunk: Chunk
    target_blocks: tuple[int, ...]
    verify: str
    wants_ack: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """Send a header back on a connection that a sender opened."""

    session: bytes
    frame: Frame


@dataclass(frozen=True, slots=True)
class OpenLane:
    """Choose a lane among `offers` and say so to `Receiver.on_lane`."""

    session: bytes
    offers: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class CloseLane:
    """The session is over."""

    session: bytes
    lane: str


@dataclass(frozen=True, slots=True)
class Write:
    """Bring block `i` of `data` to `target_blocks[i]`, verified as `verify` says.

    Before copying ask `Receiver.may_write` under the lock that `revoke` takes.
    """

    session: bytes
    lane: str
    verify: str
    data: Data
    target_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fence:
    """Nothing written by anybody before may reach these slabs of the pool any more; when that is
    so, tell `Receiver.on_fenced`.
    """

    lane: str
    slabs: tuple[int, ...]


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


SenderEffect = Connect | Disconnect | SayHello | TakeLane | SendToPeer | SendChunk | Emit
ReceiverEffect = Reply | OpenLane | CloseLane | Write | Fence | Emit | Dropped
Effect = SenderEffect | ReceiverEffect
