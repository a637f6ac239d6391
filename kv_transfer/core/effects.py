"""Effects that the sending and the receiving machine ask their shell to perform, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from common.ids import Incarnation
from kv_transfer.connector import KVEvent
from kv_transfer.core.block_arrays import Blocks
from kv_transfer.core.chunks import Chunk
from kv_transfer.core.frames import Data, Frame


@dataclass(frozen=True, slots=True)
class Peer:
    """A decode node as a ticket names it; an address alone does not identify it.

    `channel` is which connection to it; see `channels`.
    """

    endpoint: str
    incarnation: Incarnation
    channel: int = 0

    @property
    def main(self) -> Peer:
        """The first connection to the same node."""
        return replace(self, channel=0) if self.channel else self

    def __str__(self) -> str:
        which = f", channel {self.channel}" if self.channel else ""
        return f"{self.incarnation} at {self.endpoint}{which}"


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a fresh connection to `peer`; unsent frames of an earlier one are dropped."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the connection to `peer`."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class SayHello:
    """Send a HELLO with the present offers of the lanes."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class PeerSilent:
    """Report that `peer` did not answer, `num_failures` times in a row.

    Transfers to it are refused until it answers; it is tried again in `pause_s`.
    """

    peer: Peer
    num_failures: int
    pause_s: float


@dataclass(frozen=True, slots=True)
class PeerAnswers:
    """Report that `peer`, which was silent, answers again."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class TakeLane:
    """Use this lane, which the peer chose, for everything sent to it on this connection."""

    peer: Peer
    lane: str
    lane_reply: bytes


@dataclass(frozen=True, slots=True)
class SendToPeer:
    """Send a header to a decode node; `is_behind_writes`: after all earlier writes are done."""

    peer: Peer
    frame: Frame
    is_behind_writes: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class SendChunk:
    """Send a DATA frame: checksums and payload are read from the pool when it is sent.

    `verify` is a mode of `core.lanes`; with `commit` the sums go to `Sender.on_summed`.
    """

    peer: Peer
    seq: int
    lease_token: int
    generation: int
    chunk: Chunk
    target_blocks: Blocks
    verify: str
    wants_ack: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
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


@dataclass(frozen=True, slots=True)
class Emit:
    """Emit an event to the connector's owner."""

    event: KVEvent


class DropReason(Enum):
    """Why a received message was dropped without touching memory.

    LATE (its landing is closed) and DUPLICATE are expected of correct senders. Of a DAMAGED one
    some pieces had a wrong checksum; only those do not count. REFUSED is a connection, for example
    because there are too many.
    """

    MALFORMED = "malformed"
    NO_SESSION = "no_session"
    UNKNOWN_LEASE = "unknown_lease"
    LATE = "late"
    STALE_GENERATION = "stale_generation"
    WRONG_SENDER = "wrong_sender"
    DUPLICATE = "duplicate"
    DAMAGED = "damaged"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Dropped:
    """Count a dropped message; log it once per interval."""

    reason: DropReason
    detail: str


SenderEffect = (
    Connect
    | Disconnect
    | SayHello
    | PeerSilent
    | PeerAnswers
    | TakeLane
    | SendToPeer
    | SendChunk
    | Emit
)
ReceiverEffect = Reply | OpenLane | CloseLane | Write | MoveSlab | Fence | Emit | Dropped
Effect = SenderEffect | ReceiverEffect


def asking_for_credit(effects: list[SenderEffect]) -> list[SenderEffect]:
    """Ask for an immediate acknowledgement of the last chunk on each connection.

    The sender stops there.
    """
    asked: set[Peer] = set()
    for index in range(len(effects) - 1, -1, -1):
        effect = effects[index]
        if isinstance(effect, SendChunk) and effect.peer not in asked:
            effects[index] = replace(effect, wants_ack=True)
            asked.add(effect.peer)
    return effects
