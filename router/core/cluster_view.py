"""What the HTTP edge wants to know of the cluster behind it."""

from __future__ import annotations

from typing import Any, Protocol


class ClusterView(Protocol):
    """Answered from memory, at once: nothing here waits for a node or for the placement store."""

    def is_ready(self) -> bool:
        """Whether a request that arrives now has somewhere to run."""

    def is_draining(self) -> bool:
        """Whether this router is leaving: it finishes what it has, and wants no more."""

    def why_not_ready(self) -> str:
        """What is missing, for people; '' when ready."""

    def warnings(self) -> list[str]:
        """What is wrong without keeping the cluster from answering, in sentences for people."""

    def max_model_len(self) -> int | None:
        """The longest prompt and output, in tokens, that a node can finish; None without nodes."""

    def describe(self) -> dict[str, Any]:
        """The cluster as JSON for `/v1/cluster`: this router, the nodes, their roles and load."""
