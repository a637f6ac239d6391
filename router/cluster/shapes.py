"""Bodies and answers of the endpoints about the cluster, for `/openapi.json`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from common.wire_types import Count
from router.http.described import (
    COMMON_ERRORS,
    ERRORS,
    PROBE_ERRORS,
    Responses,
    error_responses,
    good_response,
)
from router.live.shapes import Serving
from router.watch.scaling_report import ScalingAnswer


class ReadyAnswer(TypedDict):
    status: Literal["ready"]
    warnings: NotRequired[list[str]]


class NotReadyAnswer(TypedDict):
    status: Literal["not ready"]
    reason: str


class RouterFacts(TypedDict):
    router_id: str
    epoch: Count
    version: str
    protocol: Count
    num_running: Count
    is_draining: bool
    not_ready: Annotated[str, Field(description="The reason of `/ready`; empty when it is 200.")]


class NodeFacts(TypedDict):
    """All facts that a node reports, of which the first ones are listed here."""

    node_id: str
    epoch: Count
    role: Literal["prefill", "decode", "mixed"]
    version: str
    control_address: str
    max_model_len: Count
    num_blocks: Count
    free_blocks: Count
    is_draining: bool
    num_requests: Count
    is_suspected: bool
    is_listed: bool
    kv_links: list[dict[str, Any]]
    kv_unreachable: list[dict[str, Any]]


class PlacementFacts(TypedDict):
    choice_id: str
    attempt: Count
    request_id: str | None
    decode: str | None
    prefill: str | None
    reason: str
    outcome: Annotated[str | None, Field(description="null while it is in progress.")]
    output_tokens: Count
    duration_s: Annotated[float, Field(ge=0)] | None


class ClusterAnswer(TypedDict):
    router: RouterFacts
    serving: Serving
    placement_store: Literal["ok", "away"]
    placement_store_error: Annotated[str, Field(description="Empty where it is not away.")]
    warnings: list[str]
    nodes: list[NodeFacts]
    scaling: ScalingAnswer
    recent_placements: Annotated[list[PlacementFacts], Field(description="The latest first.")]


class ScrapeTarget(TypedDict):
    targets: list[str]
    labels: dict[str, str]


class DrainBody(TypedDict):
    node_id: str


class DrainAnswer(TypedDict):
    node_id: str
    epoch: Count
    is_draining: Literal[True]
    drain_timeout_s: Annotated[float, Field(ge=0, description="What its requests have to end.")]


class RoleBody(TypedDict):
    node_id: str
    role: Literal["prefill", "decode", "mixed"]


class RoleAnswer(TypedDict):
    node_id: str
    epoch: Count
    role: str
    earlier_role: str


READY_RESPONSES: Responses = {
    **good_response(ReadyAnswer),
    **error_responses(503, answer=NotReadyAnswer, texts={503: "It has not; the reason is there"}),
    **PROBE_ERRORS,
}
_NODE_ERRORS: dict[int | str, str] = {
    **ERRORS,
    404: "There is no such node",
    409: "The node has restarted since, or leaves, or is the last one that decodes",
    415: "The body is not said to be JSON",
    502: "The node has left, or does not answer",
}
DRAIN_RESPONSES: Responses = {
    **good_response(DrainAnswer),
    **COMMON_ERRORS,
    **error_responses(400, 404, 408, 409, 413, 415, 502, 503, texts=_NODE_ERRORS),
}
ROLE_RESPONSES: Responses = {
    **good_response(RoleAnswer),
    **COMMON_ERRORS,
    **error_responses(400, 404, 408, 409, 413, 415, 502, 503, texts=_NODE_ERRORS),
}
