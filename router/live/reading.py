"""The data of the live page, read at one moment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from common.ids import Incarnation
from router.core.attempts import State
from router.core.known.node_view import NodeView
from router.core.request_flow import RequestFlow
from router.watch.recent_placements import RecentPlacements
from router.watch.scaling_report import ScalingAnswer


class Phase(Enum):
    """The phase of a request of this router, in plain terms.

    placing: no node has its prompt yet. transfer: its first token was sent, and its KV is in
    transfer.
    """

    PLACING = "placing"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """One choice in progress, and the nodes that hold a part of it."""

    choice_id: str
    phase: Phase
    decode: Incarnation | None
    prefill: Incarnation | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The state of the cluster. `placements` are the latest. `trouble` is why no request can
    run now, or ''; `warnings` are other problems.
    """

    router_id: str
    model: str
    is_store_away: bool
    trouble: str
    warnings: Sequence[str]
    nodes: Sequence[NodeView]
    requests: Sequence[LiveRequest]
    placements: RecentPlacements
    scaling: ScalingAnswer


def live_requests(flows: Iterable[RequestFlow]) -> list[LiveRequest]:
    """Return the requests of these flows, in order."""
    return [
        LiveRequest(flow.attempt.choice_id, _phase(flow), flow.decode, flow.prefill)
        for flow in flows
    ]


def _phase(flow: RequestFlow) -> Phase:
    if flow.state in (State.CHOOSING, State.RESERVING):
        return Phase.PLACING
    # A decode node that continues another's answer first computes the tokens so far.
    if flow.state is State.LOCAL or not flow.has_first_token:
        return Phase.PREFILL
    return Phase.TRANSFER if flow.state is State.PREFILLING else Phase.DECODE
