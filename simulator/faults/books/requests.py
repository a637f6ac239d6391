"""Requests and tokens counted on nodes, and requests that suspected nodes hold up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from common.errors import InternalError
from common.ids import AttemptId, Incarnation
from router.core.attempts import Attempt
from router.core.membership import Membership
from router.core.request_flow import RequestFlow

MOST_UNANSWERED_TICKS = 8
"""Fewer than from the suspicion of a silent node to its loss, which ends the wait by itself."""


class Legs:
    """The requests and prompt tokens that the attempts of one router have on nodes."""

    def __init__(self) -> None:
        self._of_request: dict[str, list[tuple[Incarnation, int]]] = {}
        self._requests: dict[Incarnation, int] = {}
        self._tokens: dict[Incarnation, int] = {}

    def take(self, name: str, num_tokens: int, attempts: Iterable[Attempt]) -> None:
        """Take the attempts of a request that go on after an event, and the tokens of its prompt:
        nothing else can have changed."""
        legs = []
        for one in attempts:
            legs += [
                (at, num_tokens) for at in (one.prefill, one.planned_prefill) if at is not None
            ]
            if one.decode is not None:
                legs.append((one.decode, num_tokens if one._has_prompt else 0))
        before = self._of_request.get(name, [])
        if legs == before:
            return
        self._of_request[name] = legs
        for sign, changed in ((-1, before), (1, legs)):
            for node, tokens in changed:
                self._requests[node] = self._requests.get(node, 0) + sign
                self._tokens[node] = self._tokens.get(node, 0) + sign * tokens
        if not legs:
            del self._of_request[name]

    def check(self, membership: Membership) -> None:
        """Check that as much counts on each node. Raises `InternalError`."""
        requests, tokens = self._requests, self._tokens
        for node, member in membership._members.items():
            own = member.own
            found, has = own.num_requests, requests.get(node, 0)
            if found != has or own.num_tokens != tokens.get(node, 0):
                says = f"(requests, tokens) {(found, own.num_tokens)} count on {node}"
                raise InternalError(f"{says}, which has {(has, tokens.get(node, 0))}")


class Losses:
    """Whether requests count the loss of a node as one that they may have caused."""

    def __init__(
        self, node: Incarnation, flows: Iterable[RequestFlow], *, is_orderly: bool
    ) -> None:
        """Begin before the flows hear of the end of a node's stream; only those on it matter."""
        self._node, self._is_orderly = node, is_orderly
        self._flows = [one for one in flows if one._attempts.on(node)]
        self._had = [node in one._candidates._dead for one in self._flows]

    def check(self) -> None:
        """Check that a stream which ended in order did not count, and any other one did.

        Raises `InternalError`.
        """
        for flow, had in zip(self._flows, self._had, strict=True):
            counts = self._node in flow._candidates._dead
            if counts is not (had or not self._is_orderly):
                how = "ended its stream in order" if self._is_orderly else "was lost"
                says = "one that it lost" if counts else "one that left"
                name = flow.attempt.choice_id
                raise InternalError(f"{self._node} {how}, and counts for {name} as {says}")


class Unanswered:
    """Counts the ticks for which suspected nodes hold up requests while others are idle."""

    def __init__(self) -> None:
        self._num_ticks: Counter[AttemptId] = Counter()
        """The ticks for which all attempts of each request were held up, by its last one."""

    def check_none(self) -> None:
        """Count a tick in which no node is to be suspected."""
        self._num_ticks.clear()

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
        held_up = [
            flow
            for flow in flows
            if all(_is_held_up(one, suspects) for one in flow._attempts._all())
        ]
        nodes = idle() if held_up else {}
        held = [
            flow.attempt
            for flow in held_up
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
