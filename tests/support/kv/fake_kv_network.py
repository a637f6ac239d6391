"""KV connectors joined in memory, every frame under the test's control.

A frame waits in `frames` until the test delivers, drops, repeats or reorders it. A piece is read
from the sender's pool, or from its host memory behind that, when it is delivered, not when it was
pushed, and written into the receiver's pool: a source block that is reused too early, or a target
block that is given away while a landing is open, changes bytes. Frames that outlive their transfer
keep the bytes of its last moment.

Lost frames are sent again by `send_again`; `on_time` ends what is past its deadline.

Where `is_one_sided`, pieces are written by the sender: whenever one is delivered, whatever its
source holds by then is written to its target block, and the receiver is not asked. The blocks of a
landing whose sender did not give up wait for its abort, which travels behind its pieces, or for the
test to call `FakeConnector.fence`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from common.errors import HandoffFailed
from common.ids import Incarnation
from common.observing.clock import Clock
from kv_transfer.contract import (
    Commit,
    GivenUp,
    Landed,
    LandingFailed,
    OnEvent,
    Released,
    Ticket,
    TransferEnded,
)
from kv_transfer.sending.transfer_errors import TransferAborted

Piece = tuple[int, int]
"""Layer and ordinal."""


@dataclass(eq=False, slots=True)
class Frame:
    """One message between two connectors. Kinds: open, piece, commit, abort, landed, failed."""

    kind: str
    sender: Incarnation
    receiver: Incarnation
    lease_token: int
    generation: int = 0
    piece: Piece = (0, 0)
    source_block: int = 0
    target_block: int = 0
    data: np.ndarray | None = None
    commit: Commit | None = None
    reason: str = ""
    num_blocks: int = 0
    """So many of the ticket's blocks a commit is for, the first ones."""


@dataclass(slots=True)
class _Transfer:
    ticket: Ticket
    deadline_at_s: float
    pieces: dict[Piece, int] = field(default_factory=dict)
    pushed: dict[Piece, np.ndarray] = field(default_factory=dict)
    """What each piece held when it was pushed."""
    commit: Commit | None = None
    is_aborting: bool = False


@dataclass(slots=True)
class _Landing:
    ticket: Ticket
    sender_deadline_s: float
    heard_at_s: float
    sender: Incarnation | None = None
    missing: set[Piece] = field(default_factory=set)
    commit: Commit | None = None


