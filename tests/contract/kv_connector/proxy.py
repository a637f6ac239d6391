"""A TCP proxy that cuts, stalls or corrupts what a sender writes to a receiver."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

from tests.support.kv.tcp_proxy import TcpProxy, close_socket

Meddle = Callable[[int, int, bytes], bytes | None]
"""(connection number, bytes forwarded before, data) -> what to forward; None cuts it off."""


class Proxy(TcpProxy):
    """Forwards to `target` (`tcp://host:port`); `meddle` sees what goes towards it."""

    def __init__(self, target: str, meddle: Meddle) -> None:
        super().__init__(target)
        self._meddle = meddle
        self.open()

    def pump(self, source: socket.socket, sink: socket.socket, number: int, is_back: bool) -> None:
        forwarded = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1024):
                passed = data if is_back else self._meddle(number, forwarded, data)
                if passed is None:
                    break
                sink.sendall(passed)
                forwarded += len(data)
        close_socket(source)
        close_socket(sink)
