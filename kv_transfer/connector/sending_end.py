"""The sending half of a connector: its machine, its memory to read, its end of every lane."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from functools import partial
from typing import assert_never

import numpy as np

from common.errors import HandoffFailed, PeerProtocolError
from common.ids import Incarnation
from kv_transfer.connector.card_ring import OnCopied
from kv_transfer.connector.connector_parts import ConnectorParts
from kv_transfer.connector.fallbacks import Fallbacks
from kv_transfer.connector.frames_to_send import FramesToSend, FrameToSend
from kv_transfer.connector.queued_calls import QueuedCalls
from kv_transfer.connector.workers import Finish
from kv_transfer.contract import Ticket
from kv_transfer.lanes import pieces
from kv_transfer.lanes.lane import Broken, Lane, LaneFull, Payload
from kv_transfer.lanes.pieces import NO_SUMS
from kv_transfer.sending.effects import (
    Connect,
    Disconnect,
    PeerAnswers,
    PeerSilent,
    SayHello,
    SendChunk,
    SendToPeer,
    TakeLane,
)
from kv_transfer.sending.machine import Sender
from kv_transfer.shared.block_arrays import Blocks
from kv_transfer.shared.chunks import LayerChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.lanes import POOL_ONLY_LANES, RDMA_LANES, RING_ONLY_LANES
from kv_transfer.transport import Parts
from kv_transfer.wire import frames
from kv_transfer.wire.header_seal import DamagedHeader

logger = logging.getLogger("pdserve.kv_transfer")


class SendingEnd:
    """The sending half of a connector.

    Any thread may call `open` and the properties, and add to `calls`. These only queue calls of the
    machine, so that the thread which runs steps is hardly delayed. Everything else, with the
    machine, belongs to the connector's thread: `take_calls` makes these calls there, in their
    order. Effects go into the connector's queue.

    The workers read and hash the bytes of a frame. The frames of a connection are sent in order,
    each when it and all before it are ready.
    """

    def __init__(self, parts: ConnectorParts) -> None:
        self._memory = memory = parts.memory
        self._block_bytes = [layer.num_bytes for layer in parts.layout.layers]
        self._num_blocks = parts.num_blocks
        self.machine = Sender(
            parts.incarnation,
            parts.layout,
            parts.limits,
            parts.num_blocks,
            memory.num_host_blocks,
        )
        self._transport = parts.transport
        self._lanes = parts.lanes
        self._one_sided = parts.one_sided
        self._summing_late = parts.summing_late
        self._ring = parts.ring
        self._frames = FramesToSend(parts.ring, self.machine.is_sending)
        self._verify = parts.verify
        self._metrics = parts.metrics
        self._clock = parts.clock
        self._effects = parts.effects
        self._workers = parts.workers
        self.calls = QueuedCalls(self.machine, parts.transport.wake)
        # For what `open` checks; not held while the machine works.
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._lane_to: dict[Peer, Lane] = {}
        by_rdma = {name: lane for name, lane in parts.lanes.items() if name in RDMA_LANES}
        self._fallbacks = Fallbacks(by_rdma, parts.metrics)
        self.bytes_sent = 0

    @property
    def num_transfers(self) -> int:
        """The transfers whose end was not reported yet."""
        return len(self._open)

    @property
    def lane_names(self) -> dict[str, str]:
        """The lane to each connected decode node, by its id."""
        lanes = self._lane_to.copy()
        return {peer.incarnation.node_id: lane.name for peer, lane in lanes.items()}

    @property
    def unreachable(self) -> tuple[Incarnation, ...]:
        """The decode nodes that did not answer and are being tried again, the latest first."""
        return self.machine.unreachable

    # -- the contract ----------------------------------------------------------------------------

    def open(self, ticket: Ticket, deadline_s: float, priority: int) -> None:
        """Begin a transfer; `ValueError` on misuse and after `close`."""
        token, now_s = ticket.lease_token, self._clock.now_s()
        if not ticket.target_block_ids:
            raise ValueError(f"lease {token:#x} has no target block")
        with self._lock:
            if self.calls.is_closed:
                raise ValueError("the KV connector is closed")
            if token in self._open:
                raise ValueError(f"lease {token:#x} is open already")
            self._open.add(token)
            self._metrics.on_open(token, Peer(ticket.kv_endpoint, ticket.decode_node), now_s)
            self.calls.add(partial(self.machine.on_open, ticket, deadline_s, now_s, priority))

    def take_calls(self) -> None:
        """Make the queued calls."""
        while self.calls:
            self._effects.extend(self.calls.take_next())

    def on_ended(self, lease_token: int) -> None:
        """Forget a transfer whose end is being reported."""
        self._open.discard(lease_token)
        self._frames.on_ended(lease_token)

    # -- events of the network --------------------------------------------------------------------

    def on_link_lost(self, peer: Peer) -> None:
        self._effects.extend(self.machine.on_link_lost(peer, self._clock.now_s()))

    def on_no_connection(self, peer: Peer, error: HandoffFailed) -> None:
        self._give_up(peer, error)

    def on_refused(self, peer: Peer) -> None:
        self._effects.extend(self.machine.on_refused(peer, self._clock.now_s()))

    def on_answer(self, peer: Peer, parts: Parts) -> None:
        now_s = self._clock.now_s()
        try:
            frame = frames.decode_message(parts)
        except DamagedHeader as error:
            self._effects.extend(self.machine.on_damaged_header(peer, error, now_s))
            return
        except PeerProtocolError as error:
            self._give_up(peer, error)
            return
        if isinstance(frame, frames.Ack):
            self._metrics.on_acknowledged(peer, frame.consumed, now_s)
            self._frames.acknowledge(peer, frame.consumed)
        self._effects.extend(self.machine.on_frame(peer, frame, now_s))

    def take_written(self) -> None:
        """Send the headers whose bytes were written; report lanes that failed."""
        for lane in self._one_sided.values():
            for ready in lane.take_ready():
                if isinstance(ready, Broken):
                    self._metrics.on_fallback(lane.name, "write_failed")
                    self._lose_link(ready.peer)
                else:
                    self._send(ready.peer, ready.parts)

    def tick(self) -> None:
        for peer in self._fallbacks.take_offered_again():
            self._lose_link(peer)
        self._effects.extend(self.machine.on_tick(self._clock.now_s()))

    def next_deadline_s(self) -> float | None:
        return self.machine.next_deadline_s()

    def close(self) -> None:
        with self._lock:
            self.calls.close()
        while self.calls:
            try:
                self._effects.extend(self.calls.take_next())
            except Exception:  # What is open ends in any case.
                logger.exception("a call of the KV connector failed while it was closed")
        self._effects.extend(self.machine.on_close(self._clock.now_s()))

    # -- effects ---------------------------------------------------------------------------------

    def perform(
        self, effect: Connect | Disconnect | SayHello | TakeLane | SendToPeer | SendChunk
    ) -> None:
        match effect:
            case Connect(peer):
                self._connect(peer)
            case Disconnect(peer):
                self._disconnect(peer)
            case SayHello(peer):
                self._say_hello(peer)
            case TakeLane(peer, lane, lane_reply):
                self._take_lane(peer, lane, lane_reply)
            case SendToPeer(peer, frame, is_behind_writes):
                self._send_in_order(peer, [memoryview(frames.encode(frame))], is_behind_writes)
            case SendChunk():
                self.send_chunk(effect)
            case _:
                assert_never(effect)

    def report(self, effect: PeerSilent | PeerAnswers) -> None:
        """Log that a decode node does not answer, at growing intervals, or that it does again."""
        match effect:
            case PeerSilent(peer, num_failures, pause_s):
                self._metrics.on_peer_silent()
                logger.warning(
                    "KV to %s: no answer, %d in a row; transfers to it are refused, "
                    "and it is tried again in %g s",
                    peer,
                    num_failures,
                    pause_s,
                )
            case PeerAnswers(peer):
                logger.info("KV to %s: it answers again", peer)

    def _connect(self, peer: Peer) -> None:
        self._metrics.on_connect(peer)
        try:
            self._transport.connect(peer)
        except HandoffFailed as error:
            self._give_up(peer, error)

    def _disconnect(self, peer: Peer) -> None:
        lane = self._lane_to.pop(peer, None)
        self._frames.drop(peer, self._open)
        self._fallbacks.forget(peer)
        if lane is not None:
            lane.forget(peer)
        self._metrics.on_disconnect(peer)
        self._transport.disconnect(peer)

    def _say_hello(self, peer: Peer) -> None:
        offers = {
            name: offer
            for name, lane in self._lanes.items()
            if (offer := lane.offer(peer)) is not None
        }
        hello = self.machine.hello(peer, offers, self._verify)
        self._send(peer, [memoryview(frames.encode(hello))])

    def _take_lane(self, peer: Peer, name: str, reply: bytes) -> None:
        lane = self._lanes[name]
        try:
            lane.accept(peer, reply)
        except PeerProtocolError as error:
            self._give_up(peer, error)
        except HandoffFailed as error:
            logger.warning("lane %s to %s cannot be used: %s", name, peer, error)
            if not isinstance(error, LaneFull):  # It is counted when another one was agreed on.
                self._metrics.on_fallback(name, "unusable")
            self._lose_link(peer)
        else:
            self._lane_to[peer] = lane
            if not peer.channel:
                self._metrics.on_lane(peer, name)
                self._fallbacks.note(peer, name)

    def send_chunk(self, effect: SendChunk) -> None:
        """Queue a chunk on its connection: a worker reads and hashes it, then it is sent."""
        lane = self._lane_to.get(effect.peer)
        if lane is None:
            return  # The link broke in this turn: the chunk is sent again on the next one.
        frame = self._frames.add(effect, lane)
        is_in_pool = int(effect.chunk.source_blocks[0]) < self._num_blocks
        if not is_in_pool and lane.name in POOL_ONLY_LANES:
            self._effects.extend(self.machine.on_abort(effect.lease_token, self._clock.now_s()))
        summing = self._summing_late.get(lane.name)
        if not self.machine.is_sending(effect.lease_token):
            self._on_prepared(frame, Payload())
        elif summing is not None:
            finished = partial(self._on_late_payload, frame)
            summing.begin_payload(
                effect.chunk,
                lambda payload: self._workers.post(partial(finished, payload)),
                is_summed=effect.verify != "off",
            )
        elif self._ring is not None and (is_in_pool or lane.name in RING_ONLY_LANES):
            copy = self._ring.copy_out if is_in_pool else self._copy_out_of_host
            self._frames.copy_out(copy, frame, partial(self._on_copied_out, frame))
        else:
            if self._ring is not None:
                frame.chunk = _moved(effect.chunk, self._memory.num_pool_blocks - self._num_blocks)
            self._workers.run(lambda: self._prepare(frame))

    def _copy_out_of_host(
        self, layer: int, blocks: Blocks, slots: Blocks, on_copied: OnCopied
    ) -> None:
        """Copy blocks of host memory to slots of the ring, on a worker."""
        moved = blocks.astype(np.int64) + self._memory.num_pool_blocks - self._num_blocks

        def copy() -> Finish:
            host, placed = self._memory.place_blocks(moved.astype(np.uint32))
            for plane, ring in zip(
                host.planes(layer), self._memory.pool.planes(layer), strict=True
            ):
                ring[slots] = plane[placed]
            return partial(on_copied, None)

        self._workers.run(copy)

    def _on_late_payload(self, frame: FrameToSend, payload: Payload | HandoffFailed) -> None:
        """Send a chunk whose sums are known. Raises an error of the card: the node has to end."""
        if isinstance(payload, HandoffFailed):
            raise payload
        self._on_prepared(frame, payload)

    def _on_copied_out(
        self, frame: FrameToSend, is_in_slots: bool, error: HandoffFailed | None
    ) -> None:
        """Read and hash a chunk that is in its slots. Raises an error of the card, as above."""
        if error is not None:
            raise error
        if is_in_slots:
            self._workers.run(lambda: self._prepare(frame))
        else:
            self._on_prepared(frame, Payload())

    def _prepare(self, frame: FrameToSend) -> Finish:
        """Read and hash a chunk; runs on any thread."""
        is_summed = frame.effect.verify != "off"
        payload = frame.lane.payload(self._memory, frame.chunk, is_summed=is_summed)
        return partial(self._on_prepared, frame, payload)

    def _on_prepared(self, frame: FrameToSend, payload: Payload) -> None:
        """Send the frames of a connection that are ready, with this one."""
        for ready in self._frames.take_ready(frame, payload):
            self._send_prepared(ready)

    def _send_prepared(self, frame: FrameToSend) -> None:
        effect, lane, payload = frame.effect, frame.lane, frame.payload
        assert payload is not None
        if not self.machine.is_sending(effect.lease_token):
            self._frames.give_back(frame)
            self._send_without_bytes(lane, effect)
            return
        sums = self.sums_with_frame(effect, payload.sums)
        num_bytes = len(effect.chunk) * self._block_bytes[effect.chunk.layer]
        self._count(lane, effect, num_bytes)
        one_sided = self._one_sided.get(lane.name)
        if one_sided is not None:
            one_sided.write(effect.peer, effect.chunk, effect.target_blocks)
        if self._frames.on_sent(frame):
            effect = replace(effect, wants_ack=True)  # It frees the slots.
        parts = [_header(effect, payload, sums), *payload.parts]
        self._send_in_order(effect.peer, parts, is_behind_writes=True)

    def _send_without_bytes(self, lane: Lane, effect: SendChunk) -> None:
        """Send the header of a queued chunk whose transfer was aborted, after an ABORT.

        DATA frames are numbered, so the header cannot be left out. The ABORT lets the receiver drop
        it.
        """
        self._count(lane, effect, 0)
        abort = frames.Abort(effect.lease_token, effect.generation)
        told = memoryview(frames.encode(abort))
        self._send_in_order(effect.peer.main, [told], is_behind_writes=True)
        header = _header(effect, Payload(), NO_SUMS)
        self._send_in_order(effect.peer, [header], is_behind_writes=True)

    def sums_with_frame(self, effect: SendChunk, sums: pieces.Sums) -> pieces.Sums:
        """Return the sums to send with the chunk; with `commit` they go to the commit's digest."""
        if effect.verify != "commit":
            return sums if effect.verify == "block" else NO_SUMS
        block_sums = pieces.block_sums(sums, len(effect.chunk))
        self.machine.on_summed(effect.lease_token, effect.chunk, block_sums)
        return NO_SUMS

    def _count(self, lane: Lane, effect: SendChunk, num_bytes: int) -> None:
        self.bytes_sent += num_bytes
        now_s = self._clock.now_s()
        self._metrics.on_chunk(effect.lease_token, effect.peer, lane.name, num_bytes, now_s)

    def _send_in_order(self, peer: Peer, parts: Parts, is_behind_writes: bool) -> None:
        """Send; on a one-sided lane, if so asked, after all earlier writes are done."""
        lane = self._lane_to.get(peer)
        one_sided = self._one_sided.get(lane.name) if lane else None
        if is_behind_writes and one_sided is not None:
            one_sided.send_after(peer, parts)
        else:
            self._send(peer, parts)

    def _send(self, peer: Peer, parts: Parts) -> None:
        if not self._transport.send(peer, parts):
            self._lose_link(peer)

    def _lose_link(self, peer: Peer) -> None:
        """Close a connection that lost a frame or whose lane failed: nothing may follow on it."""
        self._disconnect(peer)
        self.on_link_lost(peer)

    def _give_up(self, peer: Peer, error: HandoffFailed) -> None:
        now_s = self._clock.now_s()
        self._effects.extend(self.machine.on_peer_failed(peer, error, now_s))


def _moved(chunk: LayerChunk, by: int) -> LayerChunk:
    """Return a chunk of host memory with its numbers behind a ring's slots, not a card's blocks."""
    blocks = (chunk.source_blocks.astype(np.int64) + by).astype(np.uint32)
    return replace(chunk, source_blocks=blocks)


def _header(effect: SendChunk, payload: Payload, sums: pieces.Sums) -> memoryview:
    data = frames.Data(
        seq=effect.seq,
        lease_token=effect.lease_token,
        generation=effect.generation,
        layer=effect.chunk.layer,
        ordinals=tuple(effect.chunk.ordinals.tolist()),
        runs=payload.runs,
        source_blocks=payload.source_blocks,
        sums=sums,
        wants_ack=effect.wants_ack,
    )
    return memoryview(frames.encode(data))
