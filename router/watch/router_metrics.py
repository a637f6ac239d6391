"""The router's counts of its requests and nodes."""

from __future__ import annotations

from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge


class RouterMetrics:
    """A few counters and gauges in the given registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._count_flows(registry)
        self._count_what_is_known(registry)

    def _count_flows(self, registry: CollectorRegistry) -> None:
        requests = Counter(
            "pdserve_router_choices_total",
            "Choices that ended, by outcome: stop, length, abort or an error's code",
            ["outcome"],
            registry=registry,
        )
        # Looked up, for each request, without the client library's lock.
        self.requests = cache(requests.labels)
        self.retries = Counter(
            "pdserve_router_retries_total",
            "Attempts after the first one",
            registry=registry,
        )
        self.handoffs_failed = Counter(
            "pdserve_router_handoffs_failed_total",
            "Attempts that ended because KV did not get from the prefill to the decode node",
            registry=registry,
        )
        self.running = Gauge(
            "pdserve_router_choices_in_progress", "Choices in progress", registry=registry
        )
        self.nodes = Gauge(
            "pdserve_router_nodes",
            "Nodes that can be chosen, by role",
            ["role"],
            registry=registry,
        )
        self.unlisted_nodes = Gauge(
            "pdserve_router_unlisted_nodes",
            "Nodes that are heard and used, and that the placement store does not list",
            registry=registry,
        )
        self.nodes_left = Counter(
            "pdserve_router_nodes_left_total",
            "Nodes that left in order: out of the placement store, then the end of their stream",
            registry=registry,
        )
        self.nodes_lost = Counter(
            "pdserve_router_nodes_lost_total",
            "Streams to a node that broke or fell silent, and it had not left",
            registry=registry,
        )
        self.nodes_suspected = Counter(
            "pdserve_router_nodes_suspected_total",
            "Times that a node was suspected: silent, not reached, or its step did not end",
            registry=registry,
        )
        self.store_errors = Counter(
            "pdserve_router_store_errors_total",
            "Calls to the placement store without an answer, by operation",
            ["operation"],
            registry=registry,
        )

    def _count_what_is_known(self, registry: CollectorRegistry) -> None:
        self.session_placements = Counter(
            "pdserve_router_session_placements_total",
            "Placements of requests that name a session: new to this router, kept on the nodes of "
            "its last request, or moved",
            ["outcome"],
            registry=registry,
        )
        self.sessions = Gauge(
            "pdserve_router_sessions",
            "Sessions that the router remembers, with the nodes of their last requests",
            registry=registry,
        )
        self.known_blocks = Gauge(
            "pdserve_router_known_blocks",
            "Blocks of KV that nodes have reported, each once, whatever nodes and tiers have it",
            registry=registry,
        )
        self.blocks_dropped = Counter(
            "pdserve_router_reported_blocks_dropped_total",
            "Reported blocks for which the router's index had no room",
            registry=registry,
        )
