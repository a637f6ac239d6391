"""What the system lets a process have of threads and addresses, told before a library needs them.

gRPC and the tokenizer end a process by a signal where they get no thread or no memory.
"""

from __future__ import annotations

import logging
import resource
import threading

from common.control_group import num_visible_cores
from common.errors import ConfigError

log = logging.getLogger("pdserve")

THREADS = 24
"""Threads of a role, beside one for each core: nodes and routers on two cores had up to 17."""


def require_threads() -> None:
    """Raise `ConfigError` where this process cannot begin as many threads as a role may need.

    They are begun and ended: what limits them, and how many others count, is the system's.
    """
    wanted = THREADS + num_visible_cores()
    is_over = threading.Event()
    begun: list[threading.Thread] = []
    try:
        for _ in range(wanted):
            thread = threading.Thread(target=is_over.wait, daemon=True)
            thread.start()
            begun.append(thread)
    except RuntimeError:
        raise ConfigError(
            f"the system lets this process begin {len(begun)} threads: wanted {wanted} (pids.max "
            "of a container's cgroup, ulimit -u or ulimit -v limits them)"
        ) from None
    finally:
        is_over.set()
        for thread in begun:
            thread.join()


def warn_of_little_address_space() -> None:
    """Warn where the addresses of this process are limited: libraries fail in many ways then."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        log.warning(
            "this process may map %.2f GiB of addresses (ulimit -v), of which it needs several "
            "times what it uses: if it fails, start it without this limit",
            soft / (1 << 30),
        )


def out_of_memory(error: MemoryError) -> str:
    """Return in words that memory was wanted and not there, and what limits it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    limit = "of this machine, or of its container"
    if soft != resource.RLIM_INFINITY:
        limit = f"of {soft / (1 << 30):.2f} GiB of addresses (ulimit -v)"
    what = str(error) or "an allocation failed"
    return f"{what}: more memory was wanted than the limit {limit} leaves"
