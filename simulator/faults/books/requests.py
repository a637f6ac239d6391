"""Requests and tokens counted on nodes, and requests that suspected nodes hold up."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from common.errors import InternalError
from common.ids import AttemptId, Incarnation
from router.core.attempts import Attempt
from router.core.membership import Membership
from router.core.request_flow import RequestFlow

MOST_UNANSWERED_TICKS = 16


def check_counted(membership: Membership, running: Iterable[tuple[int, Iterable[Attempt]]]) -> None:
    """Check the requests and prompt tokens that count on nodes.

    `running` has of each request the tokens of its prompt, and the attempts that go on. Raises
    `InternalError`.
    """
    requests: dict[Incarnation, int] = defaultdict(int)
    tokens: dict[Incarnation, int] = defaultdict(int)
    for num_tokens, attempts in running:
        for one in attempts:
            for node in (one.prefill, one.planned_prefill):
                if node is not None:
                    requests[node] += 1
                    tokens[node] += num_tokens
            if one.decode is not None:
                requests[one.decode] += 1
                tokens[one.decode] += num_tokens if one._has_prompt else 0
    for node, member in membership._members.items():
        found = member.own.num_requests, member.own.num_tokens
        has = requests[node], tokens[node]
        if found != has:
            raise InternalError(f"(requests, tokens) {found} count on {node}, which has {has}")


class Unanswered:
    """Counts the ticks for which suspected nodes hold up requests while others are idle."""

    def __init__(self) -> None:
        self._num_ticks: Counter[AttemptId] = Counter()
        """The ticks for which each request had no other attempt, by its last one."""

    def check(
        self,
        suspects: Mapping[Incarnation, bool],
        flows: Sequence[RequestFlow],
        idle: Callable[[], Mapping[Incarnation, int]],
    ) -> None:
        """Count a tick. Raises `InternalError` for a request that an idle node is not asked for.

        `suspects` are the nodes that are to be suspected, and whether each is heard; `idle` returns
        the idle ones, and how many tokens a request may have there.
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


def _is_held_up(attempt: Attempt, suspects: Mapping[Incarnation, bool]) -> bool:
    """Return whether a suspected node may hold an attempt up; a heard one if it has no word yet."""
    return any(
        attempt.waits_for(node) if is_heard else attempt.is_on(node)
        for node, is_heard in suspects.items()
    )


def _long_enough(nodes: Mapping[Incarnation, int], flow: RequestFlow) -> set[Incarnation]:
    num_tokens = len(flow._prompt.token_ids) + flow.max_tokens
    return {node for node, most in nodes.items() if num_tokens <= most}
