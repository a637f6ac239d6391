"""A descriptor of a card's memory, handed to processes of this user on this host.

The memory is counted: it lives as long as a process has it mapped or its descriptor open, so a
receiver that maps it outlives its sender. (A handle by `cuIpcGetMemHandle` promises that to nobody
once its exporter is gone.) A descriptor travels over a Unix socket alone. The sender listens at an
address of the abstract namespace that is made of a nonce; the HELLO carries the nonce. So an offer
names no other socket of the host, and needs no file that stays behind. Both ends ask the kernel
whose process the other one is, and want their own user.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
import threading

from common.errors import HandoffFailed

logger = logging.getLogger("pdserve.kv_transfer")

NONCE_BYTES = 16
WITHIN_S = 1.0
"""How long an end waits for the other one: both are processes that have nothing to compute."""
AGAIN_S = 0.1
"""The pause after a connection that could not be taken: this process has no file left for it."""
_CREDENTIALS = struct.Struct("3i")
_MOST_WAITING = 64


def address_of(nonce: bytes) -> bytes:
    """Return the socket's address, in the abstract namespace."""
    return b"\0pdserve-kv-" + nonce.hex().encode()


class OfferedDescriptor:
    """The sender's end: hands `descriptor`, which it then owns, to those that know the nonce."""

    def __init__(self, descriptor: int) -> None:
        """Take an address; `OSError`, with the descriptor closed, where that is impossible."""
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._descriptor = descriptor
        self._closed = threading.Event()
        self._closed.set()
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(address_of(self.nonce))
            self._socket.listen(_MOST_WAITING)
        except OSError:
            os.close(descriptor)
            raise
        self._closed.clear()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to answer."""
        self._thread = threading.Thread(target=self._serve, name="pdserve-kv-offer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop handing out descriptors; those handed out stay open. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # This wakes the thread.
        if self._thread is not None:
            self._thread.join(WITHIN_S)
        self._socket.close()
        os.close(self._descriptor)

    def __del__(self) -> None:
        self.close()  # A lane that was never used has nobody who closes it.

    def _serve(self) -> None:
        is_failing = False
        while not self._closed.is_set():
            try:
                asking, _ = self._socket.accept()
            except OSError as error:
                if not (is_failing or self._closed.is_set()):
                    logger.warning("card memory cannot be handed out now: %s", error)
                is_failing = True
                self._closed.wait(AGAIN_S)
                continue
            is_failing = False
            with asking, contextlib.suppress(OSError):
                asking.settimeout(WITHIN_S)
                if _user_of(asking) == os.geteuid():
                    socket.send_fds(asking, [self.nonce], [self._descriptor])


def fetch_descriptor(nonce: bytes) -> int:
    """Return the descriptor that is offered under a nonce; the caller closes it.

    Raises `HandoffFailed` where this host has no such offer, or another user's.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(WITHIN_S)
            asking.connect(address_of(nonce))
            if _user_of(asking) != os.geteuid():
                raise HandoffFailed("the card memory is another user's")
            answer, found, _, _ = socket.recv_fds(asking, NONCE_BYTES + 1, 8)
    except OSError as error:
        raise HandoffFailed(f"no process of this host offers that card memory: {error}") from None
    for descriptor in found:
        os.set_inheritable(descriptor, False)
    if answer != nonce or len(found) != 1:
        for descriptor in found:
            os.close(descriptor)
        raise HandoffFailed("the offer of card memory was answered with something else")
    return found[0]


def _user_of(connected: socket.socket) -> int:
    """Return the user of the process at the other end."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return int(user)
