"""The span of each generation request: every endpoint has one, however its request ends."""

from __future__ import annotations

from typing import Any

import pytest

from router.api import endpoints
from router.api.bodies.asked import RequestKind
from router.api.endpoints import Endpoint
from tests.support.http.http_edge import make_edge
from tests.support.observing.recorded_tracing import RecordedTracing

ENDPOINTS = [one for one in vars(endpoints).values() if isinstance(one, Endpoint)]
MESSAGES = [{"role": "user", "content": "Hello"}]
BODIES: dict[RequestKind, dict[str, Any]] = {
    RequestKind.CHAT: {"messages": MESSAGES},
    RequestKind.COMPLETION: {"prompt": "Hello"},
    RequestKind.RESPONSE: {"input": "Hello"},
    RequestKind.MESSAGE: {"messages": MESSAGES, "max_tokens": 9},
}
OPERATIONS = {RequestKind.COMPLETION: "text_completion"}


def test_all_kinds_of_requests_are_tried() -> None:
    others = {RequestKind.EITHER, RequestKind.COUNTED_MESSAGE}
    assert {one.kind for one in ENDPOINTS} == BODIES.keys() == {*RequestKind} - others


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda one: one.name)
async def test_an_answer(endpoint: Endpoint, is_stream: bool) -> None:
    tracing = RecordedTracing()
    async with make_edge(tracing=tracing).client(headers={"x-request-id": "mine"}) as client:
        body = {**BODIES[endpoint.kind], "model": "tiny", "stream": is_stream}
        reply = await client.post(endpoint.path, json=body)
    assert reply.status_code == 200
    tracing.close()
    request, *_ = tracing.spans
    assert (request.name, request.error) == ("request", "")
    assert request.attributes["gen_ai.operation.name"] == OPERATIONS.get(endpoint.kind, "chat")
    assert request.attributes["http.route"] == endpoint.path
    assert request.attributes["pdserve.request_id"] == "mine"
    assert request.attributes["pdserve.outcome"] == "ok"
    assert request.attributes["http.response.status_code"] == 200


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda one: one.name)
async def test_a_body_that_is_none(endpoint: Endpoint) -> None:
    tracing = RecordedTracing()
    async with make_edge(tracing=tracing).client() as client:
        assert (await client.post(endpoint.path, content=b"{")).status_code == 400
    tracing.close()
    (request,) = tracing.spans
    assert request.error == "", "a client's mistake is no error of the server"
    assert request.attributes["pdserve.outcome"] == "invalid_request"
