"""Times of bytes on links that several flows share. Pure.

A node has one port out and one port in, of equal speed. Each flow gets the smaller one of its equal
shares of its sender's port out and of its receiver's port in. The share of a port that a flow does
not use because its other end is slower stays unused, so rates are lower bounds of a fair network's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

_LEAST_BYTES = 0.5
"""Bytes below which a rest is a rounding error: the flow has ended."""


@dataclass(slots=True)
class _Flow:
    source: Hashable
    target: Hashable
    num_left: float
    rate: float = 0.0


class SharedLinks:
    """Flows of bytes between ports. The owner asks for the next end, and calls `take_ended` then.

    `bytes_per_s` is the speed of every port. No method may be called with a time before the latest
    one.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._flows: dict[int, _Flow] = {}
        self._num_out: defaultdict[Hashable, int] = defaultdict(int)
        self._num_into: defaultdict[Hashable, int] = defaultdict(int)
        """How many flows each port out and each port in has, by its node."""
        self._moved_at_s = 0.0

    def __len__(self) -> int:
        """Return how many flows have bytes left."""
        return len(self._flows)

    def add(
        self, flow: int, source: Hashable, target: Hashable, num_bytes: float, now_s: float
    ) -> None:
        """Send more bytes in a flow from one node to another, after those that it has left.

        Nodes are compared with those of all other flows, so their names should be numbers.
        """
        self._move(now_s)
        known = self._flows.get(flow)
        if known is None:
            coming = _Flow(source, target, num_bytes)
            self._flows[flow] = coming
            self._share(coming, 1)
        else:
            known.num_left += num_bytes

    def drop(self, flow: int, now_s: float) -> None:
        """Send nothing more in a flow; one that has nothing left is ignored."""
        self._move(now_s)
        known = self._flows.pop(flow, None)
        if known is not None:
            self._share(known, -1)

    def next_end_s(self) -> float:
        """Return when the next flow ends; infinity without one."""
        if not self._flows:
            return math.inf
        return self._moved_at_s + min([one.num_left / one.rate for one in self._flows.values()])

    def take_ended(self, now_s: float) -> list[int]:
        """Return the flows that have ended, in the order of their ends, and forget them."""
        ended: list[int] = []
        while (at_s := self.next_end_s()) <= now_s:
            self._move(max(at_s, self._moved_at_s))
            gone = [name for name, flow in self._flows.items() if self._has_ended(flow)]
            for name in gone:
                self._share(self._flows.pop(name), -1)
            ended += gone
        return ended

    def _has_ended(self, flow: _Flow) -> bool:
        """Return whether the rest of a flow is none, or takes less time than a float can tell."""
        rest_s = flow.num_left / flow.rate
        return flow.num_left < _LEAST_BYTES or self._moved_at_s + rest_s == self._moved_at_s

    def _move(self, now_s: float) -> None:
        span_s, self._moved_at_s = now_s - self._moved_at_s, now_s
        if span_s > 0:
            for flow in self._flows.values():
                flow.num_left -= flow.rate * span_s

    def _share(self, changed: _Flow, change: int) -> None:
        """Share the ports of a flow that has come (`change` 1) or gone (-1) among its flows."""
        out, into = self._num_out, self._num_into
        source, target = changed.source, changed.target
        out[source] += change
        into[target] += change
        for flow in self._flows.values():
            if flow.source == source or flow.target == target:
                flow.rate = self._bytes_per_s / max(out[flow.source], into[flow.target])
