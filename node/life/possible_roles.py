"""Which roles a node can be given while it runs, by how it was started."""

from __future__ import annotations

from dataclasses import replace

from common.nodes import Role
from common.settings.config import Config

NODE_ROLES = (Role.PREFILL, Role.DECODE, Role.MIXED)


def refused_roles(config: Config) -> dict[Role, str]:
    """Return the roles that a node of this configuration cannot be given, each with why.

    What a node is made of does not differ by its role, but for the largest step that memory is
    planned for, and what must fit into it.
    """
    why_not = {role: _why_refused(config, role) for role in NODE_ROLES if role is not config.role}
    return {role: why for role, why in why_not.items() if why}


def can_decode(config: Config) -> bool:
    """Return whether a node of this configuration decodes, or can be moved to decoding."""
    return config.role is not Role.PREFILL or not _why_refused(config, Role.DECODE)


def _why_refused(config: Config, role: Role) -> str:
    """Return why a node cannot be given another role; empty: it can. Rules about single sections
    are the same in every role."""
    if config.role is Role.DECODE and not config.handoff.local_prefill_threshold:
        return (
            "with local_prefill_threshold = 0 its memory has no room for steps with prompts; "
            "start it with a larger one"
        )
    own = config.joint_problems()
    problems = [one for one in replace(config, role=role).joint_problems() if one not in own]
    return "; ".join(problem.text for problem in problems)
