"""The checksum of a header, around the map that is packed in it."""

from __future__ import annotations

import contextlib

import msgpack  # type: ignore[import-untyped]
from xxhash import xxh3_64_digest

from common.errors import PeerProtocolError
from kv_transfer.shared.limits import MAX_HEADER_BYTES, PROTOCOL_VERSION

SEAL_BYTES = 8
# Versions whose headers had no checksum; decoded only so far that their senders get a reason.
_UNSEALED_VERSIONS = (1,)
# After the size of the map: its first key and value, "v" and the version.
_BEGINNING = b"\xa1v" + bytes([PROTOCOL_VERSION])


class DamagedHeader(PeerProtocolError):
    """The header begins like one of this version, and does not match its checksum.

    The network changed it: the connection is opened again, and its transfers continue.
    """


def seal(packed: bytes) -> bytes:
    """Return the header whose map was packed to `packed`."""
    digest: bytes = xxh3_64_digest(packed)
    return packed + digest


def unsealed(header: bytes | memoryview) -> dict[str, object]:
    """Return the map of a header, which may be any bytes.

    Raises `DamagedHeader` for a wrong checksum, and else `PeerProtocolError`.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise PeerProtocolError(f"header of {len(header)} bytes: at most {MAX_HEADER_BYTES}")
    packed = header[:-SEAL_BYTES]
    if bytes(header[-SEAL_BYTES:]) == xxh3_64_digest(packed):
        return _unpack_map(packed)
    with contextlib.suppress(PeerProtocolError):
        body = _unpack_map(header)
        if body.get("v") in _UNSEALED_VERSIONS:
            return body
    problem = "header does not match its checksum"
    if bytes(header[1:4]) == _BEGINNING:
        raise DamagedHeader(problem)
    raise PeerProtocolError(problem)


def _unpack_map(packed: bytes | memoryview) -> dict[str, object]:
    try:
        body = msgpack.unpackb(packed, raw=False, strict_map_key=True)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise PeerProtocolError(f"header is not msgpack: {error!s:.80}") from None
    if type(body) is not dict:
        raise PeerProtocolError("header is not a map")
    return body
