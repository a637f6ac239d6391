"""The receiving machine under any frames, checked by an oracle that knows which writes are legal.

The oracle keeps its own, much simpler books: who greeted, which landings are open, who began them
last. From these alone it says of each `Write`, `Landed` and `Released` whether it may be.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.ids import AttemptId, Incarnation
from kv_transfer.contract import Landed, LandingFailed, Released, Ticket
from kv_transfer.receiving.effects import (
    CloseLane,
    Fence,
    MoveSlab,
    OpenLane,
    ReceiverEffect,
    SendBack,
    Write,
)
from kv_transfer.receiving.machine import Receiver
from kv_transfer.shared.effects import Emit
from kv_transfer.shared.limits import Limits
from kv_transfer.wire import frames
from tests.property.kv_transfer.frame_mutator import LAYOUT

ME = Incarnation("d", 1)
SESSIONS = tuple(b"s%d" % number for number in range(6))
# Mostly one for each connection: a sender's next connection ends the one before.
SENDERS = {session: Incarnation(f"p{number}", 1) for number, session in enumerate(SESSIONS)}
NUM_BLOCKS, BLOCKS_PER_SLAB = 32, 4
LIMITS = Limits(max_sessions=5, peer_timeout_s=2.0)
MOST_TOKENS_KEPT = 64


@dataclass(slots=True)
class _Lease:
    ticket: Ticket
    is_open: bool = True
    is_landed: bool = False
    is_released: bool = False
    sender: Incarnation | None = None
    session: bytes | None = None
    is_one_sided: bool = False
    # The number of each slab's newest address that the sender knew when its connection ended.
    known: bytes | None = None
    written: set[tuple[int, int]] = field(default_factory=set)

    @property
    def holds_blocks(self) -> bool:
        return not (self.is_landed or self.is_released)

    @property
    def slabs(self) -> set[int]:
        return {block // BLOCKS_PER_SLAB for block in self.ticket.target_block_ids}


class ReceiverFuzz:
    """One machine and its oracle; `step` gives it one frame, or lets its owner or time act."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._machine = Receiver(
            ME, LAYOUT, LIMITS, num_blocks=NUM_BLOCKS, blocks_per_slab=BLOCKS_PER_SLAB
        )
        self._now_s = 0.0
        self._next_token = 1
        self._leases: dict[int, _Lease] = {}
        self._sessions: dict[bytes, tuple[Incarnation, str]] = {}
        self._seqs: dict[bytes, int] = {}
        self._verify: dict[bytes, str] = {}
        # What honest senders answer to FAILED, in time.
        self._due: list[tuple[bytes, frames.Abort]] = []
        # What was just given to the machine: the only cause of what it does next.
        self._cause: tuple[bytes, frames.Frame] | None = None
        # By slab: the number of its newest address, and of the oldest that can be written.
        self._newest = [0] * (NUM_BLOCKS // BLOCKS_PER_SLAB)
        self._oldest = [0] * (NUM_BLOCKS // BLOCKS_PER_SLAB)
        self._told: dict[bytes, bytes] = {}
        self.counts = {"writes": 0, "landed": 0, "released": 0, "failed": 0, "fences": 0}

    # -- what happens ----------------------------------------------------------------------------

    def step(self, strange: frames.Frame | None) -> None:
        """One frame: `strange`, or one that is nearly right."""
        if self._rng.random() < 0.3:
            self._owner_or_time()
        session = self._rng.choice(SESSIONS)
        frame = strange if strange is not None else self._plausible(session)
        if self._due and self._rng.random() < 0.3:
            session, frame = self._due.pop(0)
        sizes = self._sizes(frame)
        self._give(session, frame, sizes)

    def _owner_or_time(self) -> None:
        choice = self._rng.random()
        if choice < 0.5:
            self._expect()
        elif choice < 0.55 and self._leases:
            self._revoke(self._rng.choice(list(self._leases)))
        else:
            self._now_s += self._rng.choice((0.0, 0.01, 0.1, 0.1, 0.7))
            self._cause = None
            self._do(self._machine.on_tick(self._now_s))

    def _expect(self) -> None:
        held = {
            block
            for lease in self._leases.values()
            if lease.holds_blocks
            for block in lease.ticket.target_block_ids
        }
        blocks = self._rng.sample(range(NUM_BLOCKS), self._rng.randrange(1, 4))
        ticket = Ticket(
            attempt=AttemptId("r", 0),
            decode_node=ME,
            kv_endpoint="here",
            lease_token=self._next_token,
            generation=self._rng.randrange(1, 4),
            target_block_ids=tuple(blocks),
            num_cached_tokens=0,
            fingerprint=LAYOUT.fingerprint,
            lease_s=30.0,
        )
        try:
            self._machine.on_expect(ticket, self._rng.choice((0.5, 5.0, 50.0)), self._now_s)
        except ValueError:
            assert held & set(blocks)
            return
        assert not held & set(blocks), "blocks that somebody may write were given away"
        self._leases[ticket.lease_token] = _Lease(ticket)
        self._next_token += 1
        for token, lease in list(self._leases.items()):
            if len(self._leases) > MOST_TOKENS_KEPT and not lease.holds_blocks:
                del self._leases[token]

    def _revoke(self, token: int) -> None:
        lease = self._leases[token]
        effects = self._machine.on_revoke(token)
        assert bool(effects) == lease.is_open
        lease.is_open = False
        self._cause = None
        self._do(effects)

    def _plausible(self, session: bytes) -> frames.Frame:
        rng = self._rng
        kind = rng.random()
        lease = self._choose_lease(session)
        if lease is None or kind < 0.01 or session not in self._sessions:
            lane = rng.choice(("zmq", "rdma", "rdma", "shm"))
            verify = rng.choice(("off", "commit", "block"))
            sender = self._sessions[session][0] if session in self._sessions else None
            if sender is None or rng.random() < 0.3:
                sender = SENDERS[session if rng.random() < 0.8 else rng.choice(SESSIONS)]
            return frames.Hello(sender, ME, LAYOUT, {lane: b""}, verify, rng.random() < 0.8)
        if rng.random() < 0.6 and lease.session is None:
            kind = 0.1
        token, generation = lease.ticket.lease_token, lease.ticket.generation
        if rng.random() < 0.04:
            generation += rng.choice((-1, 1))
        if kind < 0.15:
            return frames.Begin(token, generation)
        is_full = len(lease.written) == len(lease.ticket.target_block_ids) * LAYOUT.num_layers
        if kind < (0.3 if is_full else 0.84) and lease.session is not None:
            return self._data(session, lease, generation)
        if (kind < 0.88 and is_full and lease.session == session) or kind < 0.845:
            num_blocks = len(lease.ticket.target_block_ids)
            num_pieces = num_blocks * LAYOUT.num_layers - (rng.random() < 0.1)
            return frames.CommitFrame(token, generation, num_pieces, 0, num_blocks * 4, 7, ())
        if kind < 0.94:
            return frames.Abort(token, generation)
        return frames.Ping((token,))

    def _choose_lease(self, session: bytes) -> _Lease | None:
        """Return mostly a lease that this session has begun, or that no session has."""
        rng = self._rng
        leases = list(self._leases.values())
        if rng.random() < 0.9:
            mine = [one for one in leases if one.is_open and one.session in (session, None)]
            leases = mine or leases
        return rng.choice(leases) if leases else None

    def _data(self, session: bytes, lease: _Lease, generation: int) -> frames.Data:
        rng = self._rng
        count = len(lease.ticket.target_block_ids)
        ordinals = rng.sample(range(count + (rng.random() < 0.03)), rng.randrange(1, count + 1))
        lane = self._sessions[session][1]
        size = len(ordinals)
        has_sums = self._machine_verifies_blocks(session) != (rng.random() < 0.01)
        sums = bytes(size * 2 * frames.SUM_BYTES) if has_sums else b""
        return frames.Data(
            seq=self._seqs.get(session, 0) + (rng.random() < 0.003),
            lease_token=lease.ticket.lease_token,
            generation=generation,
            layer=rng.randrange(LAYOUT.num_layers + (rng.random() < 0.03)),
            ordinals=tuple(ordinals),
            runs=(size,) if lane == "zmq" else (),
            source_blocks=tuple(range(size)) if lane == "shm" else (),
            sums=sums,
        )

    def _machine_verifies_blocks(self, session: bytes) -> bool:
        """Return whether WELCOME told the sender to verify blocks."""
        return self._verify[session] == "block"

    def _sizes(self, frame: frames.Frame) -> list[int]:
        if not isinstance(frame, frames.Data):
            return [1] if self._rng.random() < 0.002 else []
        sizes = [count * LAYOUT.piece_bytes for count in frame.runs for _ in "kv"]
        return sizes if self._rng.random() < 0.99 else [*sizes, 1]

    def _give(self, session: bytes, frame: frames.Frame, sizes: list[int]) -> None:
        self._cause = (session, frame)
        if isinstance(frame, frames.Data) and session in self._sessions and sizes is not None:
            self._seqs[session] = self._seqs.get(session, 0) + 1
        self._note_begin(session, frame, sizes)
        effects = self._machine.on_frame(session, frame, sizes, self._now_s)
        for effect in effects:
            if isinstance(effect, Write):
                self._write(effect)
        self._do(effects)

    def _note_begin(self, session: bytes, frame: frames.Frame, sizes: list[int]) -> None:
        """Record which session may write from now on, by the protocol."""
        if not isinstance(frame, frames.Begin) or session not in self._sessions or sizes:
            return
        lease = self._leases.get(frame.lease_token)
        sender, lane = self._sessions[session]
        if (
            lease is None
            or not lease.is_open
            or lease.ticket.generation != frame.generation
            or lease.sender not in (None, sender)
        ):
            return
        if lease.is_one_sided and lease.session != session:
            return  # It must fail: `_emit` sees to that.
        lease.sender, lease.session, lease.is_one_sided = sender, session, lane == "rdma"
        lease.known = None

    # -- what the machine may do ------------------------------------------------------------------

    def _write(self, write: Write) -> None:
        assert self._cause is not None
        session, frame = self._cause
        assert isinstance(frame, frames.Data)
        assert frame is write.data
        lease = self._leases[frame.lease_token]
        assert lease.is_open, "a write into a landing that ended"
        assert frame.generation == lease.ticket.generation, "a wrong generation"
        assert lease.session == session == write.session, "a write by a stranger"
        assert session in self._sessions
        assert frame.layer < LAYOUT.num_layers
        wanted = tuple(lease.ticket.target_block_ids[ordinal] for ordinal in frame.ordinals)
        assert tuple(write.target_blocks.tolist()) == wanted
        self.counts["writes"] += 1
        chance = self._rng.random()
        if chance < 0.03:
            self._revoke(frame.lease_token)
            assert not self._machine.may_write(write)
            if chance < 0.015:
                self._do(self._machine.on_corrupt(write, set(frame.ordinals), "late"))
            else:
                self._do(self._machine.on_written(write))
        elif chance < 0.05:
            damaged = {ordinal for ordinal in frame.ordinals if self._rng.random() < 0.6}
            good = {(frame.layer, one) for one in frame.ordinals if one not in damaged}
            lease.written |= good
            lease.written -= {(frame.layer, ordinal) for ordinal in damaged}
            self._do(self._machine.on_corrupt(write, damaged, "bad"))
        else:
            assert self._machine.may_write(write)
            lease.written |= {(frame.layer, ordinal) for ordinal in frame.ordinals}
            self._do(self._machine.on_written(write))

    def _do(self, effects: Iterable[ReceiverEffect]) -> None:
        for effect in effects:
            match effect:
                case OpenLane(session, offers):
                    self._open(session, offers)
                case CloseLane(session):
                    self._note_end(session)
                    del self._sessions[session]
                    self._seqs.pop(session, None)
                case SendBack(session, frames.Welcome(verify=verify, lane_reply=reply)):
                    self._verify[session] = verify
                    self._told[session] = reply
                case SendBack(session, frames.Failed(token, generation)):
                    if self._rng.random() < 0.8:
                        self._due.append((session, frames.Abort(token, generation)))
                case SendBack(session, frames.Begun(token, generation)):
                    lease = self._leases[token]
                    assert lease.is_open
                    assert (lease.session, lease.ticket.generation) == (session, generation)
                case MoveSlab(_, slab):
                    assert self._newest[slab] == self._oldest[slab], "two moves at once"
                    self._newest[slab] += 1
                    self._do(self._machine.on_moved("rdma", self._lane_reply(), self._now_s))
                case Fence(_, slab):
                    self._fence(slab)
                case Emit(event):
                    self._emit(event)

    def _open(self, session: bytes, offers: Iterable[str]) -> None:
        assert self._cause is not None
        hello = self._cause[1]
        assert isinstance(hello, frames.Hello)
        lane = next((lane for lane in ("shm", "rdma", "zmq") if lane in offers), "")
        if lane:
            self._sessions[session] = (hello.sender, lane)
        self._do(self._machine.on_lane(session, lane, self._lane_reply(), offers))

    def _lane_reply(self) -> bytes:
        return b"".join(number.to_bytes(4) for number in self._newest)

    def _note_end(self, session: bytes) -> None:
        for lease in self._leases.values():
            if lease.session == session and lease.known is None:
                lease.known = self._told[session]

    def _fence(self, slab: int) -> None:
        self.counts["fences"] += 1
        self._oldest[slab] += 1
        assert self._newest[slab] == self._oldest[slab], "a fence without a move"
        for session, (_, lane) in self._sessions.items():
            known = _number_of(slab, self._told[session])
            assert lane != "rdma" or known == self._newest[slab], "a sender was not told"
        self._do(self._machine.on_fenced(self._now_s))

    def _emit(self, event: object) -> None:
        match event:
            case Landed(token):
                lease = self._leases[token]
                assert lease.is_open
                assert lease.holds_blocks
                count = len(lease.ticket.target_block_ids)
                assert len(lease.written) == count * LAYOUT.num_layers
                lease.is_open, lease.is_landed = False, True
                self.counts["landed"] += 1
            case LandingFailed(token):
                assert self._leases[token].is_open
                self._leases[token].is_open = False
                self.counts["failed"] += 1
            case Released(token):
                lease = self._leases[token]
                assert not lease.is_open
                assert lease.holds_blocks, "released twice, or after it landed"
                assert not lease.is_one_sided or self._is_quiet(lease)
                lease.is_released = True
                self.counts["released"] += 1

    def _is_quiet(self, lease: _Lease) -> bool:
        """Return whether the sender reported its end where it writes, or was fenced afterwards."""
        known = lease.known
        if known is not None and all(_number_of(s, known) < self._oldest[s] for s in lease.slabs):
            return True
        abort = frames.Abort(lease.ticket.lease_token, lease.ticket.generation)
        return self._cause == (lease.session, abort)

    def check_bounds(self) -> None:
        machine = self._machine
        assert machine.num_sessions <= LIMITS.max_sessions
        assert machine.num_sessions == len(self._sessions)
        assert machine.num_landings == sum(lease.is_open for lease in self._leases.values())
        assert machine.num_quarantined_blocks == sum(
            len(lease.ticket.target_block_ids)
            for lease in self._leases.values()
            if lease.holds_blocks and not lease.is_open
        )


def _number_of(slab: int, lane_reply: bytes) -> int:
    """Return the number of a slab's address in a reply of the lane."""
    return int.from_bytes(lane_reply[4 * slab : 4 * slab + 4])
