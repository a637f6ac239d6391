"""What the sending machine asks its connector to do, in order."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kv_transfer.shared.block_arrays import Blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Emit, Peer
from kv_transfer.wire.frames import Frame


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

    `verify` is a mode of `shared.lanes`; with `commit` the sums go to `Sender.on_summed`.
    """

    peer: Peer
    seq: int
    lease_token: int
    generation: int
    chunk: LayerChunk
    target_blocks: Blocks
    verify: str
    wants_ack: bool = False


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
