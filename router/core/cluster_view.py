"""The state of the cluster, as the HTTP edge reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class ClusterView(Protocol):
    """The cluster's state, read from memory: no call waits for a node or the placement store."""

    def is_ready(self) -> bool:
        """Return whether a request that arrives now finds a node."""

    def is_draining(self) -> bool:
        """Return whether this router drains: it finishes its requests and accepts no more."""

    def why_not_ready(self) -> str:
        """Return what is missing, in words; '' when ready."""

    def warnings(self) -> list[str]:
        """Return what is wrong although the cluster answers, one sentence each."""

    def max_model_len(self) -> int | None:
        """Return the most tokens, prompt and output, that a node can finish; None without any."""

    def scrape_targets(self) -> Sequence[Mapping[str, Any]]:
        """Return where the nodes serve their metrics, as Prometheus' HTTP discovery wants it."""

    def scaling(self) -> Mapping[str, Any]:
        """Return `/v1/scaling` as JSON values: how many nodes of each role the load wants."""

    def describe(self) -> dict[str, Any]:
        """Return `/v1/cluster` as JSON values: this router, the nodes, their roles and load."""
