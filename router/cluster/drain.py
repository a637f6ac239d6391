"""`POST /v1/cluster/drain`: a node drains. The middleware checks permissions."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Response

from common.ids import Incarnation
from router.cluster.admin_calls import admin_call, latest, text_field
from router.cluster.shapes import DRAIN_RESPONSES, DrainAnswer, DrainBody
from router.dispatch.node_pool import NodePool
from router.http.api_texts import CLUSTER
from router.http.described import described_body
from router.http.routes import Access, open_to

log = logging.getLogger("pdserve.router.nodes")


@dataclass(frozen=True, slots=True)
class DrainingNode:
    """A node that was asked to drain; its requests have `timeout_s` from the first request on."""

    node: Incarnation
    timeout_s: float


async def drain_node(pool: NodePool, node_id: str) -> DrainingNode:
    """Ask the latest incarnation of `node_id` that this router knows, and no other, to drain.

    Raises `UnknownNode`, `StaleEpoch` when the node has restarted, and `NodeLost` when it has left
    or does not answer.
    """
    node = latest(pool, node_id).incarnation
    return DrainingNode(node, await pool.drain(node))


DrainNode = Callable[[str], Awaitable[DrainingNode]]


def add_drain_route(app: FastAPI, drain_node: DrainNode) -> None:
    """Add the route to `app`."""

    async def perform(fields: dict[str, Any], asker: str) -> DrainAnswer:
        leaving = await drain_node(text_field(fields, "node_id", "the name of a node"))
        log.info("%s was asked to drain by %s", leaving.node, asker)
        return {
            "node_id": leaving.node.node_id,
            "epoch": leaving.node.epoch,
            "is_draining": True,
            "drain_timeout_s": leaving.timeout_s,
        }

    @app.post(
        "/v1/cluster/drain",
        summary="Let a node finish its requests and leave",
        tags=[CLUSTER],
        description=_DESCRIPTION,
        responses=DRAIN_RESPONSES,
        openapi_extra=described_body(DrainBody),
    )
    @open_to(Access.ADMIN)
    async def drain() -> Response:
        return admin_call("drain NODE", perform)


_DESCRIPTION = (
    "A node takes no new work, finishes what it has or hands it over, and ends. "
    'The body is {"node_id": "…"}. Needs an administrator\'s key where keys are set up.'
)
