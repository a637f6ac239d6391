"""A TCP proxy that cuts, stalls or corrupts what a sender writes to a receiver."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

Meddle = Callable[[int, int, bytes], bytes | None]
"""(connection number, bytes forwarded before, data) -> what to forward; None cuts it off."""


class Proxy:
    """Forwards to `target` (`tcp://host:port`); `meddle` sees what goes towards it."""

    def __init__(self, target: str, meddle: Meddle) -> None:
        url = urlsplit(target)
        self._target = (url.hostname, url.port)
        self._meddle = meddle
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_connections = 0
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        _close(self._listener)
        # The accepting thread may be adding sockets until it has ended.
        self._threads[0].join(20)
        for one in self._sockets:
            _close(one)
        for thread in self._threads:
            thread.join(20)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._sockets.append(near)
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    _close(near)
                    continue
                self._sockets.append(far)
                number = self.num_connections
                self.num_connections += 1
                self._start(self._pump, near, far, number)
                self._start(self._pump, far, near, None)

    def _pump(self, source: socket.socket, sink: socket.socket, number: int | None) -> None:
        forwarded = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1024):
                passed: bytes | None = data
                if number is not None:
                    passed = self._meddle(number, forwarded, data)
                if passed is None:
                    break
                sink.sendall(passed)
                forwarded += len(data)
        _close(source)
        _close(sink)


def _close(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
