"""`POST /v1/cluster/drain`: a node drains. The middleware checks permissions."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi import FastAPI, Response
from starlette.types import Receive, Scope, Send

from common.errors import DeadlineExceeded, InvalidRequest, NodeLost, PdserveError, StaleEpoch
from common.ids import Incarnation
from router.access.spaced_lines import client_address
from router.cluster.shapes import DRAIN_RESPONSES, DrainAnswer, DrainBody
from router.dispatch.node_pool import NodePool
from router.http.api_texts import CLUSTER
from router.http.described import described_body
from router.http.errors import ApiError, api_error
from router.http.exchange import ClientClosed, Exchange, Reply, read_body
from router.http.routes import Access, open_to
from router.http.sse import to_json

log = logging.getLogger("pdserve.router.nodes")

MAX_BODY_BYTES = 4096
JSON_TYPE = b"application/json"
_MAX_LISTED = 20


class UnknownNode(Exception):
    """No node of this name is known here; `known` are the known ones, ordered."""

    def __init__(self, node_id: str, known: list[str]) -> None:
        super().__init__(node_id)
        self.node_id = node_id
        self.known = known


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
    known = [record.incarnation for record in pool.membership.records()]
    lives = [incarnation for incarnation in known if incarnation.node_id == node_id]
    if not lives:
        raise UnknownNode(node_id, sorted({incarnation.node_id for incarnation in known}))
    node = max(lives)
    client = pool.client(node)
    if client is None:
        raise NodeLost(f"{node} has left")
    timeout_s = await client.beside.drain()
    return DrainingNode(node, timeout_s)


DrainNode = Callable[[str], Awaitable[DrainingNode]]


def add_drain_route(app: FastAPI, drain_node: DrainNode) -> None:
    """Add the route to `app`."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send)
        try:
            _require_admin(scope)
            _require_json(scope)
            node_id = _node_id(await read_body(scope, receive, MAX_BODY_BYTES))
            leaving = await drain_node(node_id)
            log.info("%s was asked to drain by %s", leaving.node, _asker(scope))
        except ClientClosed:
            return
        except (UnknownNode, ApiError, PdserveError) as error:
            shown = _not_found(error) if isinstance(error, UnknownNode) else _shown(error)
            log.warning("no node drains for %s: %d, %s", _asker(scope), shown.status, shown.message)
            await reply.send_error(shown)
        else:
            answer: DrainAnswer = {
                "node_id": leaving.node.node_id,
                "epoch": leaving.node.epoch,
                "is_draining": True,
                "drain_timeout_s": leaving.timeout_s,
            }
            await reply.send_json(to_json(answer))

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
        return Exchange(handle)


_DESCRIPTION = (
    "A node takes no new work, finishes what it has or hands it over, and ends. "
    'The body is {"node_id": "…"}. Needs an administrator\'s key where keys are set up.'
)


def _require_admin(scope: Scope) -> None:
    """Raise `ApiError` for a client that a router serves without a key, but does not trust."""
    if not scope["state"]["is_admin"]:
        raise ApiError(
            403,
            "draining a node needs an administrator's key: `pdserve drain NODE --api-key-file "
            "FILE`; that of `pdserve up` is private/keys/client/admin.key in the folder of its "
            "run, which only its user can read",
            code="not_admin",
        )


def _require_json(scope: Scope) -> None:
    """Raise `ApiError` unless the body is said to be JSON, which a form of a web page cannot."""
    given = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    if given.partition(b";")[0].strip().lower() != JSON_TYPE:
        raise ApiError(
            415,
            f"the content-type is {given[:64].decode('latin-1')!r}: wanted application/json",
            code="unsupported_media_type",
        )


def _asker(scope: Scope) -> str:
    state = scope.get("state", {})
    key_name = state.get("api_key_name")
    who = f"the key {key_name!r}" if key_name else "a client without a key"
    return f"{who}, request {state.get('request_id', '')} from {client_address(scope)}"


def _node_id(body: bytes) -> str:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidRequest("the body is not JSON") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body is not a JSON object")
    node_id = fields.get("node_id")
    if not isinstance(node_id, str) or not node_id:
        raise InvalidRequest("node_id is missing: wanted the name of a node", param="node_id")
    return node_id


def _not_found(unknown: UnknownNode) -> ApiError:
    names = ", ".join(unknown.known[:_MAX_LISTED]) or "none"
    return ApiError(
        404,
        f"there is no node {unknown.node_id[:128]!r}: the nodes are {names}",
        code="node_not_found",
        param="node_id",
    )


def _shown(error: ApiError | PdserveError) -> ApiError:
    """Return the API's error: 409 for another incarnation, 502 for a node that does not answer."""
    if isinstance(error, StaleEpoch):
        return ApiError(409, f"the node has begun a new life: {error}", code=error.code)
    if isinstance(error, DeadlineExceeded):
        error = NodeLost(f"the node does not answer: {error}")
    return api_error(error)
