"""The events of `/v1/live` and what they hold, for `/openapi.json`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from common.wire_types import Count
from router.watch.scaling_report import ScalingAnswer

_Number = Annotated[float, Field(ge=0)]
_Row = Annotated[list[float | None], Field(description="In the order of columns.")]


class Serving(TypedDict):
    """The service of this router: rates of the last 5 s, medians of the last 10 s."""

    uptime_s: _Number
    in_progress: Count
    tokens_per_s: _Number
    requests_per_s: _Number
    failures_per_s: _Number
    ttft_p50_s: _Number | None
    tpot_p50_s: _Number | None


class LivePlacement(TypedDict):
    at_s: _Number
    choice_id: str
    attempt: Count
    request_id: str
    decode: str | None
    prefill: str | None
    reason: str
    outcome: str
    output_tokens: Count
    duration_s: _Number | None


class LiveError(TypedDict):
    at_s: _Number
    request_id: str
    endpoint: str
    status: Count
    code: str
    text: str


class ShownRequest(TypedDict):
    id: str
    phase: str
    decode: str | None
    prefill: str | None


class HistoryEvent(TypedDict):
    """Everything so far, once."""

    kind: Literal["history"]
    columns: list[str]
    samples: list[_Row]
    placements: list[LivePlacement]
    errors: list[LiveError]


class SnapshotEvent(TypedDict):
    """The cluster now, and what has changed."""

    kind: Literal["snapshot"]
    router_id: str
    version: str
    model: str
    is_store_away: bool
    trouble: str
    warnings: list[str]
    num_nodes: Count
    nodes: list[dict[str, Any]]
    pairs: list[dict[str, Any]]
    scaling: ScalingAnswer
    requests: list[ShownRequest]
    placements: list[LivePlacement]
    errors: list[LiveError]
    sample: _Row


LiveEvents = Annotated[
    HistoryEvent | SnapshotEvent,
    Field(
        description="Events, each a JSON object behind `data: `. Times count from the start of the "
        "router."
    ),
]
