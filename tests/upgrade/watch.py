"""Looks at routers and leases while a rollout lasts, and keeps what they say of pairs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import httpx

from tests.support.cluster.cluster import Cluster
from tests.upgrade.handoffs import Handoffs

EVERY_S = 0.25


Answer = TypeVar("Answer")


class Watch(threading.Thread):
    """Looks until it is ended."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(name="watch", daemon=True)
        self._cluster = cluster
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._handoffs = Handoffs()

    def ask(self, question: Callable[[Handoffs], Answer]) -> Answer:
        """Return the answer to a question about what was seen until now."""
        with self._lock:
            return question(self._handoffs)

    def run(self) -> None:
        with httpx.Client(timeout=5.0, trust_env=False) as http:
            while not self._is_over.wait(EVERY_S):
                leases = self._cluster.live_nodes()
                told = [self._told(http, url) for url in self._cluster.urls]
                with self._lock:
                    self._handoffs.on_leases(leases)
                    for one in told:
                        if one:
                            self._handoffs.on_cluster(one)

    def _told(self, http: httpx.Client, url: str) -> dict[str, Any]:
        """Return what a router says; nothing while it is being replaced."""
        try:
            reply = http.get(f"{url}/v1/cluster")
        except httpx.TransportError:
            return {}
        return dict(reply.json()) if reply.status_code == 200 else {}

    def end(self) -> None:
        """End it, and wait."""
        self._is_over.set()
        self.join()
