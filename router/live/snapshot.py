"""The live page's JSON: the cluster at one moment, and its history. Lists are bounded."""

from __future__ import annotations

from typing import Any

from placement.store import Placement
from router.core.policies.query import NodeView
from router.live.history import COLUMNS, LiveHistory
from router.live.reading import LiveRequest, Phase, Reading

MAX_NODES_SHOWN = 256
MAX_PAIRS_SHOWN = 256
MAX_REQUESTS_SHOWN = 64

TimedPlacement = tuple[float, Placement]
"""A placement with the time at which the router first had it, on the clock of the samples."""


def history_json(history: LiveHistory, placements: list[TimedPlacement]) -> dict[str, Any]:
    """Return what a page needs once: everything so far."""
    return {
        "columns": COLUMNS,
        "samples": [sample.row() for sample in history.samples],
        "placements": [_placement(*timed) for timed in placements],
    }


def snapshot_json(
    reading: Reading, history: LiveHistory, new_placements: list[TimedPlacement]
) -> dict[str, Any]:
    """Return what a page needs every second; `history` holds this reading's sample."""
    nodes = reading.nodes[:MAX_NODES_SHOWN]
    pairs = [pair for node in nodes for pair in _pairs(node, history)]
    return {
        "router_id": reading.router_id,
        "model": reading.model,
        "is_store_away": reading.is_store_away,
        "trouble": reading.trouble,
        "warnings": list(reading.warnings),
        "num_nodes": len(reading.nodes),
        "nodes": [_node(node, history) for node in nodes],
        "pairs": pairs[:MAX_PAIRS_SHOWN],
        "requests": [_request(request) for request in _shown(reading)],
        "placements": [_placement(*timed) for timed in new_placements],
        "sample": history.samples[-1].row(),
    }


def _shown(reading: Reading) -> list[LiveRequest]:
    """Return the latest requests that have a node, because those will be seen to move."""
    placed = [request for request in reading.requests if request.phase is not Phase.PLACING]
    return placed[-MAX_REQUESTS_SHOWN:]


def _node(node: NodeView, history: LiveHistory) -> dict[str, Any]:
    record, load = node.record, node.load
    waiting = load.num_reserved_blocks + load.num_receiving_blocks + load.num_quarantined_blocks
    return {
        "node_id": record.node_id,
        "epoch": record.epoch,
        "role": record.role.value,
        "address": record.control_address,
        "is_draining": load.is_draining,
        "is_suspected": node.is_suspected,
        "blocks": {
            "running": max(0, record.num_blocks - load.free_blocks - waiting),
            "reserved": load.num_reserved_blocks,
            "receiving": load.num_receiving_blocks,
            "quarantined": load.num_quarantined_blocks,
            "cached": load.num_cached_blocks,
            "free": max(0, load.free_blocks - load.num_cached_blocks),
        },
        "num_blocks": record.num_blocks,
        "seats": record.max_num_seqs,
        "used_seats": max(0, record.max_num_seqs - load.free_seats),
        "num_waiting": load.num_waiting,
        "queued_tokens": load.queued_tokens,
        "speculative_method": record.speculative_method,
        "num_preemptions": load.num_preemptions,
        "preemptions_per_s": history.preemptions_per_s(node.incarnation),
        "num_drafted": load.num_drafted,
        "num_accepted": load.num_accepted,
        "acceptance": history.acceptance(node.incarnation),
    }


def _pairs(node: NodeView, history: LiveHistory) -> list[dict[str, Any]]:
    return [
        {
            "prefill": node.record.node_id,
            **link._asdict(),
            "bytes_per_s": history.kv_bytes_per_s(node.incarnation, link.decode),
        }
        for link in node.load.kv_links
    ]


def _request(request: LiveRequest) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "phase": request.phase.value,
        "decode": request.decode and request.decode.node_id,
        "prefill": request.prefill and request.prefill.node_id,
    }


def _placement(at_s: float, placement: Placement) -> dict[str, Any]:
    return {
        "at_s": round(at_s, 3),
        "request_id": placement.attempt.request_id,
        "attempt": placement.attempt.attempt,
        "decode": placement.decode and placement.decode.node_id,
        "prefill": placement.prefill and placement.prefill.node_id,
        "reason": placement.reason,
    }
