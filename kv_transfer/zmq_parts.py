"""Message parts that ZMQ sends out of this process's memory, and lets go of without Python.

pyzmq sends without a copy too. But it hears of each part that was sent through a socket and a
thread of its own, which takes the interpreter from the thread that sends the next one, for some
50 us of processor time. Here ZMQ's own thread sets a byte, and whoever sends next looks.

libzmq is the one that pyzmq has loaded, called on pyzmq's sockets.
"""

from __future__ import annotations

import ctypes
import errno
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import zmq
from numba import cfunc, types

_MESSAGE_BYTES = 64
"""Of `zmq_msg_t`: part of libzmq's interface."""
# As plain numbers: those of zmq's enumeration are put together by a function of Python each time.
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


@cfunc(types.void(types.voidptr, types.CPointer(types.uint8)), cache=True)  # type: ignore[untyped-decorator]
def _let_go(_data: Any, is_sent: Any) -> None:
    """A `zmq_free_fn`."""
    is_sent[0] = 1


class PartSender:
    """Sends on one socket, and keeps what it sends alive until ZMQ has let go of it.

    It has to live until every part is let go of, so longer than the socket perhaps.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        """Raises `OSError` or `AttributeError` where libzmq cannot be called from here."""
        self._socket = socket
        self._library = _library()
        self._message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        # A byte for each part of a message, which ZMQ sets; and the parts.
        self._held: deque[tuple[bytearray, Sequence[memoryview]]] = deque()

    def send(self, header: memoryview, parts: Sequence[memoryview]) -> None:
        """Send a message. Raises `zmq.ZMQError` when the connection cannot take it."""
        self.forget_sent()
        self._socket.send(header, _MORE)
        are_sent = bytearray(len(parts))
        self._held.append((are_sent, parts))
        handle, flag = self._socket.underlying, _address(are_sent)
        last = len(parts) - 1
        for index, part in enumerate(parts):
            try:
                self._send_part(handle, part, flag + index, _LAST if index == last else _MORE)
            except zmq.ZMQError:
                # ZMQ does not have these, and will never say that it let go of them.
                are_sent[index:] = b"\1" * (len(parts) - index)
                raise

    def forget_sent(self) -> bool:
        """Let go of what ZMQ let go of; whether that is everything."""
        # The oldest is sent first: what is behind one that is not need not be looked at.
        while self._held and 0 not in self._held[0][0]:
            self._held.popleft()
        return not self._held

    def _send_part(self, handle: int, part: memoryview, flag: int, flags: int) -> None:
        library, message = self._library, self._message
        address = _address(part) if part.nbytes else None
        if library.zmq_msg_init_data(message, address, part.nbytes, _let_go.address, flag) < 0:
            raise zmq.ZMQError(library.zmq_errno())
        while library.zmq_msg_send(message, handle, flags) < 0:
            number = library.zmq_errno()
            if number != errno.EINTR:
                library.zmq_msg_close(message)
                raise zmq.ZMQError(number)


def _address(memory: bytearray | memoryview) -> int:
    address: int = np.frombuffer(memory, np.uint8).ctypes.data
    return address


def _library() -> ctypes.CDLL:
    """libzmq, by way of the extension module that is linked to it."""
    from zmq.backend.cython import _zmq

    library = ctypes.CDLL(_zmq.__file__)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.zmq_msg_init_data.argtypes = [pointer, pointer, size, pointer, pointer]
    library.zmq_msg_send.argtypes = [pointer, pointer, ctypes.c_int]
    library.zmq_msg_close.argtypes = [pointer]
    return library
