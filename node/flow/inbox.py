"""The bounded queue of messages to the step thread."""

from __future__ import annotations

import threading
from collections import deque

from common.errors import Draining, Overloaded
from node.flow.messages import (
    AbortAttempt,
    FetchBlocks,
    Message,
    PullRefused,
    SendBlocks,
    Submit,
    WarmNode,
)

MAX_BESIDE = 4096
_BESIDE = (AbortAttempt, FetchBlocks, PullRefused, SendBlocks, WarmNode)
"""What routers send beside requests."""


class Inbox:
    """Many threads put, one takes. Requests are refused while `max_requests` wait here.

    Lost routers and KV events are never refused: there are only a few for each accepted request.
    Aborts (each message for many attempts) and messages about pulls are refused while `MAX_BESIDE`
    of them wait. The caller then stops reading from the router until there is room.
    """

    def __init__(self, *, max_requests: int) -> None:
        # A condition is entered in Python, a lock is not, and each message and turn does it.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._messages: deque[Message] = deque()
        self._max_requests = max_requests
        self._num_requests = 0
        self._num_beside = 0
        self._is_closed = False

    def put(self, message: Message) -> None:
        """Queue a message.

        Raises `Overloaded` when there is no room for it, and `Draining` for a request to a node
        that stops.
        """
        with self._lock:
            if isinstance(message, Submit):
                if self._is_closed:
                    raise Draining("the node is stopping")
                if self._num_requests >= self._max_requests:
                    raise Overloaded(f"{self._num_requests} requests wait in the inbox")
                self._num_requests += 1
            if isinstance(message, _BESIDE):
                if self._num_beside >= MAX_BESIDE:
                    raise Overloaded(f"{self._num_beside} aborts and pulls wait in the inbox")
                self._num_beside += 1
            self._messages.append(message)
            self._condition.notify()

    def wait(self, timeout_s: float | None) -> None:
        """Return when there is a message, the inbox is closed, or the time is up."""
        with self._condition:
            self._condition.wait_for(lambda: self._messages or self._is_closed, timeout_s)

    @property
    def has_messages(self) -> bool:
        """Whether a message waits."""
        return bool(self._messages)

    def take_all(self) -> list[Message]:
        """Return all waiting messages, oldest first, without blocking."""
        if not self._messages:
            return []  # one that comes now is there when `wait` looks
        with self._lock:
            taken = list(self._messages)
            self._messages.clear()
            self._num_requests = self._num_beside = 0
            return taken

    def close(self) -> None:
        """Wake the taker for the last time; from now on requests are refused."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed
