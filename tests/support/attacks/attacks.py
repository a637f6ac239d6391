"""Attacks on a port: each one sends invalid input, reads the answer and disconnects."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Callable, Iterator

Attack = Callable[[str, int], None]

_TIMEOUT_S = 10.0
_MIB = 1 << 20
ZMTP_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
_READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
ZMTP_READY = b"\x04" + bytes([len(_READY)]) + _READY
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def says(*parts: bytes, times: int = 1) -> Attack:
    """Sends `parts`, the last of them `times` times, and reads until the other side closes."""

    def attack(host: str, port: int) -> None:
        # A peer that resets the connection, or just lets go of it, is right.
        with contextlib.suppress(OSError), connection(host, port) as stranger:
            for part in parts[:-1]:
                stranger.sendall(part)
            for _ in range(times):
                stranger.sendall(parts[-1])
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(_MIB):
                pass

    return attack


def crowd(size: int, hello: bytes = b"") -> Attack:
    """Many connections at once, each of which says `hello` and waits a moment."""

    def attack(host: str, port: int) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(size):
                with contextlib.suppress(OSError):
                    stranger = stack.enter_context(connection(host, port))
                    stranger.sendall(hello)

    return attack


@contextlib.contextmanager
def connection(host: str, port: int) -> Iterator[socket.socket]:
    """A TCP connection that is not waited for longer than a few seconds."""
    with socket.create_connection((host, port), timeout=_TIMEOUT_S) as stranger:
        yield stranger


def noise(size: int) -> bytes:
    """The same at each run."""
    return random.Random(8).randbytes(size)


def post(body: bytes, path: str = "/v1/completions") -> bytes:
    """A whole request."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"

# All of these are for any port: strangers do not know what listens there.
ATTACKS: dict[str, Attack] = {
    "nothing": says(b""),
    "noise": says(noise(_MIB)),
    "zeros": says(bytes(_MIB)),
    "a crowd that says nothing": crowd(400),
    "a head without end": says(b"GET / HTTP/1.1\r\nX: ", b"a" * 65536, times=512),
    "headers without end": says(b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 10_000, times=512),
    "a crowd with half a head": crowd(400, b"POST /v1/completions HTTP/1.1\r\nX: "),
    "a body without end": says(CHUNKED, b"10000\r\n" + b"x" * 65536 + b"\r\n", times=512),
    "a trailer without end": says(CHUNKED + b"1\r\na\r\n0\r\nX: ", b"a" * 65536, times=512),
    "brackets": says(post(b"[" * (9 * _MIB))),
    "fields": says(post(b'{"model":"tiny",' + b'"a":1,' * 1_500_000 + b'"b":1}')),
    "faulty messages": says(
        post(b'{"messages":[' + b"1," * 4_500_000 + b"1]}", "/v1/chat/completions")
    ),
    "a long text": says(post(b'{"model":"tiny","prompt":"' + b"a" * 9 * _MIB + b'"}')),
    "many requests in a row": says(b"GET /v1/nothing HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000),
    "a TLS greeting": says(b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03" + noise(16_372)),
    "HTTP/2 frames of noise": says(HTTP2_HELLO, noise(_MIB)),
    "HTTP/2 settings": says(HTTP2_HELLO, b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" * 7000, times=16),
    "HTTP/2 headers without end": says(
        HTTP2_HELLO + b"\x00\x40\x00\x01\x00\x00\x00\x00\x01" + bytes(16384),
        b"\x00\x40\x00\x09\x00\x00\x00\x00\x01" + b"\x40\x01a\x7f\x80\x7f" * 2730 + bytes(4),
        times=1024,
    ),
    "a crowd that speaks HTTP/2": crowd(400, HTTP2_HELLO),
    "a crowd that speaks ZMTP": crowd(400, ZMTP_GREETING + ZMTP_READY),
    "a ZMTP part that is too large": says(
        ZMTP_GREETING + ZMTP_READY + b"\x02" + struct.pack(">Q", 1 << 40), b"x" * _MIB, times=64
    ),
    "ZMTP messages of noise": says(
        ZMTP_GREETING + ZMTP_READY, b"\x02" + struct.pack(">Q", 65536) + noise(65536), times=512
    ),
}

MESSAGE_WITHOUT_END = says(
    ZMTP_GREETING + ZMTP_READY, b"\x03" + struct.pack(">Q", 65536) + bytes(65536), times=4096
)
"""256 MiB as parts of one ZMTP message. See docs/limits.md: without a key its parts are kept."""
