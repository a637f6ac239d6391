"""The frames of the KV plane: a msgpack header, and after DATA headers the bytes themselves.

    sender (prefill)                    receiver (decode)
    HELLO   sender, receiver, layout ──►
                                   ◄──  WELCOME(lane, window) | REFUSED(code, message)
    BEGIN   lease, generation      ──►
                                   ◄──  BEGUN   on a one-sided lane: now it may be written;
                                                with further connections: now they may carry DATA
    DATA    pieces of one layer    ──►          on an inline lane the bytes follow as message parts
                                   ◄──  REPEAT  these pieces arrived damaged: send them again
                                   ◄──  ACK     how many DATA frames were consumed: credit; window
    COMMIT  when all were consumed ──►
                                   ◄──  COMMITTED | FAILED(code, message)
    ABORT                          ──►
                                   ◄──  ABORTED
    PING    leases still held      ──►
                                   ◄──  PONG

A pair may have further connections, which begin with HELLO too and carry DATA, REPEAT, ACK, PING
and PONG alone.

Every header is a map with the protocol version `v`, the kind `k` and the fields of one dataclass
below, followed by the map's XXH3-64, 8 bytes: a COMMIT with one wrong bit in a token would cause a
wrong answer even if all blocks are verified. Each field has a type and a bound. Unknown fields are
ignored, so that a later release may add some; unknown versions and kinds are refused. Decoding a
header that breaks a rule raises `PeerProtocolError`, which names the field, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgpack  # type: ignore[import-untyped]

from common.errors import PeerProtocolError
from common.ids import Incarnation
from common.kv.kv_layout import MAX_PLANES, KVLayout
from kv_transfer.shared.lanes import VERIFY_AUTO, VERIFY_MODES
from kv_transfer.shared.limits import (
    LEAST_BLOCKS_PER_FRAME,
    MAX_BLOCKS_PER_FRAME,
    MAX_DRAFT_TOKENS,
    MAX_GROUP_BYTES,
    MAX_LANE_BYTES,
    MAX_NODE_ID_CHARS,
    MAX_TEXT_CHARS,
    MAX_TRANSFERS_PER_LINK,
    PROTOCOL_VERSION,
)
from kv_transfer.wire.field_checks import (
    Check,
    blob,
    boolean,
    incarnation,
    missing_means,
    offers,
    one_of,
    shown,
    text,
    uint,
    uints,
)
from kv_transfer.wire.greetings import Hello as Hello
from kv_transfer.wire.greetings import Rejected as Rejected
from kv_transfer.wire.greetings import Welcome as Welcome
from kv_transfer.wire.header_seal import seal, unsealed
from kv_transfer.wire.layout_field import layout, layout_to_wire

SUM_BYTES = 8
NO_SESSION = "no_session"
"""The code of a REFUSED that asks for a new HELLO."""
LEASE_REVOKED = "lease_revoked"
"""The code of a FAILED whose landing was ended by its own node, and of the REFUSED of a node that
ends all of them because it closes. Earlier releases know it not, and read it as any other
failure."""


class UnknownVersion(PeerProtocolError):
    """The header is of another protocol version; its sender gets an answer with the reason."""


class LeaseFrame(Protocol):
    """A frame about one transfer."""

    @property
    def lease_token(self) -> int: ...
    @property
    def generation(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Begin:
    """Bind the sender to a landing; repeated after every reconnect."""

    lease_token: int
    generation: int


@dataclass(frozen=True, slots=True)
class Begun:
    """The sender of this connection is a registered writer: on a one-sided lane it may begin."""

    lease_token: int
    generation: int


@dataclass(frozen=True, slots=True)
class Data:
    """Some blocks of one layer.

    `seq` counts DATA frames of a connection from 0. `ordinals` index the ticket's target blocks. On
    an inline lane the blocks are grouped in `runs` (their lengths): each run is two message parts,
    its keys and its values. On the shared-memory lane `source_blocks` are their ids in the sender's
    pool. `sums` are `pieces.Sums` if the pair verifies blocks, else empty. `wants_ack`: the sender
    waits for credit.
    """

    seq: int
    lease_token: int
    generation: int
    layer: int
    ordinals: tuple[int, ...]
    runs: tuple[int, ...]
    source_blocks: tuple[int, ...]
    sums: bytes
    wants_ack: bool = False


@dataclass(frozen=True, slots=True)
class Repeat:
    """These blocks of a layer arrived with a wrong checksum: the sender sends them again.

    It precedes the ACK of the frame that brought them. Sent only to a sender that understands it.
    """

    lease_token: int
    generation: int
    layer: int
    ordinals: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ack:
    """`consumed` DATA frames of this connection were consumed; their bytes are credit again.

    `window_bytes` is the sender's window from now on. Releases before it do not send the field, and
    0 means that the window stays what it is.
    """

    consumed: int
    window_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CommitFrame:
    """Everything was consumed: `num_pieces` pieces (a block in a layer), counted once each.

    `digest` is the sum of all their piece sums if the pair verifies at commit, else 0.
    """

    lease_token: int
    generation: int
    num_pieces: int
    digest: int
    num_tokens: int
    first_token_id: int
    draft_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """The landing is whole and verified."""

    lease_token: int
    generation: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The landing is closed, or never existed."""

    lease_token: int
    generation: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Abort:
    """The sender aborts the transfer, and does not write any more of it."""

    lease_token: int
    generation: int


@dataclass(frozen=True, slots=True)
class Aborted:
    """No data of that generation will be landed any more."""

    lease_token: int
    generation: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Renews the landings of the leases that the sender still has open."""

    lease_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to a PING."""


