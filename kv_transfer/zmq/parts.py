"""Message parts that ZMQ sends out of this process's memory and releases without Python.

pyzmq also sends without a copy. But it learns of each sent part through a socket and a thread of
its own, which takes the interpreter lock from the sending thread, at a cost of some 50 us of
processor time. Here ZMQ's own thread sets a byte, and the next send checks it.

libzmq is the one that pyzmq has loaded, called on pyzmq's sockets.
"""

from __future__ import annotations

import ctypes
import errno
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zmq
from numba import cfunc, types
from numba.core import caching

from kv_transfer.own_cache import keep_kernels

_MESSAGE_BYTES = 64
"""Size of `zmq_msg_t`: part of libzmq's interface."""
# Plain numbers, because zmq's enumerations combine by a Python function on every use.
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

keep_kernels(caching)
_compiled: Callable[[Any], Any] = cfunc(
    types.void(types.voidptr, types.CPointer(types.uint8)), cache=True
)


@_compiled
def _release(_data: Any, is_sent: Any) -> None:
    """Mark a part as released: a `zmq_free_fn`."""
    is_sent[0] = 1


class PartSender:
    """Sends on one socket, and keeps the sent parts alive until ZMQ has released them.

    It must live until every part is released, so possibly longer than the socket.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        """Load libzmq; `OSError` or `AttributeError` where it cannot be called from here."""
        self._socket = socket
        self._library = _library()
        self._message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        # For each message a byte per part, which ZMQ sets, and the parts.
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
                # Free the remaining parts when ZMQ rejects one: it never calls their free function.
                are_sent[index:] = b"\1" * (len(parts) - index)
                raise

    def forget_sent(self) -> bool:
        """Drop the parts that ZMQ released; return whether none is left."""
        # Messages are released in order of sending, so the first kept one ends the search.
        while self._held and 0 not in self._held[0][0]:
            self._held.popleft()
        return not self._held

    def _send_part(self, handle: int, part: memoryview, flag: int, flags: int) -> None:
        library, message = self._library, self._message
        address = _address(part) if part.nbytes else None
        if library.zmq_msg_init_data(message, address, part.nbytes, _release.address, flag) < 0:
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
    """Return libzmq, through the extension module that is linked to it."""
    from zmq.backend.cython import _zmq

    library = ctypes.CDLL(_zmq.__file__)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.zmq_msg_init_data.argtypes = [pointer, pointer, size, pointer, pointer]
    library.zmq_msg_send.argtypes = [pointer, pointer, ctypes.c_int]
    library.zmq_msg_close.argtypes = [pointer]
    return library
