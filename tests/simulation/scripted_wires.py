"""The simulator's KV plane, of which nothing happens before the test says so.

Each node has the real sender and receiver. What a node asks of them waits in `frames` (open, piece,
commit, abort), as in the queue of a connector's thread, and so does what ends a transfer (landed,
failed) on its way back. Everything else between two nodes takes no time. A piece is read from its
pool when it is delivered, as late as a connector may; `check_pushed` finds what has changed since.

Where `is_one_sided`, senders write into the pools of others, whatever became of the landing. Its
blocks wait for the sender's word, or for the test to call `fence`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop
from typing import Any

import numpy as np

from common.errors import HandoffFailed
from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from engine.core.blocks.block_pool import BlockPool
from kv_transfer.contract import (
    Commit,
    ConnectorFailed,
    KVEvent,
    OnEvent,
    Ticket,
    TransferEnded,
)
from kv_transfer.receiving.effects import MoveSlab
from kv_transfer.receiving.landing import Landing
from kv_transfer.receiving.slab_fences import NO_LEASE
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.handshake import HandoffStep
from kv_transfer.shared.lanes import ONE_SIDED_LANES
from kv_transfer.shared.limits import Limits
from kv_transfer.wire import frames
from simulator.faults.hosts import Paths, ProcessClock
from simulator.faults.kv.end import KVEnd
from simulator.faults.kv.wires import INLINE_LANE, KVWires
from simulator.timeline import Timeline
from tests.support.engine.hash_runner import HashRunner

Piece = tuple[int, int]
"""Layer and ordinal."""
_WRITTEN_LANE = "rdma"
_ANSWERS = {frames.Committed: "landed", frames.Failed: "failed", frames.Aborted: "failed"}


class ScriptedTimeline(Timeline):
    """Time that a test moves."""

    def advance(self, by_s: float) -> None:
        """Move on; what is due by then does not happen yet."""
        self.present_s += by_s

    def run_due(self) -> None:
        """Handle what is due now."""
        while self._events and self._events[0][0] <= self.present_s:
            _, _, _, call = heappop(self._events)
            call()

    def pass_time(self, by_s: float) -> None:
        """Move on from one event to the next, and handle each."""
        end_s = self.present_s + by_s
        while self._events and self._events[0][0] <= end_s:
            self.present_s = max(self.present_s, self._events[0][0])
            self.run_due()
        self.present_s = end_s


@dataclass(eq=False, slots=True)
class Frame:
    """A call, on its way to the connector, or an answer, on its way to the sender of KV."""

    kind: str
    sender: Incarnation
    receiver: Incarnation
    lease_token: int
    perform: Callable[[Frame], object]
    piece: Piece = (0, 0)
    commit: Commit | None = None


class RunnerMemory:
    """What transfers read and write of a runner's memory."""

    def __init__(self, runner: HashRunner) -> None:
        self._runner = runner
        self.num_host_blocks = runner.num_host_blocks

    def read(self, layer: int, blocks: Sequence[int]) -> list[bytes]:
        """Return each block's bytes; blocks of host memory are numbered behind the pool's."""
        pool, num_blocks = self._runner.kv_bytes, self._runner.num_blocks
        if blocks[0] >= num_blocks:
            pool, blocks = self._runner.host_kv, [block - num_blocks for block in blocks]
        planes: np.ndarray = pool[layer][:, list(blocks)]
        return [plane.tobytes() for plane in planes.transpose(1, 0, 2)]

    def put(self, layer: int, blocks: Sequence[int], values: Sequence[bytes]) -> None:
        """Overwrite blocks."""
        kv_bytes = np.frombuffer(b"".join(values), self._runner.kv_bytes.dtype)
        planes = kv_bytes.reshape(len(blocks), 2, -1).transpose(1, 0, 2)
        self._runner.kv_bytes[layer][:, list(blocks)] = planes


