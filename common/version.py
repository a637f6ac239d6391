"""The version of this package and that of the protocol between routers and nodes.

A process works with peers of its own protocol version, the one before and the one after: the newer
of two peers uses the older one's version. So processes of two successive versions serve side by
side while a cluster is upgraded.
"""

from __future__ import annotations

VERSION = "0.1.0"

PROTOCOL_VERSION = 3
"""Raised with every change of a message that a peer must know of to answer the same tokens."""
OLDEST_PROTOCOL_VERSION = PROTOCOL_VERSION - 1

# Those of a node whose record does not name them.
UNNAMED_PROTOCOL = 2
UNNAMED_KV_PROTOCOL = 4


def can_speak(protocol: int) -> bool:
    """Return whether this process works with a peer of this protocol version."""
    return OLDEST_PROTOCOL_VERSION <= protocol <= PROTOCOL_VERSION + 1
