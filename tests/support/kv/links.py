"""A network between processes that can be cut, delayed or throttled: a proxy per address."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections import deque

from tests.support.kv.tcp_proxy import TcpProxy, close_socket

_READ_BYTES = 1 << 16
_POLL_S = 0.02
_PART_S = 0.02
"""What a slow link carries at once, in seconds of its rate."""


class Link(TcpProxy):
    """Carries connections to `port` of this machine.

    While it is cut, nothing passes, nothing is closed, and new connections stay silent: a network
    that loses everything, or one direction alone. Connections that it forgets stay so, as behind a
    firewall that has restarted. While it refuses, its connections are closed and new ones are too.
    `bytes_per_s` bounds what one connection carries in each direction.
    """

    def __init__(self, port: int) -> None:
        super().__init__(f"tcp://127.0.0.1:{port}")
        self._may_pass = {False: threading.Event(), True: threading.Event()}
        for passes in self._may_pass.values():
            passes.set()
        self._is_refusing = False
        self._num_forgotten = 0
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        self.num_carried = 0
        self.open()

    @property
    def address(self) -> str:
        """`host:port` of this end."""
        return self.endpoint.removeprefix("tcp://")

    def cut(self) -> None:
        """Lose everything from now on."""
        for passes in self._may_pass.values():
            passes.clear()

    def cut_one_way(self, *, is_back: bool) -> None:
        """Lose what goes to `port` from now on, or what comes back from it."""
        self._may_pass[is_back].clear()

    def forget(self) -> None:
        """Lose what passes on the connections that there are, for good; others are carried."""
        self._num_forgotten = self.num_connections

    def refuse(self) -> None:
        """Close every connection, and each new one."""
        self._is_refusing = True
        for one in list(self._sockets):
            close_socket(one)

    def mend(self) -> None:
        """Carry everything again. What was under way when it was cut arrives late."""
        self._is_refusing = False
        self.delay_s = 0.0
        self.bytes_per_s = None
        for passes in self._may_pass.values():
            passes.set()

    def close(self) -> None:
        self.mend()
        super().close()

    def pump(self, source: socket.socket, sink: socket.socket, number: int, is_back: bool) -> None:
        if self._is_refusing:
            close_socket(source)
            close_socket(sink)
            return
        late: deque[tuple[float, bytes]] = deque()
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            while True:
                if select.select([source], [], [], _POLL_S if late else None)[0]:
                    data = source.recv(_READ_BYTES)
                    if not data:
                        break
                    late.append((time.monotonic() + self.delay_s, data))
                self._may_pass[is_back].wait()
                if number < self._num_forgotten:
                    late.clear()
                while late and late[0][0] <= time.monotonic():
                    self._carry(sink, late.popleft()[1])
            for _, data in late:
                self._carry(sink, data)
        if number < self._num_forgotten:
            return  # Nobody hears of its end.
        close_socket(source)
        close_socket(sink)

    def _carry(self, sink: socket.socket, data: bytes) -> None:
        view = memoryview(data)
        while view:
            bytes_per_s = self.bytes_per_s
            part = view if bytes_per_s is None else view[: max(1, round(bytes_per_s * _PART_S))]
            sink.sendall(part)
            self.num_carried += len(part)
            view = view[len(part) :]
            if bytes_per_s is not None:
                time.sleep(len(part) / bytes_per_s)
