"""Requests that a suspected node holds up although an idle one can be asked. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from common.errors import InternalError
from common.ids import AttemptId, Incarnation
from router.core.attempts import Attempt
from router.core.request_flow import RequestFlow

MOST_UNANSWERED_TICKS = 16


class Unanswered:
    """Requests that suspected nodes hold up while others are idle."""

    def __init__(self) -> None:
        self._num_ticks: Counter[AttemptId] = Counter()
        """How many ticks each has had no other attempt, by its last one."""

    def check(
        self,
        suspects: Mapping[Incarnation, bool],
        flows: Sequence[RequestFlow],
        idle: Callable[[], Mapping[Incarnation, int]],
    ) -> None:
        """Count a tick. Raises `InternalError` for a request that an idle node is not asked for.

        `suspects` are the suspected nodes, and whether each is heard.
        """
        alone = [
            flow
            for flow in flows
            if flow._attempts.second is None and _is_held_up(flow._main, suspects)
        ]
        nodes = idle() if alone else {}
        held = [
            flow.attempt
            for flow in alone
            if _long_enough(nodes, flow) - flow._candidates._failed
            and flow._candidates.may_try_beside
            and not flow._candidates.has_lost_too_many
        ]
        self._num_ticks = Counter({one: self._num_ticks[one] + 1 for one in held})
        for attempt, num_ticks in self._num_ticks.items():
            if num_ticks > MOST_UNANSWERED_TICKS:
                raise InternalError(f"{attempt} waits for a suspected node, and others are idle")


def _long_enough(nodes: Mapping[Incarnation, int], flow: RequestFlow) -> set[Incarnation]:
    num_tokens = len(flow._prompt.token_ids) + flow.max_tokens
    return {node for node, most in nodes.items() if num_tokens <= most}


def _is_held_up(attempt: Attempt, suspects: Mapping[Incarnation, bool]) -> bool:
    """Return whether a suspected node may hold an attempt up; a heard one if it has no word yet."""
    return any(
        attempt.waits_for(node) if is_heard else attempt.is_on(node)
        for node, is_heard in suspects.items()
    )
