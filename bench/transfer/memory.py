"""This process's memory, as Linux reports it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes: resident now, the shared part of them, and the peak."""

    resident: int
    shared: int
    peak: int


def reset_peak_memory() -> None:
    """Restart the measurement of the peak."""
    Path("/proc/self/clear_refs").write_text("5")


def memory_bytes() -> Memory:
    """Return this process's memory now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = {key: text.split() for key, _, text in (line.partition(":") for line in lines)}
    resident, shared, peak = (int(fields[key][0]) << 10 for key in ("VmRSS", "RssShmem", "VmHWM"))
    return Memory(resident, shared, peak)