Frame = (
    Hello
    | Welcome
    | Rejected
    | Begin
    | Begun
    | Data
    | Ack
    | CommitFrame
    | Committed
    | Failed
    | Abort
    | Aborted
    | Ping
    | Pong
    | Repeat
)

_U64 = uint(64)
_U32 = uint(32)
_LEASE: dict[str, Check] = {"lease_token": _U64, "generation": _U64}
_REASON: dict[str, Check] = {"code": text(64), "message": text(MAX_TEXT_CHARS)}

SCHEMAS: dict[int, tuple[type[Frame], dict[str, Check]]] = {
    1: (
        Hello,
        {
            "sender": incarnation,
            "receiver": incarnation,
            "layout": layout,
            "offers": offers,
            "verify": one_of((VERIFY_AUTO, *VERIFY_MODES)),
            "can_repeat": missing_means(False, boolean),
            "number": missing_means(0, _U64),
            "num_channels": missing_means(1, _U32),
            "channel": missing_means(0, _U32),
            "group": missing_means(b"", blob(MAX_GROUP_BYTES)),
        },
    ),
    2: (
        Welcome,
        {
            "receiver": incarnation,
            "lane": text(MAX_NODE_ID_CHARS),
            "lane_reply": blob(MAX_LANE_BYTES),
            "window_bytes": uint(63),
            "verify": one_of(VERIFY_MODES),
            "quiet_s": missing_means(0, _U32),
            "frame_blocks": missing_means(LEAST_BLOCKS_PER_FRAME, _U32),
            "num_channels": missing_means(1, _U32),
            "group": missing_means(b"", blob(MAX_GROUP_BYTES)),
        },
    ),
    3: (Rejected, _REASON),
    4: (Begin, _LEASE),
    5: (
        Data,
        {
            "seq": _U64,
            **_LEASE,
            "layer": uint(16),
            "ordinals": uints(32, MAX_BLOCKS_PER_FRAME),
            "runs": uints(16, MAX_BLOCKS_PER_FRAME),
            "source_blocks": uints(32, MAX_BLOCKS_PER_FRAME),
            "sums": blob(MAX_BLOCKS_PER_FRAME * MAX_PLANES * SUM_BYTES),
            "wants_ack": boolean,
        },
    ),
    6: (Ack, {"consumed": _U64, "window_bytes": missing_means(0, uint(63))}),
    7: (
        CommitFrame,
        {
            **_LEASE,
            "num_pieces": _U64,
            "digest": _U64,
            "num_tokens": _U32,
            "first_token_id": _U32,
            "draft_token_ids": uints(32, MAX_DRAFT_TOKENS),
        },
    ),
    8: (Committed, _LEASE),
    9: (Failed, {**_LEASE, **_REASON}),
    10: (Abort, _LEASE),
    11: (Aborted, _LEASE),
    12: (Ping, {"lease_tokens": uints(64, MAX_TRANSFERS_PER_LINK)}),
    13: (Pong, {}),
    14: (Begun, _LEASE),
    15: (
        Repeat,
        {**_LEASE, "layer": uint(16), "ordinals": uints(32, MAX_BLOCKS_PER_FRAME)},
    ),
}
_KIND_OF: dict[type[Frame], int] = {cls: kind for kind, (cls, _) in SCHEMAS.items()}


def encode(frame: Frame) -> bytes:
    """Return the header of `frame`. Texts longer than a peer accepts are cut."""
    kind = _KIND_OF[type(frame)]
    body = {name: _to_wire(getattr(frame, name)) for name in SCHEMAS[kind][1]}
    return seal(msgpack.packb({"v": PROTOCOL_VERSION, "k": kind, **body}))


def _to_wire(value: object) -> object:
    if isinstance(value, str):
        return value[:MAX_TEXT_CHARS]
    if isinstance(value, Incarnation):
        return {"node_id": value.node_id, "epoch": value.epoch}
    return layout_to_wire(value) if isinstance(value, KVLayout) else value


def decode(header: bytes | memoryview) -> Frame:
    """Return the frame of a header, which may be any bytes.

    Raises `UnknownVersion` for another protocol version, and else `PeerProtocolError`.
    """
    body = unsealed(header)
    version, kind = body.get("v"), body.get("k")
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise UnknownVersion(f"KV protocol version is {shown(version)}: wanted {PROTOCOL_VERSION}")
    schema = SCHEMAS.get(kind) if type(kind) is int else None
    if schema is None:
        raise PeerProtocolError(f"frame kind {shown(kind)} is unknown")
    cls, checks = schema
    frame = cls(
        **{name: check(f"{cls.__name__}.{name}", body.get(name)) for name, check in checks.items()}
    )
    if isinstance(frame, Data):
        _check_counts(frame)
    return frame


def decode_message(parts: Sequence[memoryview]) -> Frame:
    """Return the frame of a message, whose first part is its header. Raises `PeerProtocolError`."""
    if not parts:
        raise PeerProtocolError("an empty message")
    return decode(parts[0])


def _check_counts(data: Data) -> None:
    num_blocks = len(data.ordinals)
    if num_blocks == 0 or len(set(data.ordinals)) != num_blocks:
        raise PeerProtocolError("Data.ordinals is empty or repeats a block")
    if data.runs and (sum(data.runs) != num_blocks or not all(data.runs)):
        raise PeerProtocolError(f"Data.runs adds up to {sum(data.runs)} blocks, not {num_blocks}")
    if len(data.source_blocks) not in (0, num_blocks):
        raise PeerProtocolError(
            f"Data has {num_blocks} blocks and {len(data.source_blocks)} source_blocks"
        )
    if len(data.sums) not in [num_blocks * SUM_BYTES * planes for planes in range(MAX_PLANES + 1)]:
        raise PeerProtocolError(f"Data has {num_blocks} blocks and {len(data.sums)} bytes of sums")
