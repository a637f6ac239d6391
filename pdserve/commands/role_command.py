"""`pdserve role`: give a running node another role."""

from __future__ import annotations

from common.errors import ConfigError
from common.nodes import Role
from common.settings.setting import joined_by_or
from pdserve.commands.http_client import RouterUnreachable, decoded, opened
from pdserve.commands.node_name import require_node_id
from pdserve.configuration.config_file import suggestion

PATH = "/v1/cluster/role"
ROLES = [role.value for role in Role if role is not Role.ROUTER]

_CALL_TIMEOUT_S = 10.0
_LARGEST_REPLY_BYTES = 64 << 10


def give_role(url: str, node_id: str, role: str, *, api_key: str = "") -> str:
    """Ask the router at `url` to give a node a role; return what has changed, in words.

    Raises `ConfigError` for what is no role or no node, and `RouterUnreachable` or `RouterRefused`.
    """
    require_node_id(node_id)
    if role not in ROLES:
        raise ConfigError(
            f"ROLE is {role!r}: wanted {joined_by_or(ROLES)}{suggestion(role, ROLES)}"
        )
    url = url.rstrip("/")
    body = {"node_id": node_id, "role": role}
    with opened(
        url, "POST", PATH, body=body, api_key=api_key, timeout_s=_CALL_TIMEOUT_S
    ) as response:
        reply = decoded(url, PATH, response.read(_LARGEST_REPLY_BYTES))
    try:
        now, earlier = str(reply["role"]), str(reply["earlier_role"])
    except (KeyError, TypeError):
        raise RouterUnreachable(
            f"{url}{PATH}: an answer without a role: no pdserve router?"
        ) from None
    if now == earlier:
        return f"{node_id} is a {now} node already"
    return f"{node_id} takes new work as a {now} node; what it has as a {earlier} node it finishes"
