"""The connections of one link: the first carries every kind of frame, further ones DATA alone.

Frames are striped over them. Each connection numbers and acknowledges its own DATA frames, so none
waits for another. A further connection that breaks or falls silent costs nothing but its frames in
flight, which the others send again; it is opened again by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from common.errors import PeerProtocolError
from kv_transfer.sending.effects import Connect, Disconnect, SayHello, SenderEffect, SendToPeer
from kv_transfer.sending.transfer import Transfer
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.handshake import LINK_TABLE, LinkState, LinkStep, advance
from kv_transfer.shared.limits import Limits
from kv_transfer.wire.frames import Ping

FIRST_PAUSE_S = 0.05
MOST_PAUSE_S = 5.0
"""Pauses before a further connection is opened again: twice as long after each failure."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A DATA frame that was not acknowledged."""

    transfer: Transfer
    chunk: LayerChunk
    num_bytes: int


def chunks_by_token(flights: Iterable[InFlight]) -> dict[int, list[LayerChunk]]:
    """Return the chunks of frames by the token of their transfer."""
    chunks: dict[int, list[LayerChunk]] = {}
    for flight in flights:
        chunks.setdefault(flight.transfer.token, []).append(flight.chunk)
    return chunks


class Channel:
    """A connection's DATA frames in flight."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.in_flight_bytes = 0
        self._in_flight: deque[InFlight] = deque()
        self._next_seq = 0

    def __len__(self) -> int:
        """Return the number of frames in flight."""
        return len(self._in_flight)

    @property
    def num_acknowledged(self) -> int:
        """Frames of this connection that the peer has consumed."""
        return self._next_seq - len(self._in_flight)

    def launch(self, flight: InFlight) -> int:
        """Add a frame; return its sequence number on this connection."""
        self._in_flight.append(flight)
        self.in_flight_bytes += flight.num_bytes
        self._next_seq += 1
        return self._next_seq - 1

    def acknowledge(self, consumed: int) -> list[InFlight]:
        """Remove and return what is new of the first `consumed` frames of this connection.

        Raises `PeerProtocolError` when fewer were sent.
        """
        num_new = consumed - self.num_acknowledged
        if not 0 <= num_new <= len(self._in_flight):
            raise PeerProtocolError(
                f"{self.peer} acknowledged {consumed} frames: {self._next_seq} were sent"
            )
        return self._take(num_new)

    def take_all(self) -> list[InFlight]:
        """Remove and return all frames, because the connection is over."""
        self._next_seq = 0
        return self._take(len(self._in_flight))

    def _take(self, count: int) -> list[InFlight]:
        taken = [self._in_flight.popleft() for _ in range(count)]
        self.in_flight_bytes -= sum(flight.num_bytes for flight in taken)
        return taken


class FurtherChannel(Channel):
    """A further connection, which connects and is watched on its own.

    `asked_at_s` is when its oldest unanswered HELLO or PING was sent; None: it was answered.
    """

    def __init__(self, peer: Peer, limits: Limits, now_s: float) -> None:
        super().__init__(peer)
        self.state = LinkState.CONNECTING
        self.asked_at_s: float | None = now_s
        self._limits = limits
        self._next_ping_at_s = now_s + limits.ping_interval_s
        self._retry_at_s = now_s
        self._pause_s = FIRST_PAUSE_S

    def heard(self) -> None:
        self.asked_at_s = None

    def welcome(self) -> bool:
        """Record WELCOME; return whether it was awaited."""
        return self._advance(LinkStep.WELCOMED)

    def acknowledge(self, consumed: int) -> list[InFlight]:
        taken = super().acknowledge(consumed)
        if taken:
            self._pause_s = FIRST_PAUSE_S
        return taken

    def break_off(self, now_s: float) -> list[InFlight]:
        """Record that the connection is over; return what was in flight on it."""
        self._advance(LinkStep.BROKEN)
        self.asked_at_s = None
        self._retry_at_s = now_s + self._pause_s
        self._pause_s = min(MOST_PAUSE_S, 2 * self._pause_s)
        return self.take_all()

    def is_silent(self, now_s: float) -> bool:
        limit_s = self._limits.answer_timeout_s
        return self.asked_at_s is not None and now_s >= self.asked_at_s + limit_s

    def on_tick(self, now_s: float) -> list[SenderEffect]:
        """Open it again when that is due; ask whether its end lives, while it is needed."""
        if self.state is LinkState.WAITING:
            if now_s < self._retry_at_s:
                return []
            self._advance(LinkStep.RETRY)
            self._ask(now_s)
            return [Connect(self.peer), SayHello(self.peer)]
        if self._is_quiet or now_s < self._next_ping_at_s:
            return []
        self._ask(now_s)
        is_ready = self.state is LinkState.READY
        return [SendToPeer(self.peer, Ping(())) if is_ready else SayHello(self.peer)]

    def next_deadline_s(self) -> float | None:
        """Return when to call `is_silent` and `on_tick`; None: nothing is awaited."""
        if self.state is LinkState.WAITING:
            return self._retry_at_s
        if self._is_quiet:
            return None
        if self.asked_at_s is None:
            return self._next_ping_at_s
        return min(self._next_ping_at_s, self.asked_at_s + self._limits.answer_timeout_s)

    def on_suspended(self, span_s: float, now_s: float) -> None:
        """Leave out `span_s` until now, in which this process stood still."""
        if self.asked_at_s is not None:
            self.asked_at_s = min(now_s, self.asked_at_s + span_s)

    @property
    def _is_quiet(self) -> bool:
        return self.state is LinkState.READY and not self and self.asked_at_s is None

    def __bool__(self) -> bool:
        """Return whether a frame is in flight."""
        return len(self) > 0

    def _ask(self, now_s: float) -> None:
        self._next_ping_at_s = now_s + self._limits.ping_interval_s
        if self.asked_at_s is None:
            self.asked_at_s = now_s

    def _advance(self, step: LinkStep) -> bool:
        state = advance(LINK_TABLE, self.state, step)
        self.state = state or self.state
        return state is not None


class Channels:
    """All connections of a link. `group` is the receiver's name for them."""

    def __init__(self, peer: Peer, limits: Limits) -> None:
        self.main = Channel(peer)
        self.further: dict[int, FurtherChannel] = {}
        self.group = b""
        self._limits = limits

    def __iter__(self) -> Iterator[Channel]:
        yield self.main
        yield from self.further.values()

    @property
    def num_in_flight(self) -> int:
        """The frames in flight on all connections."""
        return sum(len(channel) for channel in self)

    def open(self, num_granted: int, group: bytes, now_s: float) -> list[SenderEffect]:
        """Open further connections, as many as both sides allow."""
        self.group = group
        count = min(num_granted, self._limits.max_channels) if group else 1
        effects: list[SenderEffect] = []
        for number in range(1, count):
            peer = self.main.peer._replace(channel=number)
            self.further[number] = FurtherChannel(peer, self._limits, now_s)
            effects += [Connect(peer), SayHello(peer)]
        return effects

    def close(self) -> list[SenderEffect]:
        """Forget the further connections: they end with the first one."""
        closed: list[SenderEffect] = [Disconnect(one.peer) for one in self.further.values()]
        self.further.clear()
        return closed

    def take_all(self) -> list[InFlight]:
        """Remove and return everything that is in flight."""
        return [flight for channel in self for flight in channel.take_all()]

    def least_loaded(self, *, may_spread: bool) -> Channel:
        """Return the connection for the next frame; the first one unless it `may_spread`."""
        candidates: list[Channel] = [self.main]
        if may_spread:
            further = self.further.values()
            candidates += [one for one in further if one.state is LinkState.READY]
        return min(candidates, key=lambda one: one.in_flight_bytes)

    def on_suspended(self, span_s: float, now_s: float) -> None:
        for channel in self.further.values():
            channel.on_suspended(span_s, now_s)

    def next_deadlines_s(self) -> list[float]:
        times = (one.next_deadline_s() for one in self.further.values())
        return [at_s for at_s in times if at_s is not None]
