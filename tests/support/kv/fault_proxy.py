"""A TCP proxy that does one thing wrong, at one byte, in one direction."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from dataclasses import dataclass

from tests.support.kv.tcp_proxy import TcpProxy, close_socket

KINDS = ("delay", "corrupt", "truncate", "cut", "reset", "stall", "late")
READ_BYTES = 4096
LATE_AT_MOST_S = 2.0
DELAYED_BYTES = 30_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to the connection that carries byte `at`, towards the target or back.

    Bytes are counted from when the fault was armed, over all connections.

    delay     the next `DELAYED_BYTES` arrive in small pieces and late, at random
    corrupt   the byte is changed by `mask`
    truncate  `length` bytes are missing
    cut       both ends see the connection closed
    reset     both ends see it reset
    stall     nothing follows, and nothing is closed
    late      the sender sees it closed; the target gets the rest when another connection has been
              used, so the oldest bytes arrive last
    """

    kind: str
    at: int
    is_back: bool = False
    mask: int = 1
    length: int = 1
    seed: int = 0


class FaultProxy(TcpProxy):
    """Forwards to `target` (`tcp://host:port`), with `fault` or with none until one is armed."""

    def __init__(self, target: str, fault: Fault | None = None) -> None:
        super().__init__(target)
        self._fault = fault
        self._passed = [0, 0]
        self.num_faults = 0
        self.forwarded = [0, 0]
        """Bytes of all connections, towards the target and back."""
        self._lock = threading.Condition()
        self._is_closing = threading.Event()
        self._was_reset: set[int] = set()
        self.open()

    def arm(self, fault: Fault) -> None:
        """Arm a fault `fault.at` bytes from now."""
        with self._lock:
            self._fault = fault
            self._passed = [0, 0]
            self.num_faults = 0

    def close(self) -> None:
        self._is_closing.set()
        with self._lock:
            self._lock.notify_all()
        super().close()

    def pump(self, source: socket.socket, sink: socket.socket, number: int, is_back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(READ_BYTES):
                fault, before = self._take_fault(is_back, len(data))
                if fault is None:
                    self._forward(sink, data, is_back)
                    continue
                self._forward(sink, data[:before], is_back)
                if fault.kind == "reset":
                    self._was_reset.add(number)
                if not self._do(fault, source, sink, data[before:]):
                    return
        if number in self._was_reset:
            source.close()
            sink.close()
            return
        close_socket(source)
        close_socket(sink)

    def _take_fault(self, is_back: bool, num_bytes: int) -> tuple[Fault | None, int]:
        """Return the fault, if it is in the latest bytes, and the number of bytes before it."""
        with self._lock:
            passed = self._passed[is_back]
            self._passed[is_back] += num_bytes
            fault = self._fault
            if fault is None or fault.is_back != is_back:
                return None, 0
            if not passed <= fault.at < passed + num_bytes:
                return None, 0
            self._fault = None
            self.num_faults += 1
            return fault, fault.at - passed

    def _forward(self, sink: socket.socket, data: bytes, is_back: bool) -> None:
        sink.sendall(data)
        with self._lock:
            self.forwarded[is_back] += len(data)
            self._lock.notify_all()

    def _do(self, fault: Fault, source: socket.socket, sink: socket.socket, tail: bytes) -> bool:
        """Apply the fault to `tail`, the latest bytes from there on; return whether to go on."""
        match fault.kind:
            case "corrupt":
                self._forward(sink, bytes([tail[0] ^ fault.mask]) + tail[1:], fault.is_back)
            case "truncate":
                missing = fault.length
                while len(tail) <= missing:
                    missing -= len(tail)
                    tail = source.recv(READ_BYTES)
                    if not tail:
                        break
                self._forward(sink, tail[missing:], fault.is_back)
            case "delay":
                self._dribble(random.Random(fault.seed), source, sink, tail, fault.is_back)
            case "stall":
                while source.recv(READ_BYTES):
                    pass
                return False
            case "late":
                self._deliver_late(source, sink, tail)
                return False
            case "reset":
                self._reset(source, sink)
                return False
            case _:
                close_socket(source)
                close_socket(sink)
                return False
        return True

    def _reset(self, source: socket.socket, sink: socket.socket) -> None:
        for one in (source, sink):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # The other direction's thread waits there, and keeps it open until it is woken.
            one.shutdown(socket.SHUT_RD)
            one.close()

    def _dribble(
        self,
        rng: random.Random,
        source: socket.socket,
        sink: socket.socket,
        tail: bytes,
        back: bool,
    ) -> None:
        data, left = tail, DELAYED_BYTES
        while data and left > 0:
            size = min(len(data), rng.choice((1, 2, 7, 60, 500, READ_BYTES)))
            self._is_closing.wait(rng.random() * 0.004)
            self._forward(sink, data[:size], back)
            data = data[size:] or (source.recv(READ_BYTES) if left > size else b"")
            left -= size
        self._forward(sink, data, back)

    def _deliver_late(self, source: socket.socket, sink: socket.socket, tail: bytes) -> None:
        source.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while more := source.recv(READ_BYTES):
                tail += more
        with self._lock:
            wanted = self.forwarded[0] + len(tail)
            self._lock.wait_for(
                lambda: self.forwarded[0] >= wanted or self._is_closing.is_set(), LATE_AT_MOST_S
            )
        self._forward(sink, tail, False)
        close_socket(sink)
