"""The cluster for its users: whether it is ready, or why not, and `/v1/cluster`."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from common.ids import Incarnation
from common.nodes import NodeRecord
from common.version import PROTOCOL_VERSION, VERSION
from placement.records import facts_json
from router.cluster.shapes import PlacementFacts, ScrapeTarget
from router.cluster.troubles import unlisted_nodes, unpaired_prefill_nodes
from router.core.known.node_view import NodeView
from router.core.known.pair_health import Pair
from router.core.known.roster import Roster
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.missing_nodes import what_is_missing
from router.live.reading import Reading, live_requests
from router.watch.recent_placements import RecentPlacement
from router.watch.scaling_report import ScalingAnswer

NUM_LISTED_PLACEMENTS = 32


class DispatcherView:
    """A `ClusterView` of a running dispatcher."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        scaling: Callable[[], ScalingAnswer],
        drain: asyncio.Event | None = None,
    ) -> None:
        """Make a view; `scaling` says what the load wants, `drain` is set when this router has to
        drain."""
        self._dispatcher = dispatcher
        self.scaling = scaling
        self._drain = drain or asyncio.Event()

    def is_ready(self) -> bool:
        """Return whether a request that arrives now finds a node that can finish it."""
        return not self.why_not_ready()

    def is_draining(self) -> bool:
        """Return whether this router drains."""
        return self._drain.is_set()

    def why_not_ready(self) -> str:
        """Return what is missing; empty when ready."""
        if self.is_draining():
            return "draining"
        if self.max_model_len() is not None:
            return ""
        pool = self._dispatcher.pool
        return what_is_missing(pool.nodes(), pool.membership)

    def warnings(self) -> list[str]:
        """Return a sentence for each prefill node without a partner, and one for missing leases."""
        pool = self._dispatcher.pool
        unpaired = unpaired_prefill_nodes([node.record for node in pool.nodes()])
        return unpaired + unlisted_nodes(pool.membership)

    def max_model_len(self) -> int | None:
        """Return the most tokens of prompt and output that a node can finish; None without."""
        return self._dispatcher.pool.membership.max_model_len()

    def read_live(self) -> Reading:
        """Return the state that the live page shows."""
        dispatcher = self._dispatcher
        return Reading(
            router_id=dispatcher.incarnation.node_id,
            model=dispatcher.model,
            is_store_away=dispatcher.pool.membership.is_store_away,
            trouble=self.why_not_ready(),
            warnings=self.warnings(),
            nodes=list(dispatcher.pool.nodes()),
            requests=live_requests(dispatcher.flows()),
            placements=dispatcher.recent_placements,
            scaling=self.scaling(),
        )

    def scrape_targets(self) -> list[ScrapeTarget]:
        """Return a target for each node with the address of its metrics, its role and its name."""
        return scrape_targets(node.record for node in self._dispatcher.pool.nodes())

    def describe(self) -> dict[str, Any]:
        """Return this router, every node it can choose, and its latest placements, as JSON."""
        dispatcher = self._dispatcher
        pool = dispatcher.pool
        nodes = pool.nodes()
        avoided = avoided_by_prefill(dispatcher.avoided_pairs(), nodes)
        latest_first = islice(reversed(dispatcher.recent_placements), NUM_LISTED_PLACEMENTS)
        return {
            "router": {
                "router_id": dispatcher.incarnation.node_id,
                "epoch": dispatcher.incarnation.epoch,
                "version": VERSION,
                "protocol": PROTOCOL_VERSION,
                "num_running": dispatcher.num_running,
                "is_draining": self.is_draining(),
                "not_ready": self.why_not_ready(),
            },
            "placement_store": "away" if pool.is_store_away else "ok",
            "placement_store_error": pool.store_error,
            "warnings": self.warnings(),
            "nodes": [node_json(node, avoided.get(node.incarnation, ())) for node in nodes],
            "scaling": self.scaling(),
            "recent_placements": [placement_json(p) for p in latest_first],
        }


def scrape_targets(records: Iterable[NodeRecord]) -> list[ScrapeTarget]:
    """Return the nodes that serve metrics, in the form of Prometheus' `http_sd_configs`."""
    return [
        {
            "targets": [record.metrics_address],
            "labels": {"role": record.role.value, "node_id": record.node_id},
        }
        for record in records
        if record.metrics_address
    ]


def avoided_by_prefill(
    pairs: Iterable[Pair], nodes: Roster
) -> dict[Incarnation, list[Incarnation]]:
    """Return the decode nodes of pairs by prefill node, without those whose life is over."""
    found = defaultdict[Incarnation, list[Incarnation]](list)
    for prefill, decode in pairs:
        if nodes.view(decode) is not None:
            found[prefill].append(decode)
    return found


def node_json(node: NodeView, avoided: Iterable[Incarnation] = ()) -> dict[str, Any]:
    """Return all facts of a node; `address` and `kv_cache` are earlier names of two of them.

    `avoided`: the decode nodes with which this router places nothing on it at present.
    """
    silent = {*node.load.kv_unreachable, *avoided}
    return {
        **facts_json(node.record, node.load),
        "address": node.record.control_address,
        "kv_cache": node.record.kv_description,
        "num_requests": node.num_requests,
        "is_suspected": node.is_suspected,
        "is_listed": node.is_listed,
        "kv_links": [link._asdict() for link in node.load.kv_links],
        "kv_unreachable": [decode._asdict() for decode in sorted(silent)],
    }


def placement_json(placement: RecentPlacement) -> PlacementFacts:
    """Return one attempt; `outcome` and `duration_s` are null while it is in progress."""
    decode, prefill = placement.decode, placement.prefill
    return {
        "choice_id": placement.attempt.choice_id,
        "attempt": placement.attempt.attempt,
        "request_id": placement.request_id or None,
        "decode": None if decode is None else str(decode),
        "prefill": None if prefill is None else str(prefill),
        "reason": placement.reason,
        "outcome": placement.outcome or None,
        "output_tokens": placement.num_tokens,
        "duration_s": placement.duration_s,
    }
