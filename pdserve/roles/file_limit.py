"""The limit of open files: each connection is one, and the usual limit is low."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger("pdserve")

OTHER_FILES = 2048
"""Open files for nodes, of which each has two connections, for the placement store, libraries, and
connections that are closing."""

OTHER_NODE_FILES = 512
"""Open files of a node that are no KV connections."""
NODE_FILES = 8192
"""A prefill node opens two for each decode node that it sends to, a decode node one for each
sender; with several lanes as many for each."""


def allow_connections(wanted: int) -> int:
    """Raise the limit of open files for `wanted` connections; return how many it allows."""
    soft = _raised(wanted + OTHER_FILES)
    if soft >= wanted + OTHER_FILES:
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


def allow_node_files(kv_lanes: int) -> None:
    """Raise the limit of open files for the KV connections of a node, `kv_lanes` to each other."""
    wanted = NODE_FILES * kv_lanes
    soft = _raised(wanted)
    if soft < wanted:
        log.warning(
            "KV connections to about %d nodes at most: the system allows this process %d open "
            "files (ulimit -n)",
            max(1, soft - min(OTHER_NODE_FILES, soft // 2)) // (2 * kv_lanes),
            soft,
        )


def _raised(needed: int) -> int:
    """Raise the limit to `needed` files if it is lower and that is allowed; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return needed
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
