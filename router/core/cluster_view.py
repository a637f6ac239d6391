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
        """Return what is missing, in words; '' when ready."""

    def warnings(self) -> list[str]:
        """Return what is wrong although the cluster answers, one sentence each."""

    def max_model_len(self) -> int | None:
        """Return the most tokens, prompt and output, that a node can finish; None without any."""

    def describe(self) -> dict[str, Any]:
        """Return `/v1/cluster` as JSON values: this router, the nodes, their roles and load."""
