"""Where the time to the first token went: stages that add up to it exactly.

    edge             the HTTP edge: reading the body, checking it, tokenising
    placing          choosing nodes, and asking those that refused
    reserve          the decode node that granted a place: asked to answered, its queue included
    prefill_queue    the prompt's wait on the node that computed it
    prefill_compute  from the first step that computed some of it to the one that drew token 0
    delivery         the way there and back: network, event loops, streams, detokenising
    retries          everything spent on attempts before the one that gave token 0

One stage runs at any time, so nothing is counted twice or left out. What a node says of its own
spans is only used to split the wait for its answer, and can neither lengthen nor shorten it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """A part of the time to the first token; see the module's text."""

    EDGE = "edge"
    PLACING = "placing"
    RESERVE = "reserve"
    PREFILL_QUEUE = "prefill_queue"
    PREFILL_COMPUTE = "prefill_compute"
    DELIVERY = "delivery"
    RETRIES = "retries"


@dataclass(frozen=True, slots=True)
class DispatchStages:
    """The stages between the edge's handing a request over and its getting token 0 back.

    `spans_s` add up to `ended_at_s - began_at_s`; stages that did not happen are absent.
    """

    began_at_s: float
    ended_at_s: float
    spans_s: Mapping[Stage, float]

    def to_client(self, arrived_at_s: float, emitted_at_s: float) -> dict[Stage, float]:
        """Return all stages of a request that arrived and sent its first token at these times."""
        spans_s = dict.fromkeys(Stage, 0.0)
        spans_s.update(self.spans_s)
        spans_s[Stage.EDGE] = self.began_at_s - arrived_at_s
        spans_s[Stage.DELIVERY] += emitted_at_s - self.ended_at_s
        return spans_s
