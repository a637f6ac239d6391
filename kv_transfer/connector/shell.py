"""A KV connector over any transport and lanes: one thread, two halves, one pool.

The connector's thread owns the transport, the lanes and the sending machine. It reads the pool to
send and writes it, or leaves both to `workers`. Other threads queue calls for the sending half, and
call the receiving machine under a lock. The effects of both stand in one queue, in order; its
length is bounded by the window and the open transfers. Events are emitted with no lock held, so
`on_event` may call the connector.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import assert_never

from common.ids import Incarnation
from common.kv.kv_layout import KVLayout
from common.observing.clock import Clock
from kv_transfer.connector.card_ring import CardRing
from kv_transfer.connector.connector_parts import ConnectorParts, Effect
from kv_transfer.connector.receiving_end import ReceivingEnd
from kv_transfer.connector.sending_end import SendingEnd
from kv_transfer.connector.statistics import ConnectorStatistics
from kv_transfer.connector.transfer_metrics import TransferMetrics
from kv_transfer.connector.workers import Workers
from kv_transfer.contract import (
    Commit,
    ConnectorEvent,
    ConnectorFailed,
    KVEvent,
    Landed,
    LandingFailed,
    OnEvent,
    Released,
    Ticket,
    TransferEnded,
)
from kv_transfer.lanes.card_pool import CardPool
from kv_transfer.lanes.lane import Lane
from kv_transfer.lanes.pool_memory import Bytes, Pool, SourceMemory, as_pool
from kv_transfer.receiving.effects import (
    CloseLane,
    Dropped,
    DropReason,
    Fence,
    MoveSlab,
    OpenLane,
    SendBack,
    Write,
)
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
from kv_transfer.shared.effects import Emit
from kv_transfer.shared.lanes import VERIFY_AUTO
from kv_transfer.shared.limits import MAX_WAIT_S, Limits
from kv_transfer.transfer_timing import TransferTiming
from kv_transfer.transport import (
    FromPeer,
    FromSession,
    LinkLost,
    NobodyListens,
    NoConnection,
    Transport,
)

logger = logging.getLogger("pdserve.kv_transfer")

MAX_ARRIVALS_PER_TURN = 256
CLOSE_WITHIN_S = 15.0
"""More than all parts of a close take together; a thread that hangs is not waited for longer."""
LOG_INTERVAL_S = 10.0


class TransportConnector:
    """A `KVConnector` for any transport and lanes.

    `sending` and `receiving` are its two ends, and `is_closing` tells that it was asked to close.
    """

    def __init__(
        self,
        pool: Pool,
        layout: KVLayout,
        incarnation: Incarnation,
        on_event: OnEvent,
        *,
        transport: Transport,
        lanes: Sequence[Lane],
        beside: Pool | Bytes | None = None,
        card: CardPool | None = None,
        verify: str = VERIFY_AUTO,
        clock: Clock,
        limits: Limits,
    ) -> None:
        """Start the connector's thread.

        `lanes` are offered to decode nodes and accepted from prefill nodes. Blocks of `beside`,
        other memory, are sent too, with the numbers behind those of the pool. With `card` blocks of
        the pool are pushed and land there, and `pool` is its ring. `verify` is a mode of
        `shared.lanes` or auto. The transport is the connector's: it is closed with it, and where
        making the connector fails.
        """
        self._on_event = on_event
        self.transport = transport
        self._clock = clock
        self.is_closing = False
        self._dropped = dict.fromkeys(DropReason, 0)
        self._logged_at_s: dict[DropReason, float] = {}
        self._lanes = {lane.name: lane for lane in lanes}
        self._metrics = TransferMetrics(self._lanes)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(transport.close)
            self._workers = Workers(limits.num_workers, transport.wake)
            on_failure.callback(self._workers.close)
            pool = as_pool(pool, layout)
            self._ring = CardRing(card, pool, self._workers.post) if card is not None else None
            if self._ring is not None:
                on_failure.callback(self._ring.close)
            parts = ConnectorParts(
                memory=SourceMemory(pool, None if beside is None else as_pool(beside, layout)),
                num_blocks=pool.num_blocks if card is None else card.num_blocks,
                layout=layout,
                incarnation=incarnation,
                transport=transport,
                lanes=self._lanes,
                verify=verify,
                clock=clock,
                limits=limits,
                metrics=self._metrics,
                workers=self._workers,
                ring=self._ring,
            )
            self._effects = parts.effects
            self.sending = SendingEnd(parts)
            self.receiving = ReceivingEnd(parts)
            for lane in parts.one_sided.values():
                lane.attach(transport.wake)
            for late in parts.copying_late.values():
                on_failure.callback(late.close)
                late.attach(transport.wake)
            self._thread = threading.Thread(target=self._run, name="pdserve-kv", daemon=True)
            self._thread.start()
            on_failure.pop_all()

    @property
    def endpoint(self) -> str:
        """The address that senders connect to; it goes into tickets."""
        return self.transport.endpoint

    # -- the contract ----------------------------------------------------------------------------

    def expect(self, ticket: Ticket, *, sender_deadline_s: float) -> None:
        self._refuse_when_closing()
        self.receiving.expect(ticket, sender_deadline_s)
        self.transport.wake()

    def revoke(self, lease_token: int) -> None:
        self.receiving.revoke(lease_token)
        self.transport.wake()

    def open(self, ticket: Ticket, *, deadline_s: float, priority: int = 0) -> None:
        self._refuse_when_closing()
        self.sending.open(ticket, deadline_s, priority)

    def push(
        self, lease_token: int, *, layer: int, ordinals: Sequence[int], source_blocks: Sequence[int]
    ) -> None:
        self.sending.calls.add_push(lease_token, layer, ordinals, source_blocks)

    def commit(self, lease_token: int, commit: Commit) -> None:
        self._metrics.on_commit(lease_token, self._clock.now_s())
        self.sending.calls.add(partial(self.sending.machine.on_commit, lease_token, commit))

    def abort(self, lease_token: int) -> None:
        now_s = self._clock.now_s()
        self.sending.calls.add(partial(self.sending.machine.on_abort, lease_token, now_s))

    def close(self) -> None:
        self.is_closing = True
        self.transport.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_WITHIN_S)
            if self._thread.is_alive():
                logger.error("the KV connector's thread did not end in %g s", CLOSE_WITHIN_S)

    # -- beyond the contract ---------------------------------------------------------------------

    def statistics(self) -> ConnectorStatistics:
        """Return a snapshot of all counters, for metrics and tests; waits for no lock."""
        sending, receiving = self.sending, self.receiving
        return ConnectorStatistics(
            bytes_sent=sending.bytes_sent,
            bytes_received=receiving.bytes_received,
            transfers_open=sending.num_transfers,
            landings_open=receiving.num_landings,
            sessions_open=receiving.num_sessions,
            blocks_quarantined=receiving.num_quarantined_blocks,
            lanes=sending.lane_names,
            unreachable=sending.unreachable,
            frames_dropped={reason.value: count for reason, count in self._dropped.items()},
            checksum_failures=receiving.checksum_failures,
            measured=self._metrics.view(),
        )

    @property
    def num_turns(self) -> int:
        """The turns of its thread, at least one per `MAX_WAIT_S` while it works.

        While a worker has a job, only those until that began are counted.
        """
        return self._workers.oldest_turn

    @property
    def last_committed(self) -> TransferTiming | None:
        """The last committed transfer, as this sender measured it."""
        return self._metrics.last_committed

    @property
    def ring(self) -> CardRing | None:
        """The ring, where a card has the pool; other threads may read its counts."""
        return self._ring

    def _refuse_when_closing(self) -> None:
        if self.is_closing:
            raise ValueError("the KV connector is closed")

    # -- the connector's thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self.is_closing:
                self._workers.turn += 1
                self._perform_all()
                self.transport.wait(self._timeout_s())
                self._perform_all()  # Mostly a push or a commit woke this thread: it does not wait.
                self._take_arrivals()
                self.sending.take_written()
                self.receiving.tick()
                self.sending.tick()
        except BaseException as error:  # A thread that ends by `SystemExit` says nothing itself.
            logger.exception("the KV connector's thread failed, with all that is open")
            self._tell(ConnectorFailed(error))
        finally:
            self._finish()

    def _finish(self) -> None:
        """Emit outstanding events and release the network, even if a part of it fails."""
        self.receiving.refuse()
        with _logging_errors():
            self.sending.close()
        self._perform_what_can_be()
        with _logging_errors():
            self._workers.close()
            self._workers.finish()
        for lane in self._lanes.values():
            with _logging_errors():
                lane.close()
        if self._ring is not None:
            with _logging_errors():
                self._ring.close()
        with _logging_errors():
            # `close` of the lanes waited for these: an ABORT after the last write reports the end.
            self.sending.take_written()
        with _logging_errors():
            self.receiving.close()
        self._perform_what_can_be()
        self.transport.close()

    def _timeout_s(self) -> float:
        now_s = self._clock.now_s()
        ends = (self.sending.next_deadline_s(), self.receiving.next_deadline_s())
        deadlines = [at_s for at_s in ends if at_s is not None]
        return min(max(0.0, min(deadlines, default=now_s + MAX_WAIT_S) - now_s), MAX_WAIT_S)

    def _take_arrivals(self) -> None:
        for _ in range(MAX_ARRIVALS_PER_TURN):
            arrival = self.transport.receive_nowait()
            match arrival:
                case None:
                    break
                case LinkLost(peer):
                    self.sending.on_link_lost(peer)
                case NoConnection(peer, error):
                    self.sending.on_no_connection(peer, error)
                case NobodyListens(peer):
                    self.sending.on_refused(peer)
                case FromPeer(peer, parts):
                    self.sending.on_answer(peer, parts)
                case FromSession(session, parts):
                    self.receiving.on_message(session, parts)
                case _:
                    assert_never(arrival)
            self._perform_all()

    # -- effects ---------------------------------------------------------------------------------

    def _perform_all(self) -> None:
        while True:
            # Between two effects, so that an abort stops chunks that are queued, and so that what
            # has ended elsewhere goes on before more of that kind is begun: a frame is sent while
            # the next ones of its window are prepared.
            self.sending.take_calls()
            self._workers.finish()
            self.receiving.take_copied()
            if not self._effects:
                return
            self._perform(self._effects.popleft())

    def _perform_what_can_be(self) -> None:
        """Perform all effects; an effect that fails does not prevent the others."""
        while self._effects:
            with _logging_errors():
                self._perform(self._effects.popleft())

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Connect() | Disconnect() | SayHello() | TakeLane() | SendToPeer() | SendChunk():
                self.sending.perform(effect)
            case PeerSilent() | PeerAnswers():
                self.sending.report(effect)
            case SendBack() | OpenLane() | CloseLane() | MoveSlab() | Fence():
                self.receiving.perform(effect)
            case Emit(event):
                self._emit(event)
            case Dropped(reason, detail):
                self._count_dropped(reason, detail)
            case Write():
                raise AssertionError("a write must be performed with its payload")
            case _:
                assert_never(effect)

    def _emit(self, event: KVEvent) -> None:
        match event:
            case TransferEnded(token, error):
                timing = self._metrics.on_ended(token, error, self._clock.now_s())
                self.sending.on_ended(token)
                event = replace(event, timing=timing)
            case Landed(token):
                self._metrics.on_landed(token, self._clock.now_s())
            case LandingFailed(token) | Released(token):
                self._metrics.on_landing_over(token)
        self._tell(event)

    def _tell(self, event: ConnectorEvent) -> None:
        try:
            self._on_event(event)
        except Exception:
            logger.exception("on_event raised for %r", event)

    def _count_dropped(self, reason: DropReason, detail: str) -> None:
        """Count a dropped frame; log one line per reason and interval."""
        self._dropped[reason] += 1
        now_s = self._clock.now_s()
        last_s = self._logged_at_s.get(reason)
        if reason in (DropReason.DUPLICATE, DropReason.LATE):
            return
        if last_s is None or now_s >= last_s + LOG_INTERVAL_S:
            self._logged_at_s[reason] = now_s
            logger.warning("%d dropped as %s: %.300s", self._dropped[reason], reason.value, detail)


@contextlib.contextmanager
def _logging_errors() -> Iterator[None]:
    """Log an error raised inside, and continue after the block."""
    try:
        yield
    except BaseException:
        logger.exception("error while closing the KV connector; closing goes on")
