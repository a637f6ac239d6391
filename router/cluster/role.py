"""`POST /v1/cluster/role`: a node is given another role. The middleware checks permissions."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Response

from common.errors import InvalidRequest
from common.ids import Incarnation
from common.nodes import NodeRecord, Role
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

    Raises `UnknownNode`, `ApiError` for the last node that could finish answers, and what
    `NodePool.set_role` raises.
    """
    if role is Role.PREFILL:
        return await _have_prefill(pool, node_id)
    record = latest(pool, node_id)
    await pool.set_role(record.incarnation, role)
    return MovedNode(record.incarnation, role, record.role)


async def _have_prefill(pool: NodePool, node_id: str) -> MovedNode:
    """Take a node away from those that decode, of which another one must be left.

    Other routers may have changed nodes since the store was asked last, or do so at the same time.
    So it is asked before the change, and again after it. A node writes its role to the store before
    it answers, so of routers that take the last ones away at once, each that is answered after the
    last node has written finds that none decodes, and takes its change back.
    """
    await pool.wait_refreshed()
    record = latest(pool, node_id)
    _require_another(pool, record)
    await pool.set_role(record.incarnation, Role.PREFILL)
    await pool.wait_refreshed()
    try:
        _require_another(pool, record)
    except ApiError:
        await pool.set_role(record.incarnation, record.role)
        raise
    return MovedNode(record.incarnation, Role.PREFILL, record.role)


def _require_another(pool: NodePool, record: NodeRecord) -> None:
    """Raise `ApiError` where no node would decode without this one."""
    if not pool.changes.leaves_one(pool.nodes(), record.incarnation, Role.PREFILL):
        raise ApiError(
            409,
            f"without {record.node_id} no node would decode, and no request could end: start "
            "another decode or mixed node, or give another node that role first",
            code="last_decode_node",
        )


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
