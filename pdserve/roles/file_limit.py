"""The limit of open files: each connection is one, and the usual limit is low."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("pdserve")

OTHER_FILES = 512
"""Open files for nodes, the placement store, libraries, and connections that are closing."""


def allow_connections(wanted: int) -> int:
    """Raise the limit of open files for `wanted` connections; return how many it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    possible = max(1, soft - min(OTHER_FILES, soft // 2))
    log.warning(
        "at most %d connections at once, not max_connections = %d: the system allows this "
        "process %d open files (ulimit -n)",
        possible,
        wanted,
        soft,
    )
    return possible
