"""Requests that a suspected node holds up although an idle one can be asked. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from common.errors import InternalError
from common.ids import AttemptId, Incarnation
from router.core.request_flow import RequestFlow

MOST_UNANSWERED_TICKS = 8


class Unanswered:
    """Requests that a suspected node holds up while others are idle."""

    def __init__(self) -> None:
        self._num_ticks: Counter[AttemptId] = Counter()
        """How many ticks each has had no other attempt, by its last one."""

    def check(
        self,
        suspects: Collection[Incarnation],
        flows: Sequence[RequestFlow],
        idle: Callable[[], Mapping[Incarnation, int]],
    ) -> None:
        """Count a tick. Raises `InternalError` for a request that an idle node is not asked for."""
        alone = [
            flow
            for flow in flows
            if flow._attempts.second is None
            and (flow._attempts.is_held_up(flow._main) or any(map(flow._main.waits_for, suspects)))
        ]
        nodes = idle() if alone else {}
        held = [
            flow.attempt
            for flow in alone
            if _long_enough(nodes, flow) - flow._candidates._failed
            and not flow._candidates.has_lost_too_many
        ]
        self._num_ticks = Counter({one: self._num_ticks[one] + 1 for one in held})
        for attempt, num_ticks in self._num_ticks.items():
            if num_ticks > MOST_UNANSWERED_TICKS:
                raise InternalError(f"{attempt} waits for a suspected node, and others are idle")


def _long_enough(nodes: Mapping[Incarnation, int], flow: RequestFlow) -> set[Incarnation]:
    num_tokens = len(flow._prompt.token_ids) + flow.max_tokens
    return {node for node, most in nodes.items() if num_tokens <= most}
