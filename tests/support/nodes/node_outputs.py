"""Outputs of nodes, with whatever fields a test names."""

from __future__ import annotations

from typing import Any

from common.ids import AttemptId
from common.request import NO_DETAILS, OutputDetails, RequestCounts, RequestOutput


def node_output(
    attempt: AttemptId,
    first_index: int = 0,
    token_ids: tuple[int, ...] = (),
    *,
    is_started: bool = False,
    **fields: Any,
) -> RequestOutput:
    """An output whose counts and details are given by the names of their fields."""
    counts = RequestCounts(**{name: fields.pop(name, 0) for name in RequestCounts._fields})
    details = OutputDetails(**fields) if any(fields.values()) else NO_DETAILS
    return RequestOutput(
        attempt, first_index, token_ids, is_started, counts if any(counts) else None, details
    )
