"""Which roles a node can be given while it runs, by how it was started."""

from __future__ import annotations

from common.nodes import Role
from common.settings.config import Config


def refused_roles(config: Config) -> dict[Role, str]:
    """Return the roles that a node of this configuration cannot be given, each with why."""
    return {
        role: f"start another node with --role {role.value}"
        for role in (Role.PREFILL, Role.DECODE, Role.MIXED)
        if role is not config.role
    }
