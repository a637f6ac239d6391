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
from enum import Enum


class Stage(Enum):
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
        """All stages of a request that arrived and whose first token left at these times."""
        spans_s = dict.fromkeys(Stage, 0.0)
        spans_s.update(self.spans_s)
        spans_s[Stage.EDGE] = self.began_at_s - arrived_at_s
        spans_s[Stage.DELIVERY] += emitted_at_s - self.ended_at_s
        return spans_s


class StageWatch:
    """Times one choice on its way through the cluster, up to its first token."""

    def __init__(self, now_s: float) -> None:
        self._began_at_s = now_s
        self._attempt_at_s = now_s
        self._since_s = now_s
        self._attempt = 1
        self._placing_s = 0.0
        self._reserve_s = 0.0
        self._is_asking_decode = False

    def on_choosing(self, attempt: int, now_s: float) -> None:
        """Nodes are chosen: at the start, after a refusal, or for another attempt."""
        self._enter(attempt, now_s)
        self._placing_s += self._lap(now_s)
        self._is_asking_decode = False

    def on_reserve_asked(self, attempt: int, now_s: float) -> None:
        """A decode node was asked."""
        self._enter(attempt, now_s)
        self._placing_s += self._lap(now_s)
        self._is_asking_decode = True

    def on_placed(self, attempt: int, now_s: float) -> None:
        """The prompt is where it is computed, or on its way there."""
        self._enter(attempt, now_s)
        if self._is_asking_decode:
            self._reserve_s += self._lap(now_s)
        else:
            self._placing_s += self._lap(now_s)
        self._is_asking_decode = False

    def on_first_token(self, now_s: float, *, queue_s: float, compute_s: float) -> DispatchStages:
        """Token 0 came; its node says how long the prompt waited there and was computed."""
        prompt_s = self._lap(now_s)
        computed_s = min(max(compute_s, 0.0), prompt_s)
        queued_s = min(max(queue_s, 0.0), prompt_s - computed_s)
        return DispatchStages(
            self._began_at_s,
            now_s,
            {
                Stage.RETRIES: self._attempt_at_s - self._began_at_s,
                Stage.PLACING: self._placing_s,
                Stage.RESERVE: self._reserve_s,
                Stage.PREFILL_QUEUE: queued_s,
                Stage.PREFILL_COMPUTE: computed_s,
                Stage.DELIVERY: prompt_s - queued_s - computed_s,
            },
        )

    def _enter(self, attempt: int, now_s: float) -> None:
        """With a new attempt, all that was timed before it was in vain."""
        if attempt != self._attempt:
            self._attempt = attempt
            self._attempt_at_s = self._since_s = now_s
            self._placing_s = self._reserve_s = 0.0
            self._is_asking_decode = False

    def _lap(self, now_s: float) -> float:
        lap_s, self._since_s = now_s - self._since_s, now_s
        return lap_s