class FakeConnector:
    """One node's end; implements `kv_transfer.contract.KVConnector`."""

    endpoint = "fake"

    def __init__(
        self,
        network: FakeKVNetwork,
        node: Incarnation,
        pool: np.ndarray,
        on_event: OnEvent,
        host: np.ndarray | None = None,
    ) -> None:
        self.network = network
        self.node = node
        self.pool, self.host = pool, host
        self.on_event = on_event
        self.transfers: dict[int, _Transfer] = {}
        self.landings: dict[int, _Landing] = {}
        self.quarantined: dict[int, Ticket] = {}
        self.was_expected: set[int] = set()
        self.was_landed: set[int] = set()
        self.was_begun: set[int] = set()
        """Landings whose senders may write into them, where the senders write."""

    # --- receiving ----------------------------------------------------------------------------

    def expect(self, ticket: Ticket, *, sender_deadline_s: float) -> None:
        if ticket.lease_token in self.was_expected:
            raise ValueError(f"lease {ticket.lease_token} was open already")
        blocks = ticket.target_block_ids
        held = [*(one.ticket for one in self.landings.values()), *self.quarantined.values()]
        taken = {b for other in held for b in other.target_block_ids}
        if not blocks or len(set(blocks)) != len(blocks) or taken & set(blocks):
            raise ValueError(f"target blocks {blocks}: none, twice, or landed on already")
        self.was_expected.add(ticket.lease_token)
        pieces = {(layer, i) for layer in range(self.pool.shape[0]) for i in range(len(blocks))}
        self.landings[ticket.lease_token] = _Landing(
            ticket, sender_deadline_s, self.network.clock.now_s(), missing=pieces
        )

    def revoke(self, lease_token: int) -> None:
        landing = self.landings.get(lease_token)
        if landing is not None:
            self._close_landing(landing, "the lease was revoked", is_sender_done=False)

    def receive(self, frame: Frame) -> None:
        """Handle a frame that arrived."""
        if frame.kind in ("landed", "failed"):
            self._on_answer(frame)
            return
        if frame.lease_token in self.landings:
            self.was_begun.add(frame.lease_token)
        if frame.kind == "piece" and self.network.is_one_sided:
            # Nothing is written before the sender knows that its landing is open.
            if frame.lease_token in self.was_begun:
                self._write(frame)
            if frame.lease_token not in self.landings:
                return
        elif frame.kind == "abort" and frame.lease_token in self.quarantined:
            self.fence(frame.lease_token)
        landing = self.landings.get(frame.lease_token)
        if landing is None or landing.ticket.generation != frame.generation:
            kind = "landed" if frame.lease_token in self.was_landed else "failed"
            self._send(kind, frame.sender, frame.lease_token, reason="no such landing")
            return
        landing.sender = frame.sender
        landing.heard_at_s = self.network.clock.now_s()
        if frame.kind == "piece":
            assert landing.ticket.target_block_ids[frame.piece[1]] == frame.target_block
            self._write(frame)
            landing.missing.discard(frame.piece)
        elif frame.kind == "commit":
            landing.commit = frame.commit
            if landing.ticket.may_be_short:
                landing.missing = {one for one in landing.missing if one[1] < frame.num_blocks}
        elif frame.kind == "abort":
            self._fail_landing(landing, "the sender gave up", is_sender_done=True)
            return
        self._finish_landing(landing)

    def _write(self, frame: Frame) -> None:
        assert frame.data is not None
        self.pool[frame.piece[0], :, frame.target_block] = frame.data

    def _finish_landing(self, landing: _Landing) -> None:
        if landing.commit is None or landing.missing:
            return
        token = landing.ticket.lease_token
        assert landing.sender is not None
        del self.landings[token]
        self.was_landed.add(token)
        self._send("landed", landing.sender, token)
        self.on_event(Landed(token, landing.commit))

    def fence(self, lease_token: int) -> None:
        """Fence a landing's blocks: frames still in flight to them are lost."""
        del self.quarantined[lease_token]
        self.network.frames = [
            frame
            for frame in self.network.frames
            if frame.kind != "piece" or frame.lease_token != lease_token
        ]
        self.on_event(Released(lease_token))

    def _fail_landing(
        self, landing: _Landing, reason: str, *, is_sender_done: bool = False
    ) -> None:
        error = GivenUp(reason) if is_sender_done else HandoffFailed(reason)
        self.on_event(LandingFailed(landing.ticket.lease_token, error))
        self._close_landing(landing, reason, is_sender_done=is_sender_done)

    def _close_landing(self, landing: _Landing, reason: str, *, is_sender_done: bool) -> None:
        token = landing.ticket.lease_token
        del self.landings[token]
        if landing.sender is not None:
            self._send("failed", landing.sender, token, reason=reason)
        if self.network.is_one_sided and landing.sender is not None and not is_sender_done:
            self.quarantined[token] = landing.ticket
        else:
            self.on_event(Released(token))

    # --- sending ------------------------------------------------------------------------------

    def open(self, ticket: Ticket, *, deadline_s: float, priority: int = 0) -> None:
        if ticket.lease_token in self.transfers:
            raise ValueError(f"lease {ticket.lease_token} is open already")
        transfer = _Transfer(ticket, self.network.clock.now_s() + deadline_s)
        self.transfers[ticket.lease_token] = transfer
        self._send_of(transfer, "open")

    def push(
        self, lease_token: int, *, layer: int, ordinals: Sequence[int], source_blocks: Sequence[int]
    ) -> None:
        transfer = self.transfers.get(lease_token)
        if transfer is None or transfer.is_aborting:
            return
        if transfer.commit is not None:
            raise ValueError("push after commit")
        for ordinal, block in zip(ordinals, source_blocks, strict=True):
            if not 0 <= ordinal < len(transfer.ticket.target_block_ids):
                raise ValueError(f"ordinal {ordinal} is not in the ticket")
            if (layer, ordinal) in transfer.pieces:
                raise ValueError(f"piece {(layer, ordinal)} was pushed already")
            transfer.pieces[layer, ordinal] = block
            transfer.pushed[layer, ordinal] = self.content_of(layer, block).copy()
            self._send_of(transfer, "piece", piece=(layer, ordinal), source_block=block)

    def commit(self, lease_token: int, commit: Commit) -> None:
        transfer = self.transfers.get(lease_token)
        if transfer is None or transfer.is_aborting:
            return
        wanted = self.pool.shape[0] * len(transfer.ticket.target_block_ids)
        is_short = transfer.ticket.may_be_short and 0 < len(transfer.pieces) < wanted
        if transfer.commit is not None or not (is_short or len(transfer.pieces) == wanted):
            raise ValueError(f"commit after {len(transfer.pieces)} of {wanted} pieces, or twice")
        transfer.commit = commit
        self._send_of(transfer, "commit", commit=commit)

    def abort(self, lease_token: int) -> None:
        transfer = self.transfers.get(lease_token)
        if transfer is not None and not transfer.is_aborting:
            transfer.is_aborting = True
            self._send_of(transfer, "abort")

    def close(self) -> None:
        for token in list(self.transfers):
            self._end_transfer(token, "the connector was closed")
        for landing in list(self.landings.values()):
            self._fail_landing(landing, "the connector was closed")
        for token in list(self.quarantined):
            self.fence(token)

    def content_of(self, layer: int, block: int) -> np.ndarray:
        """Return a piece; blocks of host memory are numbered behind those of the pool."""
        num_blocks = self.pool.shape[2]
        if block < num_blocks:
            return self.pool[layer, :, block]
        assert self.host is not None, f"block {block} of {num_blocks}"
        return self.host[layer, :, block - num_blocks]

    def check_pushed(self) -> None:
        """Raise `AssertionError` when a piece has changed since it was pushed."""
        for token, transfer in self.transfers.items():
            for (layer, ordinal), pushed in transfer.pushed.items():
                block = transfer.pieces[layer, ordinal]
                is_same = np.array_equal(self.content_of(layer, block), pushed)
                assert is_same, f"lease {token}: layer {layer} of block {block} changed"

    def _on_answer(self, frame: Frame) -> None:
        transfer = self.transfers.get(frame.lease_token)
        if transfer is None:
            return
        if frame.kind == "landed":
            self._end_transfer(frame.lease_token, None)
            return
        if self.network.is_one_sided and not transfer.is_aborting:
            self._send_of(transfer, "abort")
        is_given_up = transfer.is_aborting
        self._end_transfer(frame.lease_token, frame.reason, is_given_up=is_given_up)

    def _end_transfer(self, token: int, reason: str | None, *, is_given_up: bool = False) -> None:
        if not self.network.is_one_sided:
            self.network.keep_bytes_of(self, token)
        del self.transfers[token]
        kind = TransferAborted if is_given_up else HandoffFailed
        self.on_event(TransferEnded(token, None if reason is None else kind(reason)))

    # --- time and loss ------------------------------------------------------------------------

    def send_again(self) -> None:
        """Send again everything that was not answered yet."""
        for transfer in self.transfers.values():
            if transfer.is_aborting:
                self._send_of(transfer, "abort")
                continue
            self._send_of(transfer, "open")
            for piece, block in transfer.pieces.items() if not self.network.is_one_sided else ():
                self._send_of(transfer, "piece", piece=piece, source_block=block)
            if transfer.commit is not None:
                self._send_of(transfer, "commit", commit=transfer.commit)

    def on_time(self) -> None:
        """End everything past its deadline."""
        now_s = self.network.clock.now_s()
        for token, transfer in list(self.transfers.items()):
            if now_s >= transfer.deadline_at_s:
                self._send_of(transfer, "abort")
                self._end_transfer(token, "not acknowledged in time")
        for landing in list(self.landings.values()):
            if now_s >= landing.heard_at_s + landing.sender_deadline_s:
                self._fail_landing(landing, "nothing came in time")

    def on_peer_lost(self, peer: Incarnation) -> None:
        """Handle the permanent loss of the connection to `peer`."""
        for token, transfer in list(self.transfers.items()):
            if transfer.ticket.decode_node == peer:
                self._end_transfer(token, f"{peer} is gone")
        for landing in list(self.landings.values()):
            if landing.sender == peer:
                self._fail_landing(landing, f"{peer} is gone")

    # --- inside -------------------------------------------------------------------------------

    def _send_of(
        self,
        transfer: _Transfer,
        kind: str,
        *,
        piece: Piece = (0, 0),
        source_block: int = 0,
        commit: Commit | None = None,
    ) -> None:
        ticket = transfer.ticket
        self.network.frames.append(
            Frame(
                kind,
                self.node,
                ticket.decode_node,
                ticket.lease_token,
                ticket.generation,
                piece=piece,
                source_block=source_block,
                target_block=ticket.target_block_ids[piece[1]],
                commit=commit,
                num_blocks=1 + max((one for _, one in transfer.pieces), default=-1),
            )
        )

    def _send(self, kind: str, to: Incarnation, lease_token: int, reason: str = "") -> None:
        self.network.frames.append(Frame(kind, self.node, to, lease_token, reason=reason))


