"""The lane by RDMA: both ends.

The receiver registers its pool by slab and tells where it lies. The sender, whose pool is
registered too, writes a chunk to the target blocks and lets the DATA header go when the write is
done. So a header that arrives says that its bytes are there, and every control frame that travels
behind the writes says that those before it are over.

A write that fails may still go on. Its peer is given up on this lane for `COOL_DOWN_S`, and the
receiver keeps the blocks until it has fenced their slabs: their memory keys are taken away, and
new ones are made. Writers that were at it with an old key fail; those that come later look the new
one up.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgpack  # type: ignore[import-untyped]

from common.clock import Clock, MonotonicClock
from common.errors import HandoffFailed, PeerProtocolError
from kv_transfer.core.chunks import Chunk
from kv_transfer.core.effects import Peer
from kv_transfer.core.frames import Data
from kv_transfer.core.limits import DEFAULT_WINDOW_BYTES
from kv_transfer.lane import Broken, Payload, Ready
from kv_transfer.pieces import Pool
from kv_transfer.rdma.mooncake_engine import MooncakeEngine, RdmaUnavailable
from kv_transfer.rdma.peer_writer import Engine, PeerWriter
from kv_transfer.rdma.slabs import MAX_SLABS, SlabbedPool, ranges_of, slabbed
from kv_transfer.transport import Parts

logger = logging.getLogger("pdserve.kv_transfer")

VERSION = 1
COOL_DOWN_S = 30.0
# A thread each, and a queue pair for each pair of devices.
MAX_WRITERS = 64
# Two under way, as much again on its way to be acknowledged.
BATCHES_PER_WINDOW = 4
CLOSE_WITHIN_S = 2.0
MAX_NAME_BYTES = 256


@dataclass(frozen=True, slots=True)
class _Target:
    """A peer's pool, as its reply describes it."""

    engine_name: str
    address: int
    pool: SlabbedPool


