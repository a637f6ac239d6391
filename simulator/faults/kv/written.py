"""Blocks that the sender writes by RDMA into the receiver's pool.

A slab of the pool can be written at addresses that were not removed. No write there can be refused,
so blocks that may be written are held for their landing until it cannot be written any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from common.errors import HandoffFailed, InternalError
from kv_transfer.sending.effects import SendChunk
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.lanes import ONE_SIDED_LANES
from simulator.faults.contents import Numbers
from simulator.faults.kv.batches import Batches, OnDone
from simulator.faults.kv.moving import MovingEnd, Parcel, data_of

REST_S = 1.0
"""Seconds for which a peer is not written to after a write has failed.

Less than in a real cluster, as histories are short.
"""


class WrittenBlocks:
    """Both ends, in one node."""

    def __init__(self, end: MovingEnd, num_blocks: int, blocks_per_slab: int) -> None:
        self._end = end
        self._blocks_per_slab = blocks_per_slab
        num_slabs = -(-num_blocks // blocks_per_slab)
        self._num_addresses = 1
        self._addresses = [[0] for _ in range(num_slabs)]
        """Addresses under which each slab can be written; the last is the newest."""
        self._writers: dict[Peer, tuple[Batches[Parcel], list[int]]] = {}
        self._rests_until_s: dict[Peer, float] = {}

    # The sender's end.

    def may_offer(self, peer: Peer) -> bool:
        """Return whether no write to a peer has failed lately."""
        return self._end.clock.now_s() >= self._rests_until_s.get(peer, 0.0)

    def accept(self, peer: Peer, reply: bytes) -> None:
        """Write to the addresses of a reply from now on."""
        addresses = [int(one) for one in reply.split(b",")]
        known = self._writers.get(peer)
        on_ready = partial(self._on_ready, peer)
        writer = known[0] if known else Batches[Parcel](on_ready, self._end.batch_bytes)
        self._writers[peer] = writer, addresses

    def send(self, effect: SendChunk) -> None:
        """Write a chunk whose transfer goes on, and send its header after it."""
        writer, addresses = self._writers[effect.peer]
        blocks: list[int] = effect.chunk.source_blocks.tolist()
        writer.add(
            partial(self._begin, effect, addresses),
            num_ranges=len(blocks),
            num_bytes=self._end.bytes_in(len(blocks)),
        )
        values = self._end.memory.read(effect.chunk.layer, blocks)
        writer.tell_after(Parcel(data_of(effect), blocks, values))

    def send_after(self, peer: Peer, parcel: Parcel) -> None:
        """Send a frame after all writes that are queued."""
        self._writers[peer][0].tell_after(parcel)

    def forget(self, peer: Peer) -> None:
        """Drop what is queued for a peer whose connection is over."""
        writer, _ = self._writers.pop(peer, (None, None))
        if writer is not None:
            writer.stop()

    def take_offered_again(self) -> list[Peer]:
        """Return the peers that may be written to again."""
        rested = [peer for peer in self._rests_until_s if self.may_offer(peer)]
        for peer in rested:
            del self._rests_until_s[peer]
        return rested

    def _begin(self, effect: SendChunk, addresses: Sequence[int], on_done: OnDone) -> None:
        end, layer = self._end, effect.chunk.layer
        target = end.end_of(effect.peer.incarnation)
        blocks: list[int] = effect.chunk.source_blocks.tolist()
        end.flights.begin(
            *(end, end, target),
            take=lambda: end.memory.read(layer, blocks),
            put=partial(target.put_written, effect, addresses),
            on_done=on_done,
        )

    def _on_ready(self, peer: Peer, ready: Parcel | HandoffFailed) -> None:
        if isinstance(ready, Parcel):
            self._end.send(peer, ready)
        else:
            self._rests_until_s[peer] = self._end.clock.now_s() + REST_S
            self._end.lose_link(peer)

    # The receiver's end.

    def reply(self) -> bytes:
        """Return the newest addresses, for a WELCOME."""
        return b",".join(b"%d" % of_slab[-1] for of_slab in self._addresses)

    def move(self, slab: int) -> bytes:
        """Add an address under which a slab can be written; return the new reply."""
        self._addresses[slab].append(self._num_addresses)
        self._num_addresses += 1
        return self.reply()

    def fence(self, slab: int) -> None:
        """Remove all addresses of a slab but the newest."""
        del self._addresses[slab][:-1]

    def put(self, effect: SendChunk, addresses: Sequence[int], values: Numbers) -> bool:
        """Write blocks; return False where their address was removed.

        Raises `InternalError` where they are not held for this lease.
        """
        end, targets = self._end, effect.target_blocks.tolist()
        slabs = {block // self._blocks_per_slab for block in targets}
        if any(addresses[slab] not in self._addresses[slab] for slab in slabs):
            return False
        landing = end.receiver.landings.get(effect.lease_token)
        is_open = landing is not None and landing.lane in ONE_SIDED_LANES
        if not is_open and effect.lease_token not in end.receiver.quarantined:
            raise InternalError(f"{end.me} lets blocks {targets} be written that it has released")
        end.put(effect.chunk.layer, targets, values)
        return True
