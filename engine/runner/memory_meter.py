"""How much memory there is to compute in, and how much of it this process has taken at most.

For a CPU that is the host's memory, or less where a control group limits the process (a container).
A back end that computes elsewhere has a meter of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from pathlib import Path
from typing import Protocol

from common.control_group import group_limit_bytes
from common.kv.memory_plan import DeviceMemory

SHARE_OF_ITS_OWN = 0.9
"""Share of memory that nobody else uses: a GPU's, or that of a container with a limit."""
_SHARE_OF_A_HOST = 0.3
"""Share of a machine's memory, which its other processes, and other nodes, need too."""
_PEAK = "VmHWM"
_OF_FILES, _IN_MEMORY = "RssFile", "RssShmem"
"""Pages of files on a disk, and of those in memory (tmpfs)."""


class MemoryMeter(Protocol):
    """Measures the memory that this process takes on the device that it computes on."""

    def memory(self) -> DeviceMemory:
        """Return the memory of the device."""

    def reset_peak(self) -> None:
        """Forget the peak so far; what the process no longer uses is returned first."""

    def peak_bytes(self, shared_bytes: int = 0) -> int:
        """Return the most that the process has taken since `reset_peak`, all parts included.

        Of mapped files of weights, `shared_bytes`, the machine has one copy for all nodes. They are
        left out where the device is the host; who plans memory counts them once.
        """


class HostMeter:
    """The memory of this machine, or of the control group that this process is in."""

    def __init__(self, root: Path = Path("/")) -> None:
        """Read the kernel's files below `root`."""
        self._root = root

    def memory(self) -> DeviceMemory:
        total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        limit = group_limit_bytes(self._root)
        if limit is not None and limit < total_bytes:
            return DeviceMemory(limit, "the memory limit of this container", SHARE_OF_ITS_OWN)
        return DeviceMemory(total_bytes, "the memory of this machine", _SHARE_OF_A_HOST)

    def reset_peak(self) -> None:
        with contextlib.suppress(OSError):  # then the peak includes loading: the plan is smaller
            (self._root / "proc/self/clear_refs").write_text("5")

    def peak_bytes(self, shared_bytes: int = 0) -> int:
        text = (self._root / "proc/self/status").read_text()
        sizes = {name: int(kib) << 10 for name, kib in re.findall(r"(\w+):\s+(\d+) kB", text)}
        # Other memory that is shared, such as the KV pool of a lane, is this node's own.
        in_memory = min(sizes.get(_IN_MEMORY, 0), shared_bytes)
        return sizes[_PEAK] - sizes.get(_OF_FILES, 0) - in_memory


def return_freed_memory() -> None:
    """Return what the process has freed to the system, where the C library can do so."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