class FakeKVNetwork:
    """All connectors of a simulation, and the frames between them."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.is_one_sided = False
        self.frames: list[Frame] = []
        self.connectors: dict[Incarnation, FakeConnector] = {}
        self.num_delivered = 0

    def join(
        self,
        node: Incarnation,
        pool: np.ndarray,
        on_event: OnEvent,
        host: np.ndarray | None = None,
    ) -> FakeConnector:
        """Make a connector over `pool`, `[num_layers, 2, num_blocks, piece_bytes]`, which also
        sends from `host`."""
        connector = FakeConnector(self, node, pool, on_event, host)
        self.connectors[node] = connector
        return connector

    def deliver(self, frame: Frame) -> None:
        """Deliver a frame; frames to or from dead nodes are lost."""
        self.frames.remove(frame)
        receiver = self.connectors.get(frame.receiver)
        if receiver is None or frame.sender not in self.connectors:
            return
        self._read(frame)
        self.num_delivered += 1
        receiver.receive(frame)

    def deliver_all(self) -> None:
        """Deliver all frames, in order, until none is left."""
        while self.frames:
            self.deliver(self.frames[0])

    def drop(self, kind: str) -> int:
        """Lose all frames of a kind that are in flight; return how many."""
        lost = [frame for frame in self.frames if frame.kind == kind]
        self.frames = [frame for frame in self.frames if frame.kind != kind]
        return len(lost)

    def duplicate(self, frame: Frame) -> None:
        """Deliver the frame once more, after everything that is in flight now."""
        self._read(frame)
        copy = Frame(
            frame.kind,
            frame.sender,
            frame.receiver,
            frame.lease_token,
            frame.generation,
            frame.piece,
            frame.source_block,
            frame.target_block,
            frame.data,
            frame.commit,
            frame.reason,
            frame.num_blocks,
        )
        self.frames.append(copy)

    def kill(self, node: Incarnation) -> None:
        """Kill a process: it emits no events, and its frames are lost."""
        del self.connectors[node]

    def keep_bytes_of(self, connector: FakeConnector, token: int) -> None:
        """Copy the bytes of a transfer's frames, since its source blocks may be reused."""
        for frame in self.frames:
            if frame.lease_token == token and frame.sender == connector.node:
                self._read(frame)

    def send_again(self) -> None:
        """Make every sender repeat what was not answered."""
        for connector in self.connectors.values():
            connector.send_again()

    def on_time(self) -> None:
        """Make every connector check the clock."""
        for connector in self.connectors.values():
            connector.on_time()

    def _read(self, frame: Frame) -> None:
        if frame.kind == "piece" and frame.data is None:
            sender = self.connectors[frame.sender]
            frame.data = sender.content_of(frame.piece[0], frame.source_block).copy()
