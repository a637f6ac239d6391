"""What Linux says about this process's memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Memory:
    """In bytes: what is resident now, the part of it that is shared memory, the most there was."""

    resident: int
    shared: int
    peak: int


def reset_peak_memory() -> None:
    """Count the peak from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def memory_bytes() -> Memory:
    """Of this process, now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = {key: text.split() for key, _, text in (line.partition(":") for line in lines)}
    resident, shared, peak = (int(fields[key][0]) << 10 for key in ("VmRSS", "RssShmem", "VmHWM"))
    return Memory(resident, shared, peak)
