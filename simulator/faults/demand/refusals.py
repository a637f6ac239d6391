"""Which nodes refused a request, and whether it may end for that: the books of one router."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from common.errors import (
    DeadlineUnreachable,
    Draining,
    InternalError,
    Overloaded,
    PdserveError,
)
from common.ids import Incarnation


@dataclass(slots=True)
class _Asked:
    """The nodes that were asked to decode one request, and their last answers."""

    may_wait: dict[Incarnation, bool] = field(default_factory=dict)
    """Whether a node was to queue the request when it was asked last."""
    refused: dict[Incarnation, PdserveError] = field(default_factory=dict)
    """The last error of each node that refused to decode it."""
    retry_after_s: dict[Incarnation, float] = field(default_factory=dict)
    """The shortest time that each node without room said, until it is known to leave."""

    def come_again(self, node: Incarnation, after_s: float) -> None:
        """Record the time after which a node says to come again."""
        self.retry_after_s[node] = min(after_s, self.retry_after_s.get(node, after_s))


class Refusals:
    """The answers of nodes to the requests of one router, until these end."""

    def __init__(self) -> None:
        self._asked: dict[str, _Asked] = defaultdict(_Asked)

    def on_reserve(self, choice_id: str, node: Incarnation, *, may_wait: bool) -> None:
        """Record that a node is asked to decode a request."""
        asked = self._asked[choice_id]
        asked.may_wait[node] = may_wait
        asked.refused.pop(node, None)

    def on_refusal(
        self, choice_id: str, node: Incarnation, error: PdserveError, *, is_prompt: bool
    ) -> None:
        """Record that a node refuses a request, or with `is_prompt` to compute its prompt.

        Prompts are asked of nodes that do not decode. One whose role has moved since has not
        refused to decode it.
        """
        asked = self._asked[choice_id]
        if isinstance(error, Draining):
            asked.retry_after_s.pop(node, None)
        elif isinstance(error, Overloaded):
            asked.come_again(node, error.retry_after_s)
        if not is_prompt:
            asked.refused[node] = error

    def on_none_stays(self, choice_id: str) -> None:
        """Record that every node that decodes leaves, or is gone."""
        self._asked[choice_id].retry_after_s.clear()

    def on_late_refusal(self, choice_id: str, node: Incarnation) -> None:
        """Record that a node which had accepted a request has no room for it."""
        asked = self._asked[choice_id]
        asked.come_again(node, 1.0)
        asked.refused[node] = PdserveError("too late to queue it")

    def on_end(
        self,
        choice_id: str,
        error: PdserveError | None,
        able: Collection[Incarnation],
        *,
        is_over_losses: bool,
    ) -> set[Incarnation]:
        """Check the end of a request: for want of room only where each node has refused it. Return
        those that have.

        `able` are the nodes that could decode it and have not failed; with `is_over_losses` it
        may ask none of them any more. Raises `InternalError`.
        """
        asked = self._asked.pop(choice_id, _Asked())
        refused = set(asked.refused)
        if not isinstance(error, Overloaded):
            return refused
        soonest_s = min(asked.retry_after_s.values(), default=1.0)
        if error.retry_after_s != soonest_s:
            says = f"to come again in {error.retry_after_s} s, and a node said {soonest_s} s"
            raise InternalError(f"the client of {choice_id} is told {says}")
        for node in () if is_over_losses else able:
            refusal = asked.refused.get(node)
            if refusal is None:
                raise InternalError(f"{choice_id} ends by {error.code}, which {node} can take")
            is_full = isinstance(refusal, Overloaded)
            is_shed = isinstance(refusal, DeadlineUnreachable)
            if is_full and not (is_shed or asked.may_wait.get(node)):
                says = f"{choice_id} ends by {error.code}, and {node} was not asked to queue it"
                raise InternalError(says)
        return refused
