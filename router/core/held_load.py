"""What a node holds now, estimated from its last report and from what this router did. No I/O.

A report is up to one heartbeat of the node and one listing of the store old when it is read. The
router knows which of its own requests it has sent since and which have ended, so it replaces its
own share of a report and takes over only the share of other routers. Without this correction,
prompts that ended seconds ago still count on the nodes that reported them and weigh more than every
request sent since: each burst would go to the nodes that did not report during the burst before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from common.nodes import NodeLoad, NodeRecord


class Held(NamedTuple):
    """The estimate: requests, blocks that cannot be had, and prompt tokens that wait."""

    num_requests: int
    num_used_blocks: float
    num_queued_tokens: float


@dataclass(slots=True)
class OwnLoad:
    """The load of this router on one node, and the most of it that a report can contain.

    `num_tokens` are those of the prompts that the node computes: on a prefill node until the KV was
    taken over, on one that goes on with the answer until its first token.
    """

    num_requests: int = 0
    num_tokens: int = 0
    _most_reported: int = 0
    """The most requests of this router that are in the last report."""
    _peak: int = 0
    """The most requests since the last listing; `_peak_before`: between the two before it."""
    _peak_before: int = 0

    def open(self, num_tokens: int) -> None:
        """Count one more request."""
        self.num_requests += 1
        self.num_tokens += num_tokens
        self._peak = max(self._peak, self.num_requests)

    def end_prompt(self, num_tokens: int) -> None:
        """Stop counting the tokens of one prompt."""
        self.num_tokens = max(0, self.num_tokens - num_tokens)

    def close(self, num_tokens: int) -> None:
        """Count one request less, and the tokens that still count for it."""
        self.num_requests = max(0, self.num_requests - 1)
        self.end_prompt(num_tokens)

    def on_listing(self) -> bool:
        """Note that a report was read, which the node made after the listing before the last one.

        Return whether the estimate changes although the report is the same.
        """
        before, self._most_reported = self._most_reported, max(self._peak, self._peak_before)
        self._peak_before, self._peak = self._peak, self.num_requests
        return self._most_reported != before

    def held(self, record: NodeRecord, load: NodeLoad | None) -> Held:
        """Return what the node holds; `load` None: nothing is known of other routers' requests."""
        own_blocks = self.num_tokens / max(1, record.block_size)
        if load is None:
            return Held(self.num_requests, own_blocks, self.num_tokens)
        reported = load.num_running + load.num_waiting
        used = max(0, record.num_blocks - load.free_blocks)
        if not (self.num_requests or self.num_tokens or self._most_reported):
            # As most nodes of a wide cluster; what follows comes to the same.
            return Held(reported, float(used), float(load.queued_tokens))
        own_reported = min(reported, self._most_reported)
        others = reported - own_reported
        own_share = own_reported / reported if reported else 0.0
        still = min(1.0, self.num_requests / own_reported) if own_reported else 1.0
        return Held(
            self.num_requests + others,
            _combined(used, own_share, still, own_blocks),
            _combined(load.queued_tokens, own_share, still, self.num_tokens),
        )


def _combined(reported: float, own_share: float, still: float, own: float) -> float:
    """Return the load of other routers plus this router's own.

    Its own is what was reported and still runs, or what this router has sent, if that is more.
    """
    return reported * (1 - own_share) + max(reported * own_share * still, own)
