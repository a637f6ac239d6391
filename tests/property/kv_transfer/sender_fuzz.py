"""The sending machine under any frames, checked by an oracle that knows what may leave.

The oracle keeps for each connection what was begun and answered there, which DATA frames left and
how many of them were acknowledged; and for each transfer what was pushed. From these it says of
each effect whether it may be.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.ids import AttemptId, Incarnation
from kv_transfer.contract import Commit, Ticket, TransferEnded
from kv_transfer.sending.effects import Connect, Disconnect, SendChunk, SenderEffect, SendToPeer
from kv_transfer.sending.machine import Sender
from kv_transfer.shared.effects import Emit, Peer
from kv_transfer.shared.lanes import ONE_SIDED_LANES, PULLING_LANES
from kv_transfer.shared.limits import BESIDE_WINDOWS, MAX_FRAMES_IN_FLIGHT, Limits
from kv_transfer.wire import frames
from tests.property.kv_transfer.frame_mutator import LAYOUT

ME = Incarnation("p", 1)
PEERS = tuple(Peer(f"there{number}", Incarnation(f"d{number}", 1)) for number in range(3))
PAIR_BYTES = 2 * LAYOUT.piece_bytes
LIMITS = Limits(window_bytes=4 * PAIR_BYTES, max_frame_bytes=2 * PAIR_BYTES, idle_s=3.0)
MOST_OPEN = 12
OFFERED = ("zmq", "rdma", "shm")


@dataclass(slots=True)
class _Transfer:
    ticket: Ticket
    peer: Peer
    pushed: set[tuple[int, int]] = field(default_factory=set)
    is_committed: bool = False
    is_aborted: bool = False
    is_misused: bool = False
    has_promised: bool = False

    @property
    def token(self) -> int:
        return self.ticket.lease_token


@dataclass(slots=True)
class _Connection:
    """The frames of a connection since the last `Connect`."""

    lane: str = ""
    begun: set[int] = field(default_factory=set)
    answered: set[int] = field(default_factory=set)
    sent: list[tuple[int, int]] = field(default_factory=list)
    num_acknowledged: int = 0
    num_sent: int = 0

    @property
    def window_bytes(self) -> int:
        is_beside = self.lane in PULLING_LANES | ONE_SIDED_LANES
        return LIMITS.window_bytes * (BESIDE_WINDOWS if is_beside else 1)

    def in_flight(self, token: int) -> int:
        return sum(one == token for one, _ in self.sent)


class SenderFuzz:
    """One machine and its oracle; `step` gives it one frame, or lets its owner or time act."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._machine = Sender(ME, LAYOUT, LIMITS)
        self._now_s = 0.0
        self._next_token = 1
        self._open: dict[int, _Transfer] = {}
        self._connections: dict[Peer, _Connection] = {}
        self._told: frames.Frame | None = None
        self.counts = {"chunks": 0, "commits": 0, "ended": 0, "succeeded": 0, "connects": 0}

    def step(self, strange: frames.Frame | None) -> None:
        """One frame: `strange`, or one that is nearly right."""
        if self._rng.random() < 0.6:
            self._owner_or_time()
        peer = self._rng.choice(PEERS)
        frame = strange if strange is not None else self._plausible(peer)
        self._told = frame
        self._note(peer, frame)
        self._do(self._machine.on_frame(peer, frame, self._now_s))
        self._told = None

    # -- the owner -------------------------------------------------------------------------------

    def _owner_or_time(self) -> None:
        rng = self._rng
        choice = rng.random()
        transfer = rng.choice(list(self._open.values())) if self._open else None
        if choice < 0.15 and len(self._open) < MOST_OPEN:
            self._open_one()
        elif transfer is not None and choice < 0.7:
            self._push(transfer)
        elif transfer is not None and choice < 0.8:
            self._commit(transfer)
        elif transfer is not None and choice < 0.82:
            transfer.is_aborted = True
            self._do(self._machine.on_abort(transfer.token, self._now_s))
        elif choice < 0.83:
            self._do(self._machine.on_link_lost(rng.choice(PEERS), self._now_s))
        else:
            self._now_s += rng.choice((0.0, 0.01, 0.06, 0.2))
            self._do(self._machine.on_tick(self._now_s))
            assert not any(one.is_misused for one in self._open.values())

    def _open_one(self) -> None:
        rng = self._rng
        peer = rng.choice(PEERS)
        ticket = Ticket(
            attempt=AttemptId("r", 0),
            decode_node=peer.incarnation,
            kv_endpoint=peer.endpoint,
            lease_token=self._next_token,
            generation=rng.randrange(1, 4),
            target_block_ids=tuple(rng.sample(range(50), rng.randrange(1, 5))),
            num_cached_tokens=0,
            fingerprint=LAYOUT.fingerprint,
            lease_s=30.0,
        )
        self._next_token += 1
        self._open[ticket.lease_token] = _Transfer(ticket, peer)
        self._do(self._machine.on_open(ticket, rng.choice((1.0, 30.0)), self._now_s))

    def _push(self, transfer: _Transfer) -> None:
        rng = self._rng
        count = len(transfer.ticket.target_block_ids)
        layer = rng.randrange(LAYOUT.num_layers)
        ordinals = rng.sample(range(count), rng.randrange(1, count + 1))
        if self._is_out_of_place(transfer):
            return
        if not transfer.is_aborted and not transfer.is_committed:
            transfer.pushed |= {(layer, ordinal) for ordinal in ordinals}
        self._do(self._machine.on_push(transfer.token, layer, ordinals, ordinals))

    def _commit(self, transfer: _Transfer) -> None:
        num_tokens = len(transfer.ticket.target_block_ids) * LAYOUT.block_size
        if self._is_out_of_place(transfer):
            return
        transfer.is_committed = True
        commit = Commit(num_tokens=num_tokens, first_token_id=7)
        self._do(self._machine.on_commit(transfer.token, commit))

    def _is_out_of_place(self, transfer: _Transfer) -> bool:
        """Return whether to leave out a call that comes behind a commit; a few are made."""
        if not transfer.is_committed or transfer.is_aborted:
            return False
        transfer.is_misused = transfer.is_misused or self._rng.random() < 0.01
        return not transfer.is_misused

    # -- the peers -------------------------------------------------------------------------------

    def _plausible(self, peer: Peer) -> frames.Frame:
        rng = self._rng
        connection = self._connections.get(peer)
        kind = rng.random()
        if connection is None or not connection.lane or kind < 0.01:
            lane = rng.choice((*OFFERED, *OFFERED, "loopback"))
            receiver = peer.incarnation if rng.random() < 0.97 else ME
            window_bytes = rng.choice((0, 2, 4, 99)) * PAIR_BYTES
            verify, most = rng.choice(("off", "block")), rng.choice((0, 256, 1024, 1 << 31))
            return frames.Welcome(receiver, lane, b"", window_bytes, verify, frame_blocks=most)
        mine = [one for one in self._open.values() if one.peer == peer]
        if not mine or kind < 0.4:
            most = connection.num_sent
            consumed = rng.randrange(connection.num_acknowledged, most + 1)
            window_bytes = rng.choice((0, 0, 1, 1 << 12, 1 << 40))
            return frames.Ack(consumed if rng.random() < 0.995 else most + 1, window_bytes)
        transfer = rng.choice(mine)
        token, generation = transfer.token, transfer.ticket.generation
        if rng.random() < 0.05:
            generation += rng.choice((-1, 1))
        if kind < 0.7:
            return frames.Begun(token, generation)
        if kind < 0.85 and (transfer.has_promised or kind < 0.705):
            return frames.Committed(token, generation)
        if kind < 0.88:
            return frames.Failed(token, generation, "handoff_failed", "no")
        if kind < 0.92 and transfer.is_aborted:
            return frames.Aborted(token, generation)
        if kind < 0.95 and transfer.pushed:
            layer, ordinal = rng.choice(sorted(transfer.pushed))
            return frames.Repeat(token, generation, layer, (ordinal,))
        if kind < 0.99:
            return frames.Pong()
        return frames.Rejected(rng.choice((frames.NO_SESSION, "overloaded")), "no")

    def _note(self, peer: Peer, frame: frames.Frame) -> None:
        connection = self._connections.get(peer)
        if connection is None:
            return
        match frame:
            case frames.Welcome(receiver, lane) if not connection.lane:
                if receiver == peer.incarnation and lane in OFFERED:
                    connection.lane = lane
            case frames.Begun(token, generation):
                transfer = self._open.get(token)
                if transfer is not None and transfer.ticket.generation == generation:
                    connection.answered.add(token)
            case frames.Ack(consumed):
                num_new = consumed - connection.num_acknowledged
                if 0 <= num_new <= len(connection.sent):
                    del connection.sent[:num_new]
                    connection.num_acknowledged = consumed

    # -- what the machine may do ------------------------------------------------------------------

    def _do(self, effects: Iterable[SenderEffect]) -> None:
        for effect in effects:
            match effect:
                case Connect(peer):
                    self._connections[peer] = _Connection()
                    self._machine.hello(peer, dict.fromkeys(OFFERED, b""), "off")
                    self.counts["connects"] += 1
                case Disconnect(peer):
                    self._connections.pop(peer, None)
                case SendChunk():
                    self._chunk(effect)
                case SendToPeer(peer, frame):
                    self._sent(peer, frame)
                case Emit(TransferEnded(token, error)):
                    self._ended(token, error)

    def _chunk(self, effect: SendChunk) -> None:
        connection = self._connections[effect.peer]
        transfer = self._open[effect.lease_token]
        ticket = transfer.ticket
        assert not transfer.is_misused
        assert (transfer.peer, ticket.generation) == (effect.peer, effect.generation)
        assert transfer.token in connection.begun, "a piece before BEGIN"
        assert connection.lane != "rdma" or transfer.token in connection.answered
        chunk = effect.chunk
        ordinals = chunk.ordinals.tolist()
        assert {(chunk.layer, ordinal) for ordinal in ordinals} <= transfer.pushed
        wanted = tuple(ticket.target_block_ids[ordinal] for ordinal in ordinals)
        assert tuple(effect.target_blocks.tolist()) == wanted
        assert effect.seq == connection.num_sent
        connection.num_sent += 1
        connection.sent.append((transfer.token, len(chunk.ordinals) * PAIR_BYTES))
        assert sum(size for _, size in connection.sent) <= connection.window_bytes
        assert len(connection.sent) <= MAX_FRAMES_IN_FLIGHT
        self.counts["chunks"] += 1

    def _sent(self, peer: Peer, frame: frames.Frame) -> None:
        connection = self._connections[peer]
        match frame:
            case frames.Begin(token, generation):
                assert connection.lane
                assert self._open[token].ticket.generation == generation
                connection.begun.add(token)
            case frames.CommitFrame(token, generation, num_pieces):
                transfer = self._open[token]
                assert transfer.ticket.generation == generation
                assert transfer.is_committed
                assert not transfer.is_misused
                assert token in connection.begun
                assert not connection.in_flight(token), "a COMMIT before its pieces were taken"
                assert num_pieces == len(transfer.pushed)
                transfer.has_promised = True
                self.counts["commits"] += 1

    def _ended(self, token: int, error: object) -> None:
        transfer = self._open.pop(token)
        self.counts["ended"] += 1
        if error is None:
            assert self._told == frames.Committed(token, transfer.ticket.generation)
            assert transfer.has_promised
            self.counts["succeeded"] += 1

    def check_bounds(self) -> None:
        assert self._machine.num_transfers == len(self._open)
        in_flight = self._machine.in_flight_bytes
        assert in_flight.keys() <= set(PEERS)
        for peer, size in in_flight.items():
            connection = self._connections.get(peer) or _Connection()
            assert size <= connection.window_bytes