class ScriptedWires(KVWires):
    """The connectors of all nodes, and what waits between them."""

    def __init__(self, clock: ScriptedTimeline) -> None:
        super().__init__(clock, Paths(), 0.0)
        self._clock = clock
        self.frames: list[Frame] = []
        self.connectors: dict[Incarnation, ScriptedEnd] = {}
        self.num_delivered = 0

    @property
    def is_one_sided(self) -> bool:
        """Whether senders write by themselves; to be set before anything is sent."""
        return self.lane in ONE_SIDED_LANES

    @is_one_sided.setter
    def is_one_sided(self, is_one_sided: bool) -> None:
        self.lane = _WRITTEN_LANE if is_one_sided else INLINE_LANE

    def next_frames(self) -> list[Frame]:
        """Return the frames of which each may come next: of one lease they keep their order."""
        first = {(frame.lease_token, frame.sender): frame for frame in reversed(self.frames)}
        return list(first.values())

    def deliver(self, frame: Frame) -> None:
        """Deliver a frame, and what follows from it at once; what a dead node sent is lost."""
        self.frames.remove(frame)
        if frame.sender in self.connectors:
            self.num_delivered += 1
            frame.perform(frame)
            self._clock.run_due()

    def deliver_all(self) -> None:
        """Deliver all frames, in order, until none is left."""
        while self.frames:
            self.deliver(self.frames[0])

    def cut(self, one: Incarnation, other: Incarnation) -> None:
        """Let nothing pass between two nodes any more."""
        self._paths.cut(one.node_id, other.node_id)
        self._paths.cut(other.node_id, one.node_id)

    def kill(self, node: Incarnation) -> None:
        """Kill a process, with what it has said and nobody has read."""
        end = self.connectors.pop(node)
        end.clock.kill()
        self.leave(end)
        self.frames = [frame for frame in self.frames if frame.sender != node]

    def send_back(self, session: bytes, frame: frames.Frame) -> None:
        """Send a frame back; one that ends a transfer waits."""
        kind = _ANSWERS.get(type(frame))
        if kind is None or frame.lease_token == NO_LEASE:  # type: ignore[union-attr]
            super().send_back(session, frame)
            return
        token, pass_on = frame.lease_token, super().send_back  # type: ignore[union-attr]
        for one in self._connections:
            if one.session == session:
                ends = one.peer.incarnation, one.source.me
                self.frames.append(Frame(kind, *ends, token, lambda _: pass_on(session, frame)))


@dataclass(slots=True)
class Transfer:
    """What a node has asked for, until it hears that it has ended."""

    ticket: Ticket
    pieces: dict[Piece, int] = field(default_factory=dict)
    pushed: dict[Piece, list[bytes]] = field(default_factory=dict)
    """What each piece held when it was pushed."""
    is_aborting: bool = False


