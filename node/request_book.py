"""Who asked this node for what, and until when. Pure: time comes in, nothing goes out."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from common.ids import AttemptId, Incarnation
from engine.core.sequence import Sequence
from kv_transfer.transfer_timing import TransferTiming
from node.messages import Answer

MAX_CLOSED_ATTEMPTS = 8192
MAX_DEAD_DEADLINES = 64
HANDED_OFF = "handed_off"


@dataclass(slots=True)
class Held:
    """One attempt on this node. `lease_token` names its landing or transfer, if it has one.

    `computing_since_s` is when the first step with some of its prompt began, `first_token_at_s`
    when the one that drew token 0 ended, `landed_at_s` when KV from elsewhere did. `num_chunks`
    steps computed some of the prompt. `outcome` is empty until the attempt ends: a finish reason,
    an error's code or `handed_off`.
    """

    attempt: AttemptId
    router: Incarnation
    sequence: Sequence
    deadline_at_s: float
    received_at_s: float
    computing_since_s: float | None = None
    first_token_at_s: float | None = None
    lease_token: int | None = None
    answer: Answer | None = None
    waiting_replies: list[int] = field(default_factory=list)
    num_pushed_blocks: int = 0
    num_chunks: int = 0
    landed_at_s: float | None = None
    transfer: TransferTiming | None = None
    outcome: str = ""
    is_over: bool = False
    """Ended for the router; kept only until its transfer lets go of the blocks."""

    def prompt_spans_s(self) -> tuple[float, float]:
        """How long the prompt waited here for its first step, and from there to token 0."""
        if self.computing_since_s is None or self.first_token_at_s is None:
            raise ValueError(f"{self.attempt} has no token 0 yet")
        queue_s = max(self.computing_since_s - self.received_at_s, 0.0)
        return queue_s, self.first_token_at_s - self.computing_since_s


class RequestBook:
    """Attempts by id, by router, by lease and by deadline.

    Closed attempts are remembered, up to a bound: an abort may overtake the request it aborts.
    """

    def __init__(self) -> None:
        self._held: dict[AttemptId, Held] = {}
        self._by_sequence: dict[int, Held] = {}
        self._by_lease: dict[int, Held] = {}
        self._by_router: dict[Incarnation, dict[AttemptId, Held]] = {}
        self._deadlines: list[tuple[float, AttemptId]] = []
        self._closed: OrderedDict[AttemptId, None] = OrderedDict()
        self._ended: deque[Held] | None = None

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_leases(self) -> int:
        """Attempts with an open landing or transfer."""
        return len(self._by_lease)

    def add(self, held: Held) -> None:
        """Take an attempt in; its id must be new."""
        if held.attempt in self._held:
            raise ValueError(f"{held.attempt} is held already")
        self._held[held.attempt] = held
        self._by_sequence[held.sequence.sequence_id] = held
        self._by_router.setdefault(held.router, {})[held.attempt] = held
        heapq.heappush(self._deadlines, (held.deadline_at_s, held.attempt))
        if held.lease_token is not None:
            self._by_lease[held.lease_token] = held

    def set_lease(self, held: Held, lease_token: int) -> None:
        """The attempt now has a landing or a transfer."""
        held.lease_token = lease_token
        self._by_lease[lease_token] = held

    def clear_lease(self, held: Held) -> None:
        """Its landing or transfer is over."""
        if held.lease_token is not None:
            del self._by_lease[held.lease_token]
            held.lease_token = None

    def remove(self, held: Held) -> None:
        """Forget an attempt; only its id is remembered as closed."""
        self.clear_lease(held)
        del self._held[held.attempt]
        del self._by_sequence[held.sequence.sequence_id]
        of_router = self._by_router[held.router]
        del of_router[held.attempt]
        if not of_router:
            del self._by_router[held.router]
        self.close(held.attempt)
        if self._ended is not None:
            self._ended.append(held)
        if len(self._deadlines) > 2 * len(self._held) + MAX_DEAD_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._held]
            heapq.heapify(self._deadlines)

    def close(self, attempt: AttemptId) -> None:
        """Remember that this attempt is over, or was given up before it came."""
        self._closed[attempt] = None
        self._closed.move_to_end(attempt)
        if len(self._closed) > MAX_CLOSED_ATTEMPTS:
            self._closed.popitem(last=False)

    def is_closed(self, attempt: AttemptId) -> bool:
        """Whether the attempt is over (as far as the bounded memory goes)."""
        return attempt in self._closed

    def keep_ended(self) -> None:
        """Somebody calls `take_ended` from now on."""
        self._ended = deque(maxlen=MAX_CLOSED_ATTEMPTS)

    def take_ended(self) -> list[Held]:
        """What was removed since the last call, oldest first; of a great many the latest."""
        if not self._ended:
            return []
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def get(self, attempt: AttemptId) -> Held | None:
        """The attempt, if it is held."""
        return self._held.get(attempt)

    def of_sequence(self, sequence: Sequence) -> Held | None:
        """The attempt that a sequence belongs to."""
        return self._by_sequence.get(sequence.sequence_id)

    def of_lease(self, lease_token: int) -> Held | None:
        """The attempt whose landing or transfer this is."""
        return self._by_lease.get(lease_token)

    def of_router(self, router: Incarnation) -> list[Held]:
        """Everything that a router has here."""
        return list(self._by_router.get(router, {}).values())

    def all(self) -> list[Held]:
        """Everything held."""
        return list(self._held.values())

    def expired(self, now_s: float) -> list[Held]:
        """Attempts whose deadline has passed, each reported once."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            held = self._held.get(heapq.heappop(self._deadlines)[1])
            if held is not None and held.deadline_at_s <= now_s:
                expired.append(held)
        return expired

    def next_deadline_s(self) -> float | None:
        """When `expired` has something to say, at the latest."""
        while self._deadlines and self._deadlines[0][1] not in self._held:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None
