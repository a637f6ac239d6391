"""CPU seconds of this process, or of those of its threads that move KV."""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path

# Linux: a thread's CPU clock has the id (~tid << 3) | CPUCLOCK_PERTHREAD | CPUCLOCK_SCHED.
_THREAD_CLOCK = 6
_CONNECTOR_THREAD = "pdserve-kv"
_NETWORK_THREADS = "ZMQbg"


def process_cpu_s() -> float:
    """Return user and system time of all threads, ended ones included."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def transfer_threads_cpu_s() -> float:
    """Return the CPU time of the connector's thread and its sockets' threads.

    They all live as long as the connector.
    """
    ids = [
        thread.native_id
        for thread in threading.enumerate()
        if thread.name == _CONNECTOR_THREAD and thread.native_id is not None
    ]
    for folder in Path("/proc/self/task").iterdir():
        if (folder / "comm").read_text().startswith(_NETWORK_THREADS):
            ids.append(int(folder.name))
    return sum(time.clock_gettime((~thread_id << 3) | _THREAD_CLOCK) for thread_id in set(ids))
