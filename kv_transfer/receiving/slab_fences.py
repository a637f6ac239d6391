"""Fences: how quarantined blocks of a sender whose connection is dead become usable again.

The blocks lie in slabs, and every sender that is connected may write other blocks of the same slabs
all the time. So a fence does not wait until nobody writes a slab. One slab at a time:

1. the lane registers the slab at a further address (`MoveSlab`). From now on every new sender gets
   that address;
2. each connected sender is sent the new address, and after it a FAILED of no lease (`NO_LEASE`). A
   sender on a one-sided lane answers every FAILED with an ABORT after its writes, so its ABORT
   says that its writes to the old address are done;
3. when all have answered, the lane removes the old address (`Fence`). No dead sender knows another
   one, so the blocks that its landings held in this slab are out of its reach.

A connected sender that does not answer within the peer timeout is not waited for, then or later: a
write of it that goes to the old address fails, and it connects again. Its landing fails then, and
no byte gets into a block that was released. The release of a block never depends on a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from common.errors import HandoffFailed
from kv_transfer.receiving.effects import Fence, MoveSlab, ReceiverEffect, SendBack
from kv_transfer.receiving.quarantine import Quarantine
from kv_transfer.wire import frames

NO_LEASE = 0
"""The lease token of a FAILED that asks for a report; no lease has it."""

Effects = list[ReceiverEffect]


@dataclass(slots=True)
class _Move:
    """The slab that moves, and the connections whose report is waited for.

    `tokens` are the quarantined leases that its end makes clean in this slab. `is_told`: it has its
    new address; `is_fenced`: the removal of the old one was asked for.
    """

    lane: str
    slab: int
    number: int
    tokens: list[int] = field(default_factory=list)
    waits_for: dict[bytes, SendBack] = field(default_factory=dict)
    until_s: float = 0.0
    is_told: bool = False
    is_fenced: bool = False


class SlabFences:
    """The move under way, if any, and the choice of the next one."""

    def __init__(self, quarantine: Quarantine, answer_within_s: float) -> None:
        self._quarantine = quarantine
        self._answer_within_s = answer_within_s
        self._move: _Move | None = None
        self._num_moves = 0
        self._last_slab = -1
        self._silent: set[bytes] = set()

    def next_step(self, live: Iterable[bytes], now_s: float) -> Effects:
        """Begin a move if one is due, or end the one under way; `live` are all connections."""
        if self._move is None and not self._quarantine.num_blocks:
            return []  # The usual case.
        connected = set(live)
        self._silent &= connected
        if self._move is None:
            return self._begin(connected)
        move = self._move
        move.waits_for = {one: ask for one, ask in move.waits_for.items() if one in connected}
        if move.is_told and now_s >= move.until_s:
            self._silent |= set(move.waits_for)
            move.waits_for.clear()
        if not move.is_told or move.is_fenced or move.waits_for:
            return []
        move.is_fenced = True
        return [Fence(move.lane, move.slab)]

    def on_moved(
        self, live: Iterable[bytes], told: Mapping[bytes, SendBack], now_s: float
    ) -> Effects:
        """Send the connections in `told`, each with its WELCOME, the new address; ask for reports.

        `live` are all connections, on any lane.
        """
        move = self._move
        if move is None:
            return []  # It was closed meanwhile.
        move.is_told = True
        move.until_s = now_s + self._answer_within_s
        # Those whose connection ended before the new address was sent to it.
        move.tokens = self._quarantine.left_by_the_dead(move.lane, move.slab, live)
        effects: Effects = []
        for session, welcome in told.items():
            effects += self._question(session, welcome)
            if session not in self._silent:
                move.waits_for[session] = welcome
        return effects + self.next_step(live, now_s)

    def on_ping(self, session: bytes) -> Effects:
        """Ask again, because the first question may not have fitted into a full queue."""
        welcome = self._move.waits_for.get(session) if self._move else None
        return [] if welcome is None else self._question(session, welcome)

    def on_report(self, session: bytes, number: int) -> None:
        """Record that the writes of a connection to earlier addresses are done."""
        if self._move is not None and self._move.number == number:
            self._move.waits_for.pop(session, None)

    def on_fenced(self) -> list[int]:
        """Record that nothing reaches the old address; return the leases that are free now."""
        move, self._move = self._move, None
        return [] if move is None else self._quarantine.fenced(move.slab, move.tokens)

    def wait_anew(self, now_s: float) -> None:
        """Restart the time to wait for reports: this process itself was suspended."""
        if self._move is not None:
            self._move.until_s = now_s + self._answer_within_s

    def close(self) -> None:
        """Forget the move under way."""
        self._move = None

    def next_deadline_s(self) -> float | None:
        """Return when a connection that does not report is given up."""
        is_waiting = self._move is not None and self._move.waits_for
        return self._move.until_s if self._move is not None and is_waiting else None

    def _begin(self, live: Iterable[bytes]) -> Effects:
        due = self._quarantine.next_slab(live, after=self._last_slab)
        if due is None:
            return []
        self._num_moves += 1
        lane, self._last_slab = due
        self._move = _Move(lane, self._last_slab, self._num_moves)
        return [MoveSlab(lane, self._last_slab)]

    def _question(self, session: bytes, welcome: SendBack) -> Effects:
        assert self._move is not None, "there is a move to ask about"
        text = "report when your writes to earlier addresses are done"
        question = frames.Failed(NO_LEASE, self._move.number, HandoffFailed.code, text)
        return [welcome, SendBack(session, question)]
