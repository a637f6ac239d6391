"""Connections whose client sends no more: it may still read, or be gone.

The end of what a client sends is the same for both. A client that is gone answers the next byte
with a reset, and the kernel reports a reset only when it is asked: a connection that is read to its
end is not watched. So something that every client skips is written, where the answer allows that,
and the kernel is asked from time to time. Where nothing can be written, the kernel's own probes
ask: a client that has closed the connection answers them for a minute (`tcp_fin_timeout`), and then
resets it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

PROBED_S = (0.0, 0.05, 0.2, 0.75)
"""Something is written this often, and the kernel asked so long after each time. What a proxy
forwards shows it first that its own client is gone; only what comes later meets a connection that
it has closed."""

LOOK_S = 1.0
"""Time after which only the kernel is asked."""

KEEPALIVE_S = 5
"""Time between two probes of the kernel. One without an answer ends the connection as well."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""May come before any answer, and as often as one likes; clients of HTTP/1.0 do not know it."""

ZERO = b"0"
"""May come before the size of a chunk, which has any number of digits."""


def abort_when_gone(transport: asyncio.Transport, probe: Callable[[], bytes]) -> None:
    """Abort a connection that was read to its end as soon as its client is known to be gone.

    `probe` returns what can be written now, and nothing where that would spoil the answer.
    """
    peer: socket.socket = transport.get_extra_info("socket")
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    loop = asyncio.get_running_loop()

    def look(number: int) -> None:
        if transport.is_closing():
            return
        if peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            transport.abort()
            return
        is_probed = number < len(PROBED_S)
        if is_probed:
            transport.write(probe())
        loop.call_later(PROBED_S[number] if is_probed else LOOK_S, look, number + 1)

    look(0)


def probe_of(cycle: RequestResponseCycle) -> bytes:
    """Return what can be written between two parts of an answer and changes nothing of it."""
    if cycle.response_complete or cycle.flow.write_paused:
        return b""
    if not cycle.response_started:
        return CONTINUE if cycle.scope["http_version"] == "1.1" else b""
    return ZERO if cycle.chunked_encoding else b""
