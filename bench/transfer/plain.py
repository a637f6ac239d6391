"""The baselines of the connectors: a bare TCP socket, and a copy within one process."""

from __future__ import annotations

import socket

import numpy as np

from bench.transfer.ways import Span, now_s
from bench.transfer.workload import MOVED_BYTES, Memory, ranges
from kv_transfer.lanes.pool_memory import Bytes

_WRITE_BYTES = 1 << 20
_TIMEOUT_S = 60.0


class SocketReceiver:
    """Receives straight into the pool: nothing is checked, framed or acknowledged.

    Socket buffers have the system's default sizes on both sides, as for the connectors.
    """

    def __init__(self, memory: Memory) -> None:
        self._pool, self._workload = memory.pool, memory.workload
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_TIMEOUT_S)
        self._connection: socket.socket | None = None
        self._blocks: tuple[int, ...] = ()

    def prepare(self, pattern: str) -> int:
        self._blocks = self._workload.target_blocks(pattern)
        port: int = self._listener.getsockname()[1]
        return port

    def receive(self) -> Span:
        """Read all ranges; `ConnectionError` when the sender closed the connection."""
        if self._connection is None:
            self._connection = self._listener.accept()[0]
            self._connection.settimeout(_TIMEOUT_S)
        for part in ranges(self._pool, self._blocks):
            rest = part.data
            while rest:
                count = self._connection.recv_into(rest)
                if count == 0:
                    raise ConnectionError("the sender closed the connection")
                rest = rest[count:]
        return Span(None, now_s())

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._listener.close()


class SocketSender:
    def __init__(self, memory: Memory) -> None:
        self._pool, self._workload = memory.pool, memory.workload
        self._connection: socket.socket | None = None

    def send(self, pattern: str, prepared: int) -> Span:
        if self._connection is None:
            self._connection = socket.create_connection(("127.0.0.1", prepared), _TIMEOUT_S)
        began_at_s = now_s()
        for part in ranges(self._pool, self._workload.source_blocks(pattern)):
            for start in range(0, part.nbytes, _WRITE_BYTES):
                self._connection.sendall(part.data[start : start + _WRITE_BYTES])
        return Span(began_at_s, None)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def memcpy_s(source: Bytes, target: Bytes) -> float:
    """Return the seconds that one thread takes to copy as many bytes as a move has."""
    count = MOVED_BYTES
    began_at_s = now_s()
    np.copyto(target.reshape(-1)[:count], source.reshape(-1)[:count])
    return now_s() - began_at_s
