"""The cluster as people see it: ready or why not, and `/v1/cluster`."""

from __future__ import annotations

import asyncio
from typing import Any

from common.nodes import Role
from placement.records import facts_json
from placement.store import Placement
from router.cluster.layout_mismatches import unpaired_prefill_nodes
from router.core.policies.query import NodeView
from router.dispatch.dispatcher import Dispatcher
from router.live.reading import Reading, live_requests


class DispatcherView:
    """A `ClusterView` over a running dispatcher."""

    def __init__(self, dispatcher: Dispatcher, drain: asyncio.Event | None = None) -> None:
        """`drain` is set when this router is to leave."""
        self._dispatcher = dispatcher
        self._drain = drain or asyncio.Event()

    def is_ready(self) -> bool:
        """Whether a request that comes now finds a node that can finish it."""
        return not self.why_not_ready()

    def is_draining(self) -> bool:
        """Whether this router is leaving."""
        return self._drain.is_set()

    def why_not_ready(self) -> str:
        """What is missing; empty when ready."""
        if self.is_draining():
            return "draining"
        if self._finishers():
            return ""
        missing = "no decode or mixed node is alive"
        others = self._dispatcher.pool.other_models
        if others:
            missing += f": nodes serve {', '.join(others)}, this router {self._dispatcher.model}"
        if self._dispatcher.pool.membership.is_store_away:
            return f"{missing}, and the placement store is away"
        return missing

    def warnings(self) -> list[str]:
        """Prefill nodes whose KV no decode node can take."""
        return unpaired_prefill_nodes([node.record for node in self._dispatcher.pool.nodes()])

    def max_model_len(self) -> int | None:
        """The longest prompt and output, in tokens, that a node can finish; None without nodes."""
        return max((node.record.max_model_len for node in self._finishers()), default=None)

    def _finishers(self) -> list[NodeView]:
        """The nodes that can give an answer's last token."""
        return [
            node
            for node in self._dispatcher.pool.nodes()
            if node.record.role is not Role.PREFILL and not node.load.is_draining
        ]

    def read_live(self) -> Reading:
        """What the live page is made of."""
        dispatcher = self._dispatcher
        return Reading(
            router_id=dispatcher.incarnation.node_id,
            model=dispatcher.model,
            is_store_away=dispatcher.pool.membership.is_store_away,
            trouble=self.why_not_ready(),
            warnings=self.warnings(),
            nodes=dispatcher.pool.nodes(),
            requests=live_requests(dispatcher.flows()),
            placements=dispatcher.recent_placements,
            num_placements=dispatcher.num_placements,
        )

    def describe(self) -> dict[str, Any]:
        """This router, every node it can choose, and its latest placements."""
        dispatcher = self._dispatcher
        is_store_away = dispatcher.pool.membership.is_store_away
        return {
            "router": {
                "router_id": dispatcher.incarnation.node_id,
                "epoch": dispatcher.incarnation.epoch,
                "num_running": dispatcher.num_running,
                "is_draining": self.is_draining(),
            },
            "placement_store": "away" if is_store_away else "ok",
            "warnings": self.warnings(),
            "nodes": [node_json(node) for node in dispatcher.pool.nodes()],
            "recent_placements": [_placement(p) for p in reversed(dispatcher.recent_placements)],
        }


def node_json(node: NodeView) -> dict[str, Any]:
    """Return all facts of a node; `address` and `kv_cache` are earlier names of two of them."""
    return {
        **facts_json(node.record, node.load),
        "address": node.record.control_address,
        "kv_cache": node.record.kv_description,
        "num_requests": node.num_requests,
        "kv_links": [link._asdict() for link in node.load.kv_links],
    }


def _placement(placement: Placement) -> dict[str, Any]:
    decode, prefill = placement.decode, placement.prefill
    return {
        "request_id": placement.attempt.request_id,
        "attempt": placement.attempt.attempt,
        "decode": None if decode is None else str(decode),
        "prefill": None if prefill is None else str(prefill),
        "reason": placement.reason,
    }
