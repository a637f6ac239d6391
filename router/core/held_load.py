"""What a node holds now, estimated from its last report and from what this router did. No I/O.

A report is old when it is read: by up to a heartbeat of the node and a listing of the store. What
this router sent and what has ended since then it knows itself, so of a report only the share of
other routers counts as it is. Without that, prompts that ended long ago count on the nodes that
reported while they ran, for up to seconds, and weigh more than every request sent since: a burst
goes to the nodes that reported before or after the burst before it.
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
    """What this router has on one node, and the most that a report can contain of it.

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
        """Count the tokens of one prompt no more."""
        self.num_tokens = max(0, self.num_tokens - num_tokens)

    def close(self, num_tokens: int) -> None:
        """Count one request less, and the tokens that still count for it."""
        self.num_requests = max(0, self.num_requests - 1)
        self.end_prompt(num_tokens)

    def on_listing(self) -> bool:
        """Take that a report was read. It was made since the last listing but one.

        Return whether the estimate is another one though the report is the same.
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
    """Return what others hold, and of this router's what was reported and is still there, or what
    it knows of, if that is more."""
    return reported * (1 - own_share) + max(reported * own_share * still, own)
