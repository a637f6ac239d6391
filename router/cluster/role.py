"""`POST /v1/cluster/role`: a node is given another role. The middleware checks permissions."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Response

from common.errors import InvalidRequest, LastInRole
from common.ids import Incarnation
from common.nodes import Role
from router.cluster.admin_calls import admin_call, latest, text_field
from router.cluster.shapes import ROLE_RESPONSES, RoleAnswer, RoleBody
from router.dispatch.node_pool import NodePool
from router.http.api_texts import CLUSTER
from router.http.described import described_body
from router.http.errors import ApiError
from router.http.routes import Access, open_to

log = logging.getLogger("pdserve.router.nodes")

_ROLES = {role.value: role for role in Role if role is not Role.ROUTER}


@dataclass(frozen=True, slots=True)
class MovedNode:
    """A node that was given `role`, until then it had `earlier`."""

    node: Incarnation
    role: Role
    earlier: Role


async def give_role(pool: NodePool, node_id: str, role: Role) -> MovedNode:
    """Give the latest incarnation of `node_id` that this router knows, and no other, a role.

    A node is taken away from those that decode only if another one of them is left in the step in
    which the placement store writes its role: other routers may change that one at the same time.

    Raises `UnknownNode`, `ApiError` for the last node that could finish answers, and what
    `NodePool.set_role` raises.
    """
    node = latest(pool, node_id).incarnation
    stops_decoding = role is Role.PREFILL
    others = pool.changes.others_that_stay(pool.nodes(), node) if stops_decoding else None
    try:
        return MovedNode(node, role, await pool.set_role(node, role, others=others))
    except LastInRole as last:
        raise ApiError(
            409,
            f"without {node_id} no node would decode, and no request could end: start another "
            "decode or mixed node, or give another node that role first",
            code="last_decode_node",
        ) from last


GiveRole = Callable[[str, Role], Awaitable[MovedNode]]


def add_role_route(app: FastAPI, give_role: GiveRole) -> None:
    """Add the route to `app`."""

    async def perform(fields: dict[str, Any], asker: str) -> RoleAnswer:
        node_id = text_field(fields, "node_id", "the name of a node")
        name = text_field(fields, "role", ", ".join(_ROLES))
        if name not in _ROLES:
            wanted = ", ".join(_ROLES)
            raise InvalidRequest(f"role is {name[:32]!r}: wanted {wanted}", param="role")
        moved = await give_role(node_id, _ROLES[name])
        log.info("%s was given the role %s by %s", moved.node, moved.role.value, asker)
        return {
            "node_id": moved.node.node_id,
            "epoch": moved.node.epoch,
            "role": moved.role.value,
            "earlier_role": moved.earlier.value,
        }

    @app.post(
        "/v1/cluster/role",
        summary="Give a running node another role",
        tags=[CLUSTER],
        description=_DESCRIPTION,
        responses=ROLE_RESPONSES,
        openapi_extra=described_body(RoleBody),
    )
    @open_to(Access.ADMIN)
    async def role() -> Response:
        return admin_call("role NODE ROLE", perform)


_DESCRIPTION = (
    "A node takes new work of another role at once, and finishes what it has. The body is "
    '{"node_id": "…", "role": "prefill"}, or "decode" or "mixed". The role that it has already '
    "changes nothing. Needs an administrator's key where keys are set up."
)
