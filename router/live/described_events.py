"""The events of `/v1/live`, for `/openapi.json`."""

from __future__ import annotations

from router.http.described import (
    COUNT,
    NUMBER,
    TEXT,
    TRUTH,
    Responses,
    Schema,
    error_responses,
    good_response,
    list_of,
    object_of,
    or_null,
)
from router.http.sse import MEDIA_TYPE

_ROW: Schema = {**list_of(or_null({"type": "number"})), "description": "In the order of columns."}
_PLACEMENT = object_of(
    {
        "at_s": NUMBER,
        "request_id": TEXT,
        "attempt": COUNT,
        "http_request_id": TEXT,
        "decode": or_null(TEXT),
        "prefill": or_null(TEXT),
        "reason": TEXT,
        "outcome": TEXT,
        "output_tokens": COUNT,
        "duration_s": or_null(NUMBER),
    }
)
_ERROR = object_of(
    {
        "at_s": NUMBER,
        "request_id": TEXT,
        "endpoint": TEXT,
        "status": COUNT,
        "code": TEXT,
        "text": TEXT,
    }
)
_REQUEST = object_of({"id": TEXT, "phase": TEXT, "decode": or_null(TEXT), "prefill": or_null(TEXT)})
_LISTS = {"placements": list_of(_PLACEMENT), "errors": list_of(_ERROR)}
HISTORY = object_of(
    {
        "kind": {"const": "history"},
        "columns": list_of(TEXT),
        "samples": list_of(_ROW),
        **_LISTS,
    }
)
SNAPSHOT = object_of(
    {
        "kind": {"const": "snapshot"},
        "router_id": TEXT,
        "version": TEXT,
        "model": TEXT,
        "is_store_away": TRUTH,
        "trouble": TEXT,
        "warnings": list_of(TEXT),
        "num_nodes": COUNT,
        "nodes": list_of({"type": "object"}),
        "pairs": list_of({"type": "object"}),
        "requests": list_of(_REQUEST),
        **_LISTS,
        "sample": _ROW,
    }
)
LIVE_RESPONSES: Responses = {
    **good_response(
        {
            "anyOf": [HISTORY, SNAPSHOT],
            "description": "Events, each a JSON object behind `data: `. Times count from the start "
            "of the router.",
        },
        "The history once, then a snapshot each second",
        MEDIA_TYPE,
    ),
    **error_responses(503, texts={503: "Too many viewers, or the router stops"}),
}
