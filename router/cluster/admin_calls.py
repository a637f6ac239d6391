"""Calls of an administrator to one node: permissions, fields, log lines and errors."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from common.errors import (
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    NodeLost,
    PdserveError,
    StaleEpoch,
)
from common.nodes import NodeRecord
from router.access.spaced_lines import client_address
from router.dispatch.node_pool import NodePool
from router.http.errors import ApiError, api_error
from router.http.exchange import ClientClosed, Exchange, Reply, read_body
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


def latest(pool: NodePool, node_id: str) -> NodeRecord:
    """Return the record of the latest incarnation of `node_id` that this router knows.

    Raises `UnknownNode`.
    """
    known = pool.membership.records()
    lives = [record for record in known if record.node_id == node_id]
    if not lives:
        raise UnknownNode(node_id, sorted({record.node_id for record in known}))
    return max(lives, key=lambda record: record.epoch)


Perform = Callable[[dict[str, Any], str], Awaitable[Mapping[str, Any]]]
"""Takes the fields of a body and who asks; returns the fields of the answer."""


def admin_call(command: str, perform: Perform) -> Exchange:
    """Return a call of an administrator, as whom the command line sends `command`."""

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send)
        try:
            _require_admin(scope, command)
            _require_json(scope)
            fields = _fields(await read_body(scope, receive, MAX_BODY_BYTES))
            answer = await perform(fields, _asker(scope))
        except ClientClosed:
            return
        except (UnknownNode, ApiError, PdserveError) as error:
            shown = _not_found(error) if isinstance(error, UnknownNode) else _shown(error)
            text = "no `%s` for %s: %d, %s"
            log.warning(text, command, _asker(scope), shown.status, shown.message)
            await reply.send_error(shown)
        else:
            await reply.send_json(to_json(answer))

    return Exchange(handle)


def text_field(fields: dict[str, Any], name: str, wanted: str) -> str:
    """Return a text of a body. Raises `InvalidRequest` without it; `wanted` says what it is."""
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{name} is missing: wanted {wanted}", param=name)
    return value


def _require_admin(scope: Scope, command: str) -> None:
    """Raise `ApiError` for a client that a router serves without a key, but does not trust."""
    if not scope["state"]["is_admin"]:
        raise ApiError(
            403,
            f"this needs an administrator's key: `pdserve {command} --api-key-file FILE`; that "
            "of `pdserve up` is private/keys/client/admin.key in the folder of its run, which only "
            "its user can read",
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


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidRequest("the body is not JSON") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body is not a JSON object")
    return fields


def _not_found(unknown: UnknownNode) -> ApiError:
    names = ", ".join(unknown.known[:_MAX_LISTED]) or "none"
    return ApiError(
        404,
        f"there is no node {unknown.node_id[:128]!r}: the nodes are {names}",
        code="node_not_found",
        param="node_id",
    )


def _shown(error: ApiError | PdserveError) -> ApiError:
    """Return the API's error: 409 for another incarnation, or one that leaves, 502 for a node that
    does not answer."""
    if isinstance(error, StaleEpoch):
        return ApiError(409, f"the node has begun a new life: {error}", code=error.code)
    if isinstance(error, Draining):
        return ApiError(409, str(error), code=error.code)
    if isinstance(error, DeadlineExceeded):
        error = NodeLost(f"the node does not answer: {error}")
    return api_error(error)
