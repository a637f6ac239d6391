"""Headers as a hostile or broken peer might send them: near misses of good ones, and garbage."""

from __future__ import annotations

import random

import msgpack  # type: ignore[import-untyped]

from common.errors import PeerProtocolError
from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from kv_transfer.shared.limits import MAX_HEADER_BYTES
from kv_transfer.wire import frames
from kv_transfer.wire.header_seal import SEAL_BYTES, seal

LAYOUT = KVLayout(
    model_digest="m", num_layers=2, num_kv_heads=1, head_dim=2, block_size=4, dtype="float16"
)
CORPUS: tuple[frames.Frame, ...] = (
    frames.Hello(
        Incarnation("p", 1), Incarnation("d", 1), LAYOUT, {"zmq": b"", "rdma": b"k"}, "auto"
    ),
    frames.Welcome(Incarnation("d", 1), "zmq", b"", 1 << 20, "block", 35, 1024),
    frames.Rejected("overloaded", "full"),
    frames.Begin(1, 2),
    frames.Begun(1, 2),
    frames.Data(0, 1, 2, 0, (0, 1, 2), (1, 2), (), bytes(range(48))),
    frames.Data(7, 1, 2, 1, (3,), (), (4,), b""),
    frames.Ack(3, 1 << 20),
    frames.CommitFrame(1, 2, 8, 99, 16, 7, (1, 2, 3)),
    frames.Committed(1, 2),
    frames.Failed(1, 2, "handoff_failed", "why"),
    frames.Abort(1, 2),
    frames.Aborted(1, 2),
    frames.Ping((1, 2, 3)),
    frames.Pong(),
    frames.Repeat(1, 2, 1, (0, 2)),
)
_PACKED = tuple(frames.encode(frame)[:-SEAL_BYTES] for frame in CORPUS)
# Type bytes of msgpack: maps, arrays, texts, binaries and extensions that claim to be huge.
MOST_WORDS = 400
_TYPES = (b"\xdf", b"\xdd", b"\xdb", b"\xc6", b"\xc9", b"\xc7", b"\xd4\xff", b"\xd7\xff", b"\xc1")
_SIZES = (b"\x00", b"\x01", b"\xff", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x00\x40\x00")
_VALUES: tuple[object, ...] = (
    None,
    True,
    -1,
    0,
    1 << 31,
    (1 << 64) - 1,
    1.5,
    "",
    "x" * 300,
    b"",
    b"y" * 300,
    [],
    [0, 0],
    [-1],
    [(1 << 64) - 1],
    list(range(300)),
    {},
    {"a": 1},
    [[[[]]]],
)


def mutated(rng: random.Random) -> bytes:
    """Return a header; most have a right checksum, so that the checks behind it find the error."""
    packed = _PACKED[rng.randrange(len(_PACKED))]
    kind = rng.randrange(10)
    if kind < 4:
        packed = _with_wrong_bytes(rng, packed)
    elif kind < 7:
        packed = _with_wrong_field(rng, packed)
    elif kind == 7:
        other = _PACKED[rng.randrange(len(_PACKED))]
        packed = packed[: rng.randrange(len(packed))] + other[rng.randrange(len(other)) :]
    elif kind == 8:
        packed = rng.randbytes(rng.randrange(60))
    elif rng.random() < 0.1:
        nesting = rng.choice((b"\x91", b"\x81\xa1a", b"\x92\x00"))
        packed = packed[: rng.randrange(len(packed))] + nesting * rng.choice((10, 600, 1020, 5000))
        packed = packed[: MAX_HEADER_BYTES + rng.randrange(-9, 2)]
    return seal(packed) if rng.random() < 0.9 else packed


def _with_wrong_bytes(rng: random.Random, packed: bytes) -> bytes:
    changed = bytearray(packed)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(changed))
        if rng.random() < 0.6:
            changed[at] ^= 1 << rng.randrange(8)
        elif rng.random() < 0.5:
            changed[at : at + 1] = rng.choice(_TYPES) + rng.choice(_SIZES)
        else:
            del changed[at : at + rng.randrange(1, 4)]
        if not changed:
            break
    return bytes(changed)


def _with_wrong_field(rng: random.Random, packed: bytes) -> bytes:
    body = msgpack.unpackb(packed)
    name = rng.choice(list(body))
    if rng.random() < 0.15:
        del body[name]
    else:
        body[name] = rng.choice(_VALUES)
    if rng.random() < 0.1:
        body["later"] = rng.choice(_VALUES)
    changed: bytes = msgpack.packb(body)
    return changed


def decode(header: bytes) -> frames.Frame | None:
    """Return the frame, or None when it is refused with a short, typed error."""
    try:
        frame = frames.decode(header)
    except PeerProtocolError as error:
        if len(str(error)) > MOST_WORDS:
            raise AssertionError(f"a long story: {error}") from None
        return None
    assert frames.decode(frames.encode(frame)) == frame
    return frame