class RdmaLane:
    """See `lane.OneSidedLane`. Raises `RdmaUnavailable` when the pool cannot be registered.

    The engine stays its owner's: others may use it too.
    """

    name = "rdma"
    is_settled = False

    def __init__(
        self,
        pool: Pool,
        engine: Engine,
        *,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        max_slabs: int = MAX_SLABS,
        clock: Clock | None = None,
    ) -> None:
        self._engine = engine
        self._address = pool.ctypes.data
        num_layers, _, num_blocks, piece_bytes = pool.shape
        self._pool = slabbed(num_layers, num_blocks, piece_bytes, max_slabs=max_slabs)
        self._batch_bytes = window_bytes // BATCHES_PER_WINDOW
        self._clock = clock or MonotonicClock()
        self._registered: set[int] = set()
        self._register_all()
        self._lock = threading.Lock()
        self._writers: dict[Peer, tuple[PeerWriter, _Target]] = {}
        self._leaving: list[PeerWriter] = []
        self._ready: list[Ready | Broken] = []
        self._resting_until_s = 0.0
        self._wake: Callable[[], None] = lambda: None

    @property
    def blocks_per_slab(self) -> int:
        return self._pool.blocks_per_slab

    def attach(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    # The sender's end.

    def offer(self) -> bytes | None:
        if self._clock.now_s() < self._resting_until_s:
            return None
        packed: bytes = msgpack.packb([VERSION, self._engine.protocol])
        return packed

    def accept(self, peer: Peer, reply: bytes) -> None:
        target = self._read_reply(peer, reply)
        self.forget(peer)
        self._leaving = [writer for writer in self._leaving if not writer.join(0)]
        if len(self._writers) + len(self._leaving) >= MAX_WRITERS:
            self._rest()
            raise HandoffFailed(f"{MAX_WRITERS} peers are written to already")
        writer = PeerWriter(
            self._engine,
            target.engine_name,
            lambda writer, ready: self._on_ready(peer, writer, ready),
            batch_bytes=self._batch_bytes,
        )
        with self._lock:
            self._writers[peer] = writer, target

    def payload(self, chunk: Chunk) -> Payload:
        return Payload()

    def write(self, peer: Peer, chunk: Chunk, target_blocks: Sequence[int]) -> None:
        writer, target = self._writers[peer]
        if max(target_blocks) >= target.pool.num_blocks:
            error = PeerProtocolError(
                f"target block {max(target_blocks)}: {peer} has {target.pool.num_blocks}"
            )
            writer.stop()
            self._on_ready(peer, writer, error)
            return
        ranges = ranges_of(chunk, target_blocks, self._pool, target.pool)
        writer.write(
            [(self._address + here, target.address + there, size) for here, there, size in ranges]
        )

    def send_after(self, peer: Peer, parts: Parts) -> None:
        self._writers[peer][0].send_after(parts)

    def take_ready(self) -> list[Ready | Broken]:
        with self._lock:
            ready, self._ready = self._ready, []
            return ready

    def forget(self, peer: Peer) -> None:
        with self._lock:
            writer, _ = self._writers.pop(peer, (None, None))
            self._ready = [one for one in self._ready if one.peer != peer]
        if writer is not None:
            writer.stop()
            self._leaving.append(writer)

    def _on_ready(self, peer: Peer, writer: PeerWriter, ready: Parts | HandoffFailed) -> None:
        """On any thread: a header may leave, or a write failed."""
        with self._lock:
            if self._writers.get(peer, (None,))[0] is not writer:
                return
            if isinstance(ready, HandoffFailed):
                self._rest()
                logger.warning("RDMA to %s failed, it rests %g s: %s", peer, COOL_DOWN_S, ready)
                self._ready.append(Broken(peer, ready))
            else:
                self._ready.append(Ready(peer, ready))
        self._wake()

    def _rest(self) -> None:
        self._resting_until_s = self._clock.now_s() + COOL_DOWN_S

    def _read_reply(self, peer: Peer, reply: bytes) -> _Target:
        """Raises `PeerProtocolError`."""
        match _unpacked(reply):
            case [int(version), str(name), int(address), int(num_blocks), int(blocks_per_slab)] if (
                version == VERSION
                and 0 < len(name) <= MAX_NAME_BYTES
                and 0 < address < 1 << 64
                and 0 < blocks_per_slab <= num_blocks < 1 << 32
            ):
                mine = self._pool
                theirs = SlabbedPool(mine.num_layers, num_blocks, mine.piece_bytes, blocks_per_slab)
                return _Target(name, address, theirs)
        raise PeerProtocolError(f"{peer} does not say where to write: {reply!r:.80}")

    # The receiver's end.

    def open(self, session: bytes, offer: bytes) -> bytes | None:
        is_mine = _unpacked(offer) == [VERSION, self._engine.protocol]
        if not is_mine or len(self._registered) < self._pool.num_slabs:
            return None
        pool = self._pool
        reply = [VERSION, self._engine.name, self._address, pool.num_blocks, pool.blocks_per_slab]
        packed: bytes = msgpack.packb(reply)
        return packed

    def source(self, session: bytes, data: Data, parts: Parts) -> Parts | None:
        return None

    def drop(self, session: bytes) -> None:
        pass

    def fence(self, slabs: Sequence[int]) -> None:
        for slab in slabs:
            if slab in self._registered:
                self._unregister(slab)
        for slab in slabs:
            try:
                self._register(slab)
            except OSError as error:
                logger.error("slab %d of the KV pool is lost to RDMA: %s", slab, error)

    def close(self) -> None:
        with self._lock:
            self._leaving += [writer for writer, _ in self._writers.values()]
            self._writers.clear()
        for writer in self._leaving:
            writer.stop()
        deadline_at_s = time.monotonic() + CLOSE_WITHIN_S
        stuck = [w for w in self._leaving if not w.join(max(0, deadline_at_s - time.monotonic()))]
        if stuck:
            logger.warning("%d RDMA writes had not ended within %g s", len(stuck), CLOSE_WITHIN_S)
        for slab in sorted(self._registered):
            self._unregister(slab)

    # Registered memory.

    def _register_all(self) -> None:
        try:
            for slab in range(self._pool.num_slabs):
                self._register(slab)
        except OSError as error:
            for slab in sorted(self._registered):
                self._unregister(slab)
            raise RdmaUnavailable(f"{error} (is the limit of locked memory too low?)") from None

    def _register(self, slab: int) -> None:
        """All of a slab's regions, or none. Raises `OSError`."""
        done: list[int] = []
        try:
            for offset, num_bytes in self._pool.regions(slab):
                self._engine.register(self._address + offset, num_bytes)
                done.append(self._address + offset)
        except OSError:
            for address in done:
                self._engine.unregister(address)
            raise
        self._registered.add(slab)

    def _unregister(self, slab: int) -> None:
        for offset, _ in self._pool.regions(slab):
            self._engine.unregister(self._address + offset)
        self._registered.discard(slab)


def make_rdma(pool: Pool, *, host: str, devices: str = "", window_bytes: int) -> RdmaLane:
    """The lane of a process whose peers reach it at `host`, on `devices` ("" for all).

    Raises `RdmaUnavailable`, which says why.
    """
    return RdmaLane(pool, MooncakeEngine(host, devices), window_bytes=window_bytes)


def _unpacked(message: bytes) -> object:
    """None, which no end says, when it is not msgpack."""
    try:
        return msgpack.unpackb(message, raw=False, strict_map_key=True)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        return None
