"""Which of many ZMQ sockets have something to read, at the cost of those alone.

`zmq_poll` looks at every socket twice in each call: with 250 decode nodes that is most of what a
turn of the connector's thread takes. Here the kernel names the sockets that something happened to.

A socket's file signals only that ZMQ's thread has news, and any call on the socket may take that
signal. So a socket that was used is asked itself before the next wait, once.
"""

from __future__ import annotations

import selectors

import zmq

Socket = zmq.Socket[bytes]


class Readiness:
    """The sockets and files of one thread, which alone may use them."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._files: dict[Socket, int] = {}
        self._used: dict[Socket, None] = {}

    def watch_file(self, file: int) -> None:
        self._selector.register(file, selectors.EVENT_READ)

    def watch(self, source: Socket) -> None:
        """Watch a socket. Raises `OSError` where the kernel cannot watch more files."""
        file = int(source.getsockopt(zmq.FD))
        self._selector.register(file, selectors.EVENT_READ, source)
        self._files[source] = file
        self.used(source)

    def forget(self, source: Socket) -> None:
        """Stop watching a socket, if it is watched, before it is closed."""
        file = self._files.pop(source, None)
        if file is not None:
            self._selector.unregister(file)
        self._used.pop(source, None)

    def used(self, source: Socket) -> None:
        """Record that something was sent on a socket, or not everything was received."""
        self._used[source] = None

    def wait(self, timeout_s: float) -> list[Socket | int]:
        """Return the sockets and files that can be read; wait for one if there is none."""
        readable: dict[Socket | int, None] = {one: None for one in self._used if _can_be_read(one)}
        self._used.clear()
        for key, _ in self._selector.select(0.0 if readable else timeout_s):
            if key.data is None or _can_be_read(key.data):
                readable[key.fd if key.data is None else key.data] = None
        return list(readable)

    def close(self) -> None:
        self._selector.close()


def _can_be_read(source: Socket) -> bool:
    return bool(int(source.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
