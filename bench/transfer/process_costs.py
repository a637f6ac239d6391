"""This process's memory and processor time, as Linux reports them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

_NAMES = {
    "MainThread": "caller",
    "pdserve-kv": "connector",
    "pdserve-rdma": "rdma_writer",
    "pdserve-kv-": "workers",
    "ZMQbg/IO/": "zmq_io",
}


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


def cpu_s() -> dict[str, float]:
    """Return seconds of processor time so far: by the name of a thread, and "all" for the process.

    The caller is the thread that pushes; threads without a name of their own here are "other".
    """
    names = {str(one.native_id): one.name for one in threading.enumerate()}
    spans = {"all": 0.0}
    for task in Path("/proc/self/task").iterdir():
        try:
            name = names.get(task.name) or (task / "comm").read_text().strip()
            span_s = int((task / "schedstat").read_text().split()[0]) / 1e9
        except (FileNotFoundError, ProcessLookupError):
            continue  # It ended meanwhile.
        label = _NAMES.get(name.rstrip("0123456789"), "other")
        spans[label] = spans.get(label, 0.0) + span_s
        spans["all"] += span_s
    return spans
