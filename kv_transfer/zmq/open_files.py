"""How many files this process may still open, and when a KV port refuses connections.

A listener without a free file does not refuse: the connection stays in the kernel's queue, libzmq
tries to accept it over and over, and that keeps a processor busy. So a port closes before, and
senders that connect after the first warning level are refused with the reason.
"""

from __future__ import annotations

import errno
import os
import resource
import time

FEW = 48
"""New senders are refused when fewer files are left."""
NEARLY_NONE = 16
"""The port is closed, with its connections, when fewer files are left."""
LOOK_EVERY_S = 0.25
MANY = 1 << 20


def files_left() -> int:
    """Return how many more files this process may open, as far as that is known."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MANY
    try:
        with os.scandir("/proc/self/fd") as files:
            return soft - sum(1 for _ in files)
    except OSError as error:
        is_full = error.errno in (errno.EMFILE, errno.ENFILE)
        return 0 if is_full else MANY


class OpenFiles:
    """The number of files that this process could still open at the last look."""

    def __init__(self) -> None:
        self._looked_at_s = float("-inf")
        self._num_left = FEW

    @property
    def are_few(self) -> bool:
        """Whether new senders are to be refused."""
        return self._num_left < FEW

    @property
    def are_nearly_none(self) -> bool:
        """Whether the port is to be closed."""
        return self._num_left < NEARLY_NONE

    def look(self) -> bool:
        """Count again, if the last time is long enough ago; return whether it was."""
        now_s = time.monotonic()
        if now_s < self._looked_at_s + LOOK_EVERY_S:
            return False
        self._looked_at_s = now_s
        self._num_left = files_left()
        return True
