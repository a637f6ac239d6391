"""The name of a node that a command is given: what no node can be called is no question."""

from __future__ import annotations

from common.errors import ConfigError


def require_node_id(node_id: str) -> None:
    """Raise `ConfigError` for an empty name, before a router is asked."""
    if not node_id.strip():
        raise ConfigError("NODE_ID is empty: wanted the name of a node in `pdserve status`")
