"""What the endpoints about the cluster take and answer, for `/openapi.json`."""

from __future__ import annotations

from router.http.described import (
    COMMON_ERRORS,
    COUNT,
    ERRORS,
    NUMBER,
    PROBE_ERRORS,
    TEXT,
    TRUTH,
    Responses,
    described_body,
    error_responses,
    good_response,
    list_of,
    object_of,
    or_null,
)

READY = object_of({"status": {"const": "ready"}, "warnings": list_of(TEXT)}, "warnings")
NOT_READY = object_of({"status": {"const": "not ready"}, "reason": TEXT})

_NODE = {
    **object_of(
        {
            "node_id": TEXT,
            "epoch": COUNT,
            "role": {"enum": ["prefill", "decode", "mixed"]},
            "version": TEXT,
            "control_address": TEXT,
            "max_model_len": COUNT,
            "num_blocks": COUNT,
            "free_blocks": COUNT,
            "is_draining": TRUTH,
            "num_requests": COUNT,
            "is_suspected": TRUTH,
            "is_listed": TRUTH,
            "kv_links": list_of({"type": "object"}),
            "kv_unreachable": list_of({"type": "object"}),
        }
    ),
    "description": "All facts that a node reports, of which the first ones are listed here.",
}
_PLACEMENT = object_of(
    {
        "request_id": TEXT,
        "attempt": COUNT,
        "http_request_id": or_null(TEXT),
        "decode": or_null(TEXT),
        "prefill": or_null(TEXT),
        "reason": TEXT,
        "outcome": {**or_null(TEXT), "description": "null while it is in progress."},
        "output_tokens": COUNT,
        "duration_s": or_null(NUMBER),
    }
)
SERVING = {
    **object_of(
        {
            "uptime_s": NUMBER,
            "in_progress": COUNT,
            "tokens_per_s": NUMBER,
            "requests_per_s": NUMBER,
            "failures_per_s": NUMBER,
            "ttft_p50_s": or_null(NUMBER),
            "tpot_p50_s": or_null(NUMBER),
        }
    ),
    "description": "What this router served: rates of the last 5 s, medians of the last 10 s.",
}
CLUSTER = object_of(
    {
        "router": object_of(
            {
                "router_id": TEXT,
                "epoch": COUNT,
                "version": TEXT,
                "protocol": COUNT,
                "num_running": COUNT,
                "is_draining": TRUTH,
            }
        ),
        "serving": SERVING,
        "placement_store": {"enum": ["ok", "away"]},
        "warnings": list_of(TEXT),
        "nodes": list_of(_NODE),
        "recent_placements": {**list_of(_PLACEMENT), "description": "The latest first."},
    }
)
TARGETS = list_of(
    object_of(
        {"targets": list_of(TEXT), "labels": {"type": "object", "additionalProperties": TEXT}}
    )
)
DRAINING = object_of(
    {
        "node_id": TEXT,
        "epoch": COUNT,
        "is_draining": {"const": True},
        "drain_timeout_s": {**NUMBER, "description": "What its requests have to end."},
    }
)

READY_RESPONSES: Responses = {
    **good_response(READY, "A request that arrives now has somewhere to run"),
    **error_responses(503, schema=NOT_READY, texts={503: "It has not; the reason is there"}),
    **PROBE_ERRORS,
}
CLUSTER_RESPONSES = good_response(CLUSTER, "The router, the nodes, the latest placements")
TARGETS_RESPONSES = good_response(TARGETS, "Groups of targets")

_DRAIN_ERRORS: dict[int | str, str] = {
    **ERRORS,
    404: "There is no such node",
    409: "The node has restarted since",
    415: "The body is not said to be JSON",
    502: "The node has left, or does not answer",
}
DRAIN_RESPONSES: Responses = {
    **good_response(DRAINING, "The node drains"),
    **COMMON_ERRORS,
    **error_responses(400, 404, 408, 409, 413, 415, 502, 503, texts=_DRAIN_ERRORS),
}
DRAIN_BODY = described_body(object_of({"node_id": TEXT}))