class ScriptedEnd(KVEnd):
    """One node's connector."""

    def __init__(
        self,
        me: Incarnation,
        clock: ProcessClock,
        wires: ScriptedWires,
        layout: KVLayout,
        runner: HashRunner,
        pool: BlockPool,
        on_event: OnEvent,
    ) -> None:
        self.transfers: dict[int, Transfer] = {}
        self._tickets: dict[int, Ticket] = {}
        self._tell = on_event
        self._scripted = wires
        self._moving: MoveSlab | None = None
        self._pieces = RunnerMemory(runner)
        memory: Any = self._pieces
        super().__init__(me, clock, wires, layout, memory, pool, Limits(), self._note)
        wires.connectors[me] = self

    @property
    def landings(self) -> dict[int, Landing]:
        """The open landings by lease token."""
        return {landing.token: landing for landing in self.receiver.landings.all()}

    @property
    def quarantined(self) -> dict[int, Ticket]:
        """The tickets of landings that are over, and into which a sender may still write."""
        return {token: self._tickets[token] for token in self.receiver.quarantined}

    # The contract.

    def expect(self, ticket: Ticket, *, sender_deadline_s: float) -> None:
        super().expect(ticket, sender_deadline_s=sender_deadline_s)
        self._tickets[ticket.lease_token] = ticket

    def open(self, ticket: Ticket, *, deadline_s: float, priority: int = 0) -> None:
        assert ticket.lease_token not in self.transfers
        ends_at_s = self.clock.now_s() + deadline_s
        self.transfers[ticket.lease_token] = Transfer(ticket)

        def perform(frame: Frame) -> None:
            left_s = ends_at_s - self.clock.now_s()
            super(ScriptedEnd, self).open(ticket, deadline_s=left_s, priority=priority)

        self._wait("open", ticket, perform)

    def push(
        self, lease_token: int, *, layer: int, ordinals: Sequence[int], source_blocks: Sequence[int]
    ) -> None:
        transfer = self.transfers.get(lease_token)
        if transfer is None or transfer.is_aborting:
            return
        for ordinal, block in zip(ordinals, source_blocks, strict=True):
            assert (layer, ordinal) not in transfer.pieces, "a piece is pushed twice"
            transfer.pieces[layer, ordinal] = block
            transfer.pushed[layer, ordinal] = self._pieces.read(layer, [block])
            self._wait("piece", transfer.ticket, self._push_one, piece=(layer, ordinal))

    def _push_one(self, frame: Frame) -> None:
        transfer, (layer, ordinal) = self.transfers.get(frame.lease_token), frame.piece
        if transfer is not None:
            block = transfer.pieces[frame.piece]
            token = frame.lease_token
            super().push(token, layer=layer, ordinals=[ordinal], source_blocks=[block])

    def commit(self, lease_token: int, commit: Commit) -> None:
        transfer = self.transfers.get(lease_token)
        if transfer is not None and not transfer.is_aborting:
            self._wait("commit", transfer.ticket, self._commit_one, commit=commit)

    def _commit_one(self, frame: Frame) -> None:
        assert frame.commit is not None
        super().commit(frame.lease_token, frame.commit)

    def abort(self, lease_token: int) -> None:
        transfer = self.transfers.get(lease_token)
        if transfer is not None and not transfer.is_aborting:
            transfer.is_aborting = True
            self._wait("abort", transfer.ticket, lambda _: KVEnd.abort(self, lease_token))

    def close(self) -> None:
        """End everything, also what was asked for and not begun."""
        for token in list(self.transfers):
            self._end_unopened(token, HandoffFailed("the connector was closed"))
        super().close()

    # What a test does.

    def fence(self, lease_token: int) -> None:
        """Let nobody write the blocks of a landing that is over: its sender hears of that, and says
        that it has stopped; or, where its connection is over, the pool moves."""
        name, run_due = self.receiver.quarantined.get(lease_token), self._scripted._clock.run_due
        if name is None:
            return  # the pool has moved for another one
        if self._is_heard(name):
            generation = self._tickets[lease_token].generation
            over = frames.Failed(lease_token, generation, HandoffFailed.code, "it is over")
            KVWires.send_back(self._scripted, name, over)
            run_due()
        if lease_token not in self.receiver.quarantined or self._is_heard(name):
            return
        self.receiver.sessions.drop(name)
        if self._moving is None:
            self.perform(self.receiver.on_tick(self.clock.now_s()))
        moving, self._moving = self._moving, None
        if moving is not None:  # otherwise it moves, and waits for others that write
            super()._move(moving)
        run_due()

    def _is_heard(self, name: bytes) -> bool:
        session = self.receiver.sessions.get(name)
        return session is not None and session.sender in self._scripted.connectors

    def on_peer_lost(self, peer: Incarnation) -> None:
        """Take the permanent loss of the connections from and to `peer`."""
        error, now_s = HandoffFailed(f"{peer} is gone"), self.clock.now_s()
        for token, transfer in list(self.transfers.items()):
            if transfer.ticket.decode_node == peer:
                self._end_unopened(token, error)
        self.perform(self.sender.on_peer_failed(Peer(peer.node_id, peer), error, now_s))
        self.lose_sender(peer)

    def lose_sender(self, peer: Incarnation) -> None:
        """Take the loss of the connection from `peer`: its landings fail."""
        error = HandoffFailed(f"{peer} is gone")
        for session in self.receiver.sessions.all():
            if session.sender == peer:
                self.receiver.sessions.drop(session.id)
        self.perform(self.receiver.landings.fail_all(peer, HandoffStep.FAIL, error))

    def check_pushed(self) -> None:
        """Raise `AssertionError` when a piece has changed since it was pushed."""
        for token, transfer in self.transfers.items():
            for (layer, ordinal), pushed in transfer.pushed.items():
                block = transfer.pieces[layer, ordinal]
                is_same = self._pieces.read(layer, [block]) == pushed
                assert is_same, f"lease {token}: layer {layer} of block {block} changed"

    # Inside.

    def _wait(
        self,
        kind: str,
        ticket: Ticket,
        perform: Callable[[Frame], object],
        *,
        piece: Piece = (0, 0),
        commit: Commit | None = None,
    ) -> None:
        ends = self.me, ticket.decode_node
        frame = Frame(kind, *ends, ticket.lease_token, perform, piece, commit)
        self._scripted.frames.append(frame)

    def _note(self, event: KVEvent | ConnectorFailed) -> None:
        if isinstance(event, TransferEnded):
            self.transfers.pop(event.lease_token, None)
        self._tell(event)

    def _end_unopened(self, token: int, error: HandoffFailed) -> None:
        if token not in self.sender.link_of:
            wires, me = self._scripted, self.me
            ours = [f for f in wires.frames if f.lease_token == token and f.sender == me]
            wires.frames = [frame for frame in wires.frames if frame not in ours]
            self._note(TransferEnded(token, error))

    def _move(self, move: MoveSlab) -> None:
        """Keep it for `fence`."""
        self._moving = move
