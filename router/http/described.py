"""Descriptions of the bodies and answers of a route, for `/openapi.json`.

Answers are `TypedDict`s, declared where they are made. The framework does not get the types
themselves, of which it would make a validator for each answer of each route. Nothing is checked
with them at run time; tests compare real answers with them. Their schemas take half of a router's
start to make, so a route only numbers its types, and `with_schemas` puts the schemas in when
somebody asks for the description.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

Schema = dict[str, Any]
Responses = dict[int | str, dict[str, Any]]
"""What an endpoint answers besides its own answer, by status."""

JSON = "application/json"
NAMED = "#/components/schemas/{model}"
"""The place of a type's schema in `/openapi.json`, where `documented_api` puts it."""

_NAMED_LATER, _WHOLE_LATER = "x-pdserve-named", "x-pdserve-whole"
"""The keys of a type's number, where `named_schema` or `schema_of` is to stand."""

_kinds: list[Any] = []


@cache
def _number(kind: Any) -> int:
    _kinds.append(kind)
    return len(_kinds) - 1


class ErrorFields(TypedDict):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: Annotated[str | None, Field(description="The field at fault.")]
    code: str


class ErrorAnswer(TypedDict):
    """An error as OpenAI has it."""

    error: ErrorFields


ERRORS: dict[int | str, str] = {
    400: "The request is wrong; the error names the field",
    401: "The API key is missing or wrong",
    403: "The key may not do this; without keys, a page or a name of another host",
    404: "Another model than the one that is served",
    408: "The body stood still while too many others arrived",
    413: "The body is too large",
    429: "A limit, or a deadline that cannot be met; Retry-After says when to ask again",
    500: "The server failed; its log has the reason",
    502: "The nodes that ran the request were lost",
    503: "No node can take the request now; Retry-After says when to ask again",
    504: "The request was not done in time",
}


@cache
def named_schema(kind: Any) -> Schema:
    """Return the schema of a type that names types as `NAMED` says, with their own in `$defs`."""
    schema = TypeAdapter(list[kind]).json_schema(ref_template=NAMED)
    return {**schema["items"], "$defs": schema.get("$defs", {})}


def response(answer: Any, description: str, media_type: str = JSON) -> dict[str, Any]:
    """Return what an answer of one status is."""
    schema = {_NAMED_LATER: _number(answer)}
    return {"description": description, "content": {media_type: {"schema": schema}}}


def error_responses(
    *statuses: int | str, answer: Any = ErrorAnswer, texts: Mapping[int | str, str] = ERRORS
) -> Responses:
    """Return errors by status; `texts` say what each means."""
    return {status: response(answer, texts[status]) for status in statuses}


def good_response(
    answer: Any, description: str = "Successful Response", media_type: str = JSON
) -> Responses:
    """Return the answer of an endpoint that went well."""
    return {200: response(answer, description, media_type)}


COMMON_ERRORS = error_responses(401, 403, 500)
"""The errors of every endpoint that requires a key."""

PROBE_ERRORS = error_responses(403)
"""The errors of the endpoints that are open without a key."""


def described_body(kind: Any, **more: str) -> dict[str, Any]:
    """Return the description of a body that the framework does not read."""
    schema = {_WHOLE_LATER: _number(kind), **more}
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}


def with_schemas(part: Any) -> Any:
    """Return a part of the description of routes with the schemas of their types in it."""
    if isinstance(part, list):
        return [with_schemas(one) for one in part]
    if not isinstance(part, dict):
        return part
    rest = {key: with_schemas(one) for key, one in part.items()}
    if (number := rest.pop(_NAMED_LATER, None)) is not None:
        return named_schema(_kinds[number]) | rest
    if (number := rest.pop(_WHOLE_LATER, None)) is not None:
        return schema_of(_kinds[number]) | rest
    return rest


@cache
def schema_of(kind: Any) -> Schema:
    """Return the schema of a type without references, so that it can be a part of another one."""
    schema = TypeAdapter(kind).json_schema()
    whole: Schema = inlined(schema, schema.pop("$defs", {}))
    return whole


def inlined(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Return a schema with the definitions that it refers to in their places."""
    if isinstance(schema, list):
        return [inlined(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        own = {key: value for key, value in schema.items() if key != "$ref"}
        return inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions) | own
    return {key: inlined(value, definitions) for key, value in schema.items()}
