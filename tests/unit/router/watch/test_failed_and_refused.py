"""What the server failed is counted apart from what it refused, in metrics and on the live page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from common.errors import CheckpointError, ConfigError, NodeLost, PdserveError, PlacementUnavailable
from router.http.errors import api_error
from tests.support.http.http_edge import Edge, make_edge
from tests.support.http.scripted_generator import chunks, fails

BODY: dict[str, Any] = {"model": "tiny", "prompt": "Hello", "max_tokens": 9}


def errors(kind: type[PdserveError] = PdserveError) -> Iterator[type[PdserveError]]:
    """Every error that a request can end with, by inheritance."""
    if kind not in (PdserveError, ConfigError, CheckpointError):
        yield kind
    for child in kind.__subclasses__():
        yield from errors(child)


KINDS = [
    kind
    for kind in dict.fromkeys((*errors(), PlacementUnavailable))
    if kind.__module__ in ("common.errors", "placement.store")
]


def counts(edge: Edge) -> tuple[float, float]:
    """Failed and refused requests; the live page has the same ones."""
    failed = edge.registry.get_sample_value("pdserve_failed_requests_total")
    refused = edge.registry.get_sample_value("pdserve_refused_requests_total")
    assert failed == edge.live.edge.num_failed
    assert refused == edge.live.edge.num_refused
    return failed, refused


async def test_before_the_first_error_both_are_zero() -> None:
    """A counter that begins with its first event has no rate for it."""
    edge = make_edge()
    assert counts(edge) == (0, 0)
    async with edge.client() as client:
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    assert counts(edge) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_status_says_whose_fault_it_is(kind: type[PdserveError]) -> None:
    edge = make_edge(fails(kind("x")))
    async with edge.client() as client:
        status = (await client.post("/v1/completions", json=BODY)).status_code
    assert status == api_error(kind("x")).status
    assert counts(edge) == ((1, 0) if status >= 500 else (0, 1))


async def test_a_bug_is_a_failure() -> None:
    edge = make_edge(fails(KeyError("a bug")))
    async with edge.client() as client:
        await client.post("/v1/completions", json=BODY)
    assert counts(edge) == (1, 0)


async def test_a_failure_in_a_stream_whose_status_was_200() -> None:
    edge = make_edge(fails(NodeLost("gone"), after=chunks([50, 51])[:1]))
    async with edge.client() as client:
        reply = await client.post("/v1/completions", json={**BODY, "stream": True})
    assert reply.status_code == 200
    assert counts(edge) == (1, 0)


@pytest.mark.parametrize(
    ("body", "status"), [({"prompt": 5}, 400), ({"prompt": "a", "model": "other"}, 404)]
)
async def test_a_mistake_is_refused(body: dict[str, Any], status: int) -> None:
    edge = make_edge()
    async with edge.client() as client:
        assert (await client.post("/v1/completions", json=body)).status_code == status
    assert counts(edge) == (0, 1)
