"""What a process takes of the machine's memory."""

from __future__ import annotations

import os
from pathlib import Path

_OWN_PAGES = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def memory_of(pid: int, field: str = "VmRSS") -> int:
    """Bytes of memory that a process has now, or had at most (`VmHWM`) since `forget_peak`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{field}:")]
    return int(line.split()[1]) << 10


def own_memory() -> int:
    """Bytes of memory that this process has now; many times as fast as `memory_of`."""
    return int(_OWN_PAGES.read_text().split()[1]) * _PAGE_BYTES


def forget_peak(pid: int) -> None:
    """Let `VmHWM` begin anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
