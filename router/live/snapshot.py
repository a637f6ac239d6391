"""The live page's JSON: the cluster at one moment, and its history. Lists are bounded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from common.version import VERSION
from router.core.known.node_view import NodeView
from router.live.history import COLUMNS, LiveHistory
from router.live.reading import LiveRequest, Phase, Reading
from router.live.shapes import LiveError, LivePlacement, ShownRequest
from router.watch.edge_counters import RequestError
from router.watch.recent_placements import RecentPlacement

MAX_NODES_SHOWN = 256
MAX_PAIRS_SHOWN = 256
MAX_REQUESTS_SHOWN = 64
MAX_ERROR_CHARS = 300


class SnapshotJson:
    """Makes the events of the page. Their times count from `began_at_s` of the router's clock.

    Without `quotes_requests` an error of a client has no text: it may name a value of the request,
    and the page is open to holders of other keys.
    """

    def __init__(self, history: LiveHistory, began_at_s: float, *, quotes_requests: bool) -> None:
        self._history = history
        self._began_at_s = began_at_s
        self._quotes_requests = quotes_requests

    def history(self, reading: Reading, errors: Iterable[RequestError]) -> dict[str, Any]:
        """Return what a page needs once: everything so far."""
        return {
            "columns": COLUMNS,
            "samples": [sample.row() for sample in self._history.samples],
            "placements": [self._placement(placement) for placement in reading.placements],
            "errors": [self._error(error) for error in errors],
        }

    def snapshot(
        self,
        reading: Reading,
        placements: Iterable[RecentPlacement] = (),
        errors: Iterable[RequestError] = (),
    ) -> dict[str, Any]:
        """Return what a page needs every second: the history's last sample is of this reading.

        `placements` were added or ended since the snapshot before, `errors` are those since then.
        """
        return {
            **_cluster_json(reading, self._history),
            "placements": [self._placement(placement) for placement in placements],
            "errors": [self._error(error) for error in errors],
            "sample": self._history.samples[-1].row(),
        }

    def _placement(self, placement: RecentPlacement) -> LivePlacement:
        duration_s = placement.duration_s
        return {
            "at_s": round(placement.at_s - self._began_at_s, 3),
            "choice_id": placement.attempt.choice_id,
            "attempt": placement.attempt.attempt,
            "request_id": placement.request_id,
            "decode": placement.decode and placement.decode.node_id,
            "prefill": placement.prefill and placement.prefill.node_id,
            "reason": placement.reason,
            "outcome": placement.outcome,
            "output_tokens": placement.num_tokens,
            "duration_s": None if duration_s is None else round(duration_s, 3),
        }

    def _error(self, error: RequestError) -> LiveError:
        is_shown = self._quotes_requests or error.status >= 500
        return {
            "at_s": round(error.at_s - self._began_at_s, 3),
            "request_id": error.request_id,
            "endpoint": error.endpoint,
            "status": error.status,
            "code": error.code,
            "text": error.text[:MAX_ERROR_CHARS] if is_shown else "",
        }


def _cluster_json(reading: Reading, history: LiveHistory) -> dict[str, Any]:
    nodes = reading.nodes[:MAX_NODES_SHOWN]
    pairs = [pair for node in nodes for pair in _pairs(node, history)]
    return {
        "router_id": reading.router_id,
        "version": VERSION,
        "model": reading.model,
        "is_store_away": reading.is_store_away,
        "trouble": reading.trouble,
        "warnings": list(reading.warnings),
        "num_nodes": len(reading.nodes),
        "nodes": [_node(node, history) for node in nodes],
        "pairs": pairs[:MAX_PAIRS_SHOWN],
        "scaling": reading.scaling,
        "requests": [_request(request) for request in _shown(reading)],
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
        "device": record.device,
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
        "tiers": _tiers_below(node),
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


def _tiers_below(node: NodeView) -> list[dict[str, Any]]:
    """Return what holds prefixes below the pool, nearest first, and how many blocks of how many."""
    record, load = node.record, node.load
    tiers = (
        ("host memory", load.num_prefix_host_blocks, record.num_host_blocks),
        ("disk", load.num_prefix_disk_blocks, record.num_disk_blocks),
    )
    # A node of the release before does not tell the size.
    return [
        {"tier": name, "held": held, "size": max(size, held)}
        for name, held, size in tiers
        if size or held
    ]


def _pairs(node: NodeView, history: LiveHistory) -> list[dict[str, Any]]:
    return [
        {
            "prefill": node.record.node_id,
            **link._asdict(),
            "bytes_per_s": history.kv_bytes_per_s(node.incarnation, link.decode),
        }
        for link in node.load.kv_links
    ]


def _request(request: LiveRequest) -> ShownRequest:
    return {
        "id": request.choice_id,
        "phase": request.phase.value,
        "decode": request.decode and request.decode.node_id,
        "prefill": request.prefill and request.prefill.node_id,
    }
