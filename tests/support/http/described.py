"""What the description of the API says of an answer."""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator

from router.http.described import inlined
from tests.support.http.http_edge import Edge


def closed(schema: Any) -> Any:
    """The schema without room for properties that it does not name."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {key: closed(part) for key, part in schema.items()}
    if "properties" in parts:
        parts["additionalProperties"] = False
    return parts


async def described_paths(edge: Edge) -> dict[str, Any]:
    """The paths of `/openapi.json`, with the schemas in their places."""
    async with edge.client() as client:
        described = (await client.get("/openapi.json")).json()
    paths: dict[str, Any] = inlined(described["paths"], described["components"]["schemas"])
    return paths


def check(answer: Any, schema: Any) -> None:
    Draft202012Validator(closed(schema)).validate(answer)
