"""The lock around all parallel kernels of a process."""

from __future__ import annotations

import threading

KERNEL_LOCK = threading.Lock()
"""numba's simplest thread pool ends the process when two threads enter it at once."""
