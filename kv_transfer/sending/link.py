"""The sender's connections to one decode node: their window, their turns, their liveness."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from common.errors import PeerProtocolError
from kv_transfer.sending.channels import (
    Channel,
    Channels,
    FurtherChannel,
    InFlight,
    chunks_by_token,
)
from kv_transfer.sending.effects import SayHello, SenderEffect, SendToPeer
from kv_transfer.sending.link_rates import SLOW_FOR_S, SLOW_LOOK_S, RateMeter, is_slow
from kv_transfer.sending.shared_window import SharedWindow
from kv_transfer.sending.transfer import Transfer, Turns
from kv_transfer.sending.transfer_errors import PeerUnreachable
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.handshake import LINK_TABLE, HandoffState, LinkState, LinkStep, advance
from kv_transfer.shared.lanes import (
    ONE_SIDED_LANES,
    PULLING_LANES,
    RING_ONLY_LANES,
    verification,
)
from kv_transfer.shared.limits import (
    BESIDE_WINDOWS,
    MAX_FRAMES_IN_FLIGHT,
    MAX_TRANSFERS_PER_LINK,
    Limits,
    frame_blocks_towards,
)
from kv_transfer.wire.frames import Abort, LeaseFrame, Ping, Welcome

RECONNECT_AFTER_S = 0.05


class Link:
    """The connections to one node. Their transfers share a window and send by urgency: see `turns`.

    What is said of a connection here is the first one; `channels` has the further ones. `number`
    is how many the sender had begun when it began this one.

    `offered` lanes and `wanted_verify` are from the HELLO of this connection; `lane` and `verify`
    are from its WELCOME, "" before.

    `asked_at_s` is when the oldest unanswered HELLO or PING was sent; None when the peer has
    answered since. Silence is measured from there, so that a suspended process does not fail its
    peers when it resumes.
    """

    def __init__(
        self,
        peer: Peer,
        limits: Limits,
        block_bytes: Sequence[int],
        node_window: SharedWindow,
        now_s: float,
    ) -> None:
        self.peer = peer
        self.state = LinkState.CONNECTING
        self.transfers: dict[int, Transfer] = {}
        self.channels = Channels(peer, limits)
        self.number = 0
        self.in_flight_bytes = 0
        self.offered: frozenset[str] = frozenset()
        self.wanted_verify = self.lane = self.verify = ""
        self._lane_reply = b""
        self._window_bytes = self._frame_blocks = 0
        self._late_aborts: deque[LeaseFrame] = deque(maxlen=MAX_TRANSFERS_PER_LINK)
        self._quiet_s = 0
        self._limits = limits
        self._block_bytes = block_bytes
        self._mean_bytes = sum(block_bytes) / len(block_bytes)
        self._num_damaged_headers = 0
        self.rate = RateMeter()
        self._look_again_at_s: float | None = None
        self._node_window = node_window
        self.waits_for_node = self.lacks_budget = False
        self._num_next = 0  # The chunks of the frame whose turn it is.
        # What it may send on its present turn, and what it kept of earlier ones: see `links`.
        self.budget_bytes, self.deficit_bytes = math.inf, 0.0
        self._turns = Turns()
        self._idle_since_s = now_s
        self._pinged_at_s = now_s
        self._retry_at_s = now_s
        self.asked_at_s: float | None = now_s

    def add(self, transfer: Transfer) -> None:
        self.transfers[transfer.token] = transfer

    def all(self) -> list[Transfer]:
        return list(self.transfers.values())

    def transfer_named(self, frame: LeaseFrame) -> Transfer | None:
        """Return the open transfer that a frame is about, in this generation."""
        transfer = self.transfers.get(frame.lease_token)
        if transfer is None or transfer.ticket.generation != frame.generation:
            return None
        return transfer

    def remove(self, token: int, now_s: float) -> None:
        """Forget a transfer that has ended."""
        transfer = self.transfers.pop(token)
        if transfer.state is HandoffState.COMMITTED:
            num_bytes = round(transfer.num_pushed * self._mean_bytes)  # As many of each layer.
            self.rate.on_committed(num_bytes, now_s - transfer.opened_at_s, now_s)
        self._turns.discard(token)
        self._idle_since_s = now_s

    def count_damaged_header(self) -> int:
        """Count one header with a wrong checksum; return how many there were."""
        self._num_damaged_headers += 1
        return self._num_damaged_headers

    def has_work(self, token: int) -> None:
        """Queue the transfer for a turn, unless it is queued already."""
        self._turns.add(self.transfers[token])

    # Which transfer sends next, and how much. `Turns` orders transfers, not frames: one that has
    # only its COMMIT left comes first, then by priority, then by deadline; equals take turns. The
    # order counts for every frame: an urgent transfer passes all chunks that have not left.
    #
    # A transfer whose BEGIN is not answered drops out of the queue and comes back with BEGUN. One
    # whose frame does not fit keeps its turn, and the link stops: a smaller frame of another
    # transfer must not pass it, or a large one would starve. A COMMIT has no pieces and always
    # fits. The frame is only counted here; `launch` takes its room, after `take_chunk`.
    #
    # Three bounds decide whether a frame fits (`_fits`): this link's window, which the peer grants,
    # and its number of frames; the window that all links share; and the budget of the present turn
    # among the links that wait for the shared one (deficit round robin, `Links.turns`). The flags
    # say whether the link waits for the others, and whether it keeps what it saved of its budget.
    # A link with nothing in flight always sends one frame: no acknowledgement would wake it.
    def next_turn(self) -> Transfer | None:
        """Return the transfer whose turn it is, if its next frame fits the window.

        It is removed from the queue. Two frames may always be in flight; `waits_for_node` says
        whether another one waits for the window that all peers share, or for a turn on it.
        """
        self.waits_for_node = self.lacks_budget = False
        while (token := self._turns.first()) is not None:
            transfer = self.transfers[token]
            if transfer.has_pieces and not transfer.is_begun:
                self._turns.discard(token)
                continue
            transfer.split_pushes(self._limits.joined_on(self.lane))
            self._num_next, num_bytes = self._next_frame(transfer)
            if transfer.pending and not self._fits(num_bytes):
                return None
            self._turns.discard(token)
            return transfer
        return None

    def take_chunk(self, transfer: Transfer) -> LayerChunk:
        """Return the next frame's chunk of the `next_turn`, which has pending chunks."""
        first, *others = [transfer.pending.popleft() for _ in range(self._num_next)]
        return first.joined(others)

    # The size of a frame follows the bytes in flight, as a slow start: while nothing is in flight
    # one chunk leaves at once, and the receiver can begin; with a full window a frame is half of
    # it, so that one is sent while one is acknowledged. Python's share is paid for each frame.
    def _next_frame(self, transfer: Transfer) -> tuple[int, int]:
        """Return how many pending chunks are the next DATA frame; its bytes.

        Frame size ramps up with the bytes in flight, to half the window. Larger frames cost less,
        but a frame is verified and copied only when all of it has arrived. Where neither is done
        frames are large from the first one, unless others need the room. A frame waits until the
        window fits all of it: filling each freed slot would keep frames small (silly-window
        syndrome).
        """
        half = self._window_bytes // 2
        is_only_written = self.lane in ONE_SIDED_LANES and self.verify == "off"
        has_room = self._node_window.has_room(self.in_flight_bytes, half)
        is_large = is_only_written and has_room and self.budget_bytes == math.inf
        return transfer.next_frame(
            self._block_bytes,
            most_chunks=self._limits.joined_on(self.lane),
            most_blocks=self._frame_blocks,
            most_bytes=half if is_large else min(half, self.in_flight_bytes),
        )

    def launch(self, token: int, chunk: LayerChunk) -> tuple[Channel, int]:
        """Count `chunk` as in flight; return its connection and its sequence number there."""
        num_bytes = len(chunk) * self._block_bytes[chunk.layer]
        transfer = self.transfers[token]
        channel = self.channels.least_loaded(may_spread=transfer.may_spread)
        self.in_flight_bytes += num_bytes
        self._node_window.in_flight_bytes += num_bytes
        self.budget_bytes -= num_bytes
        transfer.num_in_flight += 1
        return channel, channel.launch(InFlight(transfer, chunk, num_bytes))

    def acknowledge(self, channel: Channel, consumed: int, now_s: float) -> None:
        """Record that the peer consumed the first `consumed` DATA frames of a connection.

        Raises `PeerProtocolError` when fewer were sent.
        """
        taken = channel.acknowledge(consumed)
        for flight in taken:
            transfer = flight.transfer
            transfer.acknowledge(flight.chunk)
            if not transfer.num_in_flight and self.transfers.get(transfer.token) is transfer:
                self.has_work(transfer.token)
        if taken:
            num_bytes = self._landed_or_lost(taken)
            is_idle = not self.in_flight_bytes and not self._has_more()
            self.rate.on_acknowledged(num_bytes, now_s, is_idle=is_idle)

    def lose(self, channel: FurtherChannel, now_s: float) -> None:
        """Record that a further connection is over: its frames in flight are sent again."""
        flights = channel.break_off(now_s)
        self._landed_or_lost(flights)
        for token, chunks in chunks_by_token(flights).items():
            if token in self.transfers:
                self.transfers[token].requeue(chunks)
                self.has_work(token)
        if not self.in_flight_bytes:
            self.rate.on_idle()

    def _landed_or_lost(self, flights: Sequence[InFlight]) -> int:
        """Give the room of frames in the windows back; return their bytes."""
        num_bytes = sum(flight.num_bytes for flight in flights)
        self.in_flight_bytes -= num_bytes
        self._node_window.in_flight_bytes -= num_bytes
        return num_bytes

    def _has_more(self) -> bool:
        """Return whether a frame follows at once: one may always be in flight."""
        queued = (self.transfers[token] for token in self._turns)
        return any(transfer.is_begun and transfer.has_pieces for transfer in queued)

    def expired(self, now_s: float) -> list[Transfer]:
        """Return the transfers whose deadline has passed."""
        return [one for one in self.transfers.values() if now_s >= one.deadline_at_s]

    def waiting_long(self, now_s: float) -> list[Transfer]:
        """Return the transfers that have waited for nothing but their bytes for some seconds."""
        self._look_again_at_s = None
        if self.state is not LinkState.READY:
            return []
        waits = [(one, one.waiting_s(now_s)) for one in self.transfers.values()]
        if any(one.committing_since_s is not None for one, _ in waits):
            self._look_again_at_s = now_s + SLOW_LOOK_S
        return [one for one, waiting_s in waits if waiting_s >= SLOW_FOR_S]

    def slow(
        self, waiting: Sequence[Transfer], usual_per_s: float | None, now_s: float
    ) -> list[Transfer]:
        """Return which of `waiting_long` take much longer than at the usual rate of other links.

        Only first attempts: a request is moved once at most.
        """
        own_per_s = self.rate.present(now_s)
        # They share the link, so each waits for all.
        num_bytes = round(sum(one.num_remaining for one in waiting) * self._mean_bytes)
        return [
            one
            for one in waiting
            if one.ticket.attempt.attempt <= 1
            and is_slow(num_bytes, own_per_s, usual_per_s, one.prefill_s)
        ]

    def on_suspended(self, span_s: float, now_s: float) -> None:
        """Leave `span_s` until now, while this process stood still, out of every measured time."""
        if self.asked_at_s is not None:
            self.asked_at_s = min(now_s, self.asked_at_s + span_s)
        self.channels.on_suspended(span_s, now_s)
        self.rate.on_suspended(span_s, now_s)
        for transfer in self.transfers.values():
            transfer.on_suspended(span_s, now_s)

    def greet(self, offers: Iterable[str], verify: str) -> None:
        """Record a HELLO; the peer may answer any HELLO of this connection."""
        self.offered |= frozenset(offers)
        self.wanted_verify = verify

    def welcome(self, welcome: Welcome) -> bool:
        """Accept WELCOME; return whether it was awaited.

        Raises `PeerProtocolError` unless it fits the HELLO.
        """
        if self.state is not LinkState.CONNECTING:
            return False
        lane, verify = welcome.lane, welcome.verify
        if lane not in self.offered:
            raise PeerProtocolError(f"{self.peer} chose lane {lane!r:.40}, which was not offered")
        if verification(lane, verify, self.wanted_verify) != verify:
            raise PeerProtocolError(
                f"{self.peer} chose to verify {verify!r}: wanted {self.wanted_verify!r} or more"
            )
        self._advance(LinkStep.WELCOMED)
        self.lane, self.verify = lane, verify
        self._lane_reply = welcome.lane_reply
        self._quiet_s = welcome.quiet_s
        self._frame_blocks = frame_blocks_towards(welcome.frame_blocks)
        self.grant(welcome.window_bytes)
        return True

    def grant(self, window_bytes: int) -> None:
        """Take the window that the peer grants from now on; less may be in flight already."""
        self._window_bytes = min(window_bytes, self._limits.window_bytes)
        if self.lane in (PULLING_LANES | ONE_SIDED_LANES) - RING_ONLY_LANES:
            self._window_bytes *= BESIDE_WINDOWS

    def takes_anew(self, welcome: Welcome) -> bool:
        """Return whether a further WELCOME has a new reply of the agreed lane."""
        is_new = welcome.lane == self.lane and welcome.lane_reply != self._lane_reply
        if is_new:
            self._lane_reply = welcome.lane_reply
        return is_new and self.state is LinkState.READY

    def break_off(self, now_s: float) -> None:
        """Record a lost connection: all its unacknowledged chunks are sent again."""
        self._advance(LinkStep.BROKEN)
        lost = chunks_by_token(self.let_go())
        for token, transfer in self.transfers.items():
            transfer.rewind(lost.get(token, []))
        self.rate.on_idle()
        self._turns.clear()
        self.offered = frozenset()
        self._retry_at_s = now_s + RECONNECT_AFTER_S
        if self.asked_at_s is None:
            self.asked_at_s = now_s

    def let_go(self) -> list[InFlight]:
        """Forget and return what is in flight: it is room in the shared window again."""
        flights = self.channels.take_all()
        self._landed_or_lost(flights)
        self.waits_for_node = False
        return flights

    def retry(self, now_s: float) -> bool:
        """Return whether a broken connection is to be opened again now."""
        return now_s >= self._retry_at_s and self._advance(LinkStep.RETRY)

    def take_ping(self, now_s: float) -> bool:
        """Return whether the peer is to be pinged now; if so, set the next time.

        HELLO is repeated too: the transport may have lost it with a connection that broke early.
        """
        if self.state is LinkState.WAITING or self._is_quiet or now_s < self._next_ping_at_s:
            return False
        self._pinged_at_s = now_s
        if self.asked_at_s is None:
            self.asked_at_s = now_s
        return True

    def is_silent(self, now_s: float) -> bool:
        limit_s = self._limits.answer_timeout_s
        return self.asked_at_s is not None and now_s >= self.asked_at_s + limit_s

    def silence(self) -> PeerUnreachable:
        """Return the error of a peer that `is_silent`."""
        hint = "" if self.lane else ": is it up, and has it the same kv_key as this node?"
        span_s = self._limits.peer_timeout_s
        return PeerUnreachable(f"{self.peer} was silent for {span_s:g} s{hint}")

    def is_idle(self, now_s: float) -> bool:
        return not self.transfers and now_s >= self._idle_since_s + self._limits.idle_s

    def next_deadline_s(self) -> float:
        deadlines = [transfer.deadline_at_s for transfer in self.transfers.values()]
        deadlines += self.channels.next_deadlines_s()
        if self.asked_at_s is not None:
            deadlines.append(self.asked_at_s + self._limits.answer_timeout_s)
        if self.state is LinkState.WAITING:
            deadlines.append(self._retry_at_s)
        elif not self._is_quiet:
            deadlines.append(self._next_ping_at_s)
        if self._look_again_at_s is not None:
            deadlines.append(self._look_again_at_s)
        if not self.transfers:
            deadlines.append(self._idle_since_s + self._limits.idle_s)
        return min(deadlines)

    @property
    def _next_ping_at_s(self) -> float:
        lane = self.lane if self.transfers else ""
        return self._pinged_at_s + self._limits.ping_interval_on(lane)

    @property
    def _is_quiet(self) -> bool:
        """Whether the peer expects nothing until the next transfer, or until the link is closed."""
        is_idle = self.state is LinkState.READY and not self.transfers
        return is_idle and self._quiet_s > self._limits.idle_s

    def question(self) -> SenderEffect:
        """Return the frame that a live peer answers and that renews the leases there."""
        if self.state is LinkState.READY:
            return SendToPeer(self.peer, Ping(tuple(self.transfers)))
        return SayHello(self.peer)

    def abort_frames(self, lease: LeaseFrame) -> list[SenderEffect]:
        """Return the frame that says that nothing more of this lease is written.

        There is none without a connection.
        """
        if self.state is not LinkState.READY:
            return []
        abort = Abort(lease.lease_token, lease.generation)
        return [SendToPeer(self.peer, abort, is_behind_writes=True)]

    def abort_when_ready(self, lease: LeaseFrame) -> None:
        """Report with the next WELCOME that nothing of this lease is written.

        Of very many the first are not reported: their leases end by their deadlines.
        """
        self._late_aborts.append(lease)

    @property
    def has_late_aborts(self) -> bool:
        return bool(self._late_aborts)

    def take_late_aborts(self) -> list[SenderEffect]:
        """Return the frames that `abort_when_ready` asked for, once."""
        leases, self._late_aborts = self._late_aborts, deque(maxlen=MAX_TRANSFERS_PER_LINK)
        return [frame for lease in leases for frame in self.abort_frames(lease)]

    def stop_report(self, lease: LeaseFrame) -> list[SenderEffect]:
        """Return the report that this side, which writes the peer's pool, has stopped writing."""
        return self.abort_frames(lease) if self.lane in ONE_SIDED_LANES else []

    def _fits(self, num_bytes: int) -> bool:
        if not self.in_flight_bytes:
            return True
        if (
            self.in_flight_bytes + num_bytes > self._window_bytes
            or self.channels.num_in_flight >= MAX_FRAMES_IN_FLIGHT
        ):
            return False
        is_least = self.in_flight_bytes + num_bytes <= self._limits.least_window_bytes
        has_room = is_least or self._node_window.has_room(self.in_flight_bytes, num_bytes)
        self.lacks_budget = has_room and not is_least and num_bytes > self.budget_bytes
        self.waits_for_node = not has_room or self.lacks_budget
        return not self.waits_for_node

    def _advance(self, step: LinkStep) -> bool:
        state = advance(LINK_TABLE, self.state, step)
        self.state = state or self.state
        return state is not None
