"""What endpoints take and answer as JSON schemas, for `/openapi.json`: parts, bodies and errors.

Nothing is checked with them at run time; tests compare real answers with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]
Responses = dict[int | str, dict[str, Any]]
"""What an endpoint answers, by status, as OpenAPI describes it."""

JSON = "application/json"

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number", "minimum": 0}
TRUTH: Schema = {"type": "boolean"}


def object_of(properties: Mapping[str, Schema], *optional: str) -> Schema:
    """Return an object whose properties are all there, but for `optional` ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required}


def list_of(items: Schema) -> Schema:
    """Return a list of `items`."""
    return {"type": "array", "items": items}


def or_null(schema: Schema) -> Schema:
    """Return `schema`, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


ERROR = object_of(
    {
        "error": object_of(
            {
                "message": TEXT,
                "type": {"enum": ["invalid_request_error", "rate_limit_error", "server_error"]},
                "param": {**or_null(TEXT), "description": "The field at fault."},
                "code": TEXT,
            }
        )
    }
)

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


def error_responses(
    *statuses: int | str, schema: Schema = ERROR, texts: Mapping[int | str, str] = ERRORS
) -> Responses:
    """Return errors by status; `texts` say what each means."""
    content = {JSON: {"schema": schema}}
    return {status: {"description": texts[status], "content": content} for status in statuses}


def good_response(schema: Schema, description: str, media_type: str = JSON) -> Responses:
    """Return the answer of an endpoint that went well."""
    return {200: {"description": description, "content": {media_type: {"schema": schema}}}}


COMMON_ERRORS = error_responses(401, 403, 500)
"""What every endpoint behind the keys may answer."""

PROBE_ERRORS = error_responses(403)
"""What those that are open without a key may answer."""


def described_body(schema: Schema) -> dict[str, Any]:
    """Return the description of a body that the framework does not read."""
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}


def schema_of_model(model: type[BaseModel]) -> Schema:
    """Return the schema of a model without references, so that it can be a part of another one."""
    schema = model.model_json_schema()
    definitions = schema.pop("$defs", {})
    inlined: Schema = _inlined(schema, definitions)
    return inlined


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}
