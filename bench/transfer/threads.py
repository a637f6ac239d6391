"""Processor time of this process by thread, as Linux reports it."""

from __future__ import annotations

import threading
from pathlib import Path

_NAMES = {
    "MainThread": "caller",
    "pdserve-kv": "connector",
    "pdserve-rdma": "rdma_writer",
    "pdserve-kv-": "workers",
    "ZMQbg/IO/": "zmq_io",
}


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
