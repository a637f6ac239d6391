"""Writing parts of a streamed answer straight to its connection.

ASGI takes a message for each part, through every layer that may want to look at it, and a stream
has a part for each token. Only what would be written as it is goes this way; what would have to
wait, or be refused, goes the other.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, cast
from weakref import ref

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_EXTENSION = "pdserve.parts"

WritePart = Callable[[bytes], bool]
"""Writes a part that is not the last, or says False and does nothing. An empty part is not written
either way: it asks whether one would be."""


def offer_parts(scope: MutableMapping[str, Any], cycle: RequestResponseCycle) -> None:
    """Name the way to the connection in the scope of a request whose head is complete."""
    flow, transport = cycle.flow, cycle.transport
    # The answer holds the scope: held in return, every request would be the garbage collector's.
    answer = ref(cycle)

    def write_part(data: bytes) -> bool:
        now = answer()
        if now is None or not now.chunked_encoding or now.response_complete or now.disconnected:
            return False
        if flow.write_paused:
            return False
        if data:  # an empty chunk would be the answer's end
            transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    scope["extensions"][_EXTENSION] = {"write": write_part}


def part_writer(scope: MutableMapping[str, Any]) -> WritePart:
    """Return what writes parts of this request's answer, to be used once its head was sent.

    Under a server without this extension it is `writes_nothing`.
    """
    offered = (scope.get("extensions") or {}).get(_EXTENSION)
    return writes_nothing if offered is None else cast(WritePart, offered["write"])


def writes_nothing(_data: bytes) -> bool:
    """Refuse to write: the server does not offer the extension."""
    return False
