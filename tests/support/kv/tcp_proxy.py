"""The common part of the proxies between a sender and a receiver: sockets and threads."""

from __future__ import annotations

import contextlib
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from urllib.parse import urlsplit


class TcpProxy(ABC):
    """Takes connections at `endpoint`, and opens one to `target` (`tcp://host:port`) for each."""

    def __init__(self, target: str) -> None:
        url = urlsplit(target)
        self.target_port = url.port or 0
        self._target = (url.hostname, self.target_port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_connections = 0
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    @abstractmethod
    def pump(self, source: socket.socket, sink: socket.socket, number: int, is_back: bool) -> None:
        """Carry one direction of connection `number`, in a thread of its own, to its end."""

    def open(self) -> None:
        """Accept connections from now on."""
        self._start(self._accept)

    def close(self) -> None:
        close_socket(self._listener)
        # The accepting thread may be adding sockets until it has ended.
        self._threads[0].join(20)
        for one in self._sockets:
            close_socket(one)
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
                    close_socket(near)
                    continue
                self._sockets.append(far)
                number = self.num_connections
                self.num_connections += 1
                self._start(self.pump, near, far, number, False)
                self._start(self.pump, far, near, number, True)


def close_socket(one: socket.socket) -> None:
    """Close a socket, also for a thread that waits on it."""
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
