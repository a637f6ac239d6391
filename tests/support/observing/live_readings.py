"""Readings for the live page, made by hand."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry

from common.ids import AttemptId, Incarnation
from common.nodes import NodeLoad, Role
from common.observing.latency import LatencyTargets
from router.core.known.node_view import NodeView
from router.core.scaling.scaling import RoleScaling
from router.live.reading import Reading
from router.watch.recent_placements import RecentPlacement, RecentPlacements
from router.watch.scaling_report import ScalingAnswer, ScalingReport
from tests.support.nodes.node_records import record


def node(
    name: Incarnation,
    role: Role,
    *,
    num_host_blocks: int = 0,
    num_disk_blocks: int = 0,
    **load: Any,
) -> NodeView:
    """A node of 100 blocks and 8 seats, idle but for `load`."""
    described = record(
        name.node_id,
        role,
        epoch=name.epoch,
        control_address="127.0.0.1:7001",
        model="tiny",
        block_size=16,
        max_num_seqs=8,
        max_model_len=512,
        num_host_blocks=num_host_blocks,
        num_disk_blocks=num_disk_blocks,
    )
    idle = {"free_blocks": 100, "free_seats": 8, "num_running": 0, "num_waiting": 0}
    return NodeView(
        record=described, load=NodeLoad(**{**idle, "queued_tokens": 0, **load}), num_requests=0
    )


def scaling(*nodes: NodeView) -> ScalingAnswer:
    """What these nodes' load wants of a cluster without automatic roles."""
    targets = LatencyTargets(ttft_s=2.0, tpot_s=0.1)
    found = RoleScaling(targets).decide(nodes, 0.0)
    return ScalingReport(CollectorRegistry(), found, auto_roles=False).answer(0.0)


def reading(*nodes: NodeView, **changes: Any) -> Reading:
    """A quiet router that knows these nodes, but for `changes`."""
    empty: dict[str, Any] = {
        "router_id": "r0",
        "model": "tiny",
        "is_store_away": False,
        "trouble": "",
        "warnings": (),
        "requests": (),
        "placements": RecentPlacements(),
        "scaling": scaling(*nodes),
    }
    return Reading(nodes=nodes, **{**empty, **changes})


def placed(
    recent: RecentPlacements,
    choice_id: str,
    decode: Incarnation | None,
    prefill: Incarnation | None = None,
    **changes: Any,
) -> RecentPlacement:
    """Add the first attempt of this choice, placed at second 0, but for `changes`."""
    usual: dict[str, Any] = {
        "attempt": AttemptId(choice_id, 1),
        "request_id": f"http-{choice_id}",
        "reason": "least loaded",
        "at_s": 0.0,
    }
    entry = RecentPlacement(decode=decode, prefill=prefill, **{**usual, **changes})
    recent.add(entry)
    return entry
