"""Measurements of a connector's transfers and landings: times, bytes, and failures.

    open ──► first chunk sent ──► … last chunk acknowledged ──► COMMITTED        on the sender
      └────────────────────────── duration ──────────────────────────┘
                    └───────── bandwidth ─────┘
                                    commit() └───── exposed ─────────┘
    first piece came ──► … ──► landed                                            on the receiver
              └── landing ──────┘

`commit` is called as soon as the prompt is computed. So the exposed time is how long a decode node
waits for KV after the prefill; the rest of the transfer overlapped with it. The histograms are of
transfers that were committed.

Written on the connector's thread, except for `on_open` and `on_commit`: those are called on the
owner's thread, before the connector's thread hears of it. Read on any thread. Has no clock: times
are arguments.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from common.errors import HandoffFailed
from common.observing.histogram import Histogram, HistogramView
from kv_transfer.contract import Revoked
from kv_transfer.sending.transfer_errors import PeerUnreachable, TransferAborted, TransferSlow
from kv_transfer.shared.effects import Peer
from kv_transfer.shared.lanes import RDMA_LANES
from kv_transfer.transfer_timing import TransferTiming

SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
BYTES = tuple(float(1 << power) for power in range(16, 33))
BYTES_PER_S = tuple(float(1 << power) for power in range(20, 37))
NO_LANE = "none"
"""The label of transfers that ended before anything was sent."""
OUTCOMES = ("committed", "aborted", "unreachable", "slow", "failed")
"""Acknowledged; given up by its own node; not answered by the decode node; much slower than to
other decode nodes; anything else."""
MAX_REMEMBERED_PEERS = 32
FALLBACKS = ("unusable", "write_failed", "not_agreed", "full")
"""Why a pair does not use a lane.

Its setup failed, a write on it failed, the decode node chose another one, or as many others are
written to as can be.
"""


@dataclass(frozen=True, slots=True)
class LaneView:
    """Measurements of one lane."""

    sent_bytes: HistogramView
    duration_s: HistogramView
    bytes_per_s: HistogramView
    exposed_s: HistogramView
    landed_bytes: HistogramView
    landing_s: HistogramView


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferMetricsView:
    """All measurements since the connector was made.

    `ended` counts transfers by lane and one of `OUTCOMES`, `fallbacks` counts connections by the
    lane that could not be used and the reason. `last_lanes` is the last lane agreed on with each
    decode node, by its id, latest last; `bytes_to` is how many bytes each of these has
    acknowledged. `num_open` transfers and landings are being timed. `num_silences` counts how often
    a decode node did not answer. Chunks and connections count on the lane that they had.
    """

    lanes: Mapping[str, LaneView]
    ended: Mapping[tuple[str, str], int]
    chunks_sent_again: Mapping[str, int]
    reconnects: Mapping[str, int]
    fallbacks: Mapping[tuple[str, str], int]
    last_lanes: Mapping[str, str]
    bytes_to: Mapping[str, int]
    num_open: int
    num_silences: int


class _Lane:
    def __init__(self) -> None:
        self.sent_bytes = Histogram(BYTES)
        self.duration_s = Histogram(SECONDS)
        self.bytes_per_s = Histogram(BYTES_PER_S)
        self.exposed_s = Histogram(SECONDS)
        self.landed_bytes = Histogram(BYTES)
        self.landing_s = Histogram(SECONDS)

    def view(self) -> LaneView:
        return LaneView(
            self.sent_bytes.view(),
            self.duration_s.view(),
            self.bytes_per_s.view(),
            self.exposed_s.view(),
            self.landed_bytes.view(),
            self.landing_s.view(),
        )


@dataclass(slots=True)
class _Sending:
    peer: Peer
    opened_at_s: float
    lane: str = NO_LANE
    num_lost: int = 0
    acked_bytes: int = 0
    bytes_hidden: int = 0
    first_sent_at_s: float | None = None
    last_acked_at_s: float | None = None
    committed_at_s: float | None = None


@dataclass(slots=True)
class _Receiving:
    lane: str
    began_at_s: float
    num_bytes: int = 0


class _InFlight:
    """Chunks on one connection that were not acknowledged yet, oldest first."""

    def __init__(self) -> None:
        self.chunks: deque[tuple[int, int]] = deque()
        self.num_acked = 0


class TransferMetrics:
    """Receives every event of the connector; keeps what is open and sums what is over.

    `lanes` are those that the connector has. All their counters exist from the start with 0, so
    that a first event shows as an increase.
    """

    def __init__(self, lanes: Iterable[str]) -> None:
        self._lanes = {name: _Lane() for name in lanes}
        self._sending: dict[int, _Sending] = {}
        self._receiving: dict[int, _Receiving] = {}
        self._in_flight: dict[Peer, _InFlight] = {}
        self._broken: dict[Peer, str] = {}
        self._num_silences = 0
        self._ended = Counter({(lane, how): 0 for lane in self._lanes for how in OUTCOMES})
        self._sent_again = Counter(dict.fromkeys(self._lanes, 0))
        self._fallbacks = Counter(
            {(lane, why): 0 for lane in self._lanes if lane in RDMA_LANES for why in FALLBACKS}
        )
        self._reconnects = Counter(dict.fromkeys(self._lanes, 0))
        self._last_lanes: OrderedDict[str, str] = OrderedDict()
        self._bytes_to: dict[str, int] = {}
        self.last_committed: TransferTiming | None = None

    def view(self) -> TransferMetricsView:
        """Return a snapshot."""
        return TransferMetricsView(
            lanes={name: lane.view() for name, lane in self._lanes.items()},
            ended=self._ended.copy(),
            chunks_sent_again=self._sent_again.copy(),
            reconnects=self._reconnects.copy(),
            fallbacks=self._fallbacks.copy(),
            last_lanes=self._last_lanes.copy(),
            bytes_to=self._bytes_to.copy(),
            num_open=len(self._sending) + len(self._receiving),
            num_silences=self._num_silences,
        )

    # -- the sender's side -----------------------------------------------------------------------

    def on_open(self, token: int, peer: Peer, now_s: float) -> None:
        """Record that a transfer to `peer` begins."""
        self._sending[token] = _Sending(peer, now_s)

    def on_commit(self, token: int, now_s: float) -> None:
        """Record that a transfer's prompt is computed and everything was pushed."""
        sending = self._sending.get(token)
        if sending is not None:
            sending.committed_at_s = now_s
            sending.bytes_hidden = sending.acked_bytes

    def on_chunk(self, token: int, peer: Peer, lane: str, num_bytes: int, now_s: float) -> None:
        """Record that a chunk is sent to `peer` on `lane`."""
        self._in_flight.setdefault(peer, _InFlight()).chunks.append((token, num_bytes))
        sending = self._sending.get(token)
        if sending is None:
            return
        sending.lane = lane
        if sending.first_sent_at_s is None:
            sending.first_sent_at_s = now_s
        if sending.num_lost:
            sending.num_lost -= 1
            self._sent_again[lane] += 1

    def on_acknowledged(self, peer: Peer, num_chunks: int, now_s: float) -> None:
        """Record that `peer` has taken the first `num_chunks` chunks of this connection."""
        flight = self._in_flight.get(peer)
        while flight is not None and flight.chunks and flight.num_acked < num_chunks:
            token, num_bytes = flight.chunks.popleft()
            flight.num_acked += 1
            node_id = peer.incarnation.node_id
            if node_id in self._bytes_to:
                self._bytes_to[node_id] += num_bytes
            sending = self._sending.get(token)
            if sending is not None:
                sending.acked_bytes += num_bytes
                sending.last_acked_at_s = now_s

    def on_connect(self, peer: Peer) -> None:
        """Record that a connection to `peer` is opened."""
        lane = self._broken.pop(peer, None)
        if lane is not None:
            self._reconnects[lane] += 1

    def on_lane(self, peer: Peer, lane: str) -> None:
        """Record that a connection to `peer` is ready, on `lane`."""
        node_id = peer.incarnation.node_id
        self._last_lanes.pop(node_id, None)
        self._last_lanes[node_id] = lane
        self._bytes_to.setdefault(node_id, 0)
        if len(self._last_lanes) > MAX_REMEMBERED_PEERS:
            forgotten, _ = self._last_lanes.popitem(last=False)
            del self._bytes_to[forgotten]

    def on_disconnect(self, peer: Peer) -> None:
        """Record a closed or lost connection; its unacknowledged chunks are sent again."""
        flight = self._in_flight.pop(peer, _InFlight())
        for token, _ in flight.chunks:
            if token in self._sending:
                self._sending[token].num_lost += 1
        self._broken.pop(peer, None)
        if any(sending.peer == peer for sending in list(self._sending.values())):
            self._broken[peer] = self._last_lanes.get(peer.incarnation.node_id, NO_LANE)

    def on_peer_silent(self) -> None:
        """Record that a decode node did not answer."""
        self._num_silences += 1

    def on_fallback(self, lane: str, reason: str) -> None:
        """Record that a connection does not use the faster `lane`."""
        self._fallbacks[lane, reason] += 1

    def on_ended(
        self, token: int, error: HandoffFailed | None, now_s: float
    ) -> TransferTiming | None:
        """Record the end of a transfer; return its times if it was committed."""
        sending = self._sending.pop(token, None)
        if sending is None:
            return None
        self._ended[sending.lane, _outcome_of(error)] += 1
        first_at_s, last_at_s = sending.first_sent_at_s, sending.last_acked_at_s
        committed_at_s = sending.committed_at_s
        if error or first_at_s is None or last_at_s is None or committed_at_s is None:
            return None
        timing = TransferTiming(
            lease_token=token,
            lane=sending.lane,
            num_bytes=sending.acked_bytes,
            bytes_hidden=sending.bytes_hidden,
            opened_at_s=sending.opened_at_s,
            first_sent_at_s=first_at_s,
            last_acked_at_s=last_at_s,
            committed_at_s=committed_at_s,
            ended_at_s=now_s,
        )
        self._record(timing)
        return timing

    # -- the receiver's side ---------------------------------------------------------------------

    def on_piece(self, token: int, lane: str, num_bytes: int, now_s: float) -> None:
        """Record that pieces of a landing arrived."""
        receiving = self._receiving.setdefault(token, _Receiving(lane, now_s))
        receiving.lane = lane
        receiving.num_bytes += num_bytes

    def on_landed(self, token: int, now_s: float) -> None:
        """Record that a landing is complete."""
        receiving = self._receiving.pop(token, None)
        if receiving is not None:
            lane = self._lanes[receiving.lane]
            lane.landed_bytes.observe(receiving.num_bytes)
            lane.landing_s.observe(now_s - receiving.began_at_s)

    def on_landing_over(self, token: int) -> None:
        """Record that a landing ended without KV."""
        self._receiving.pop(token, None)

    # -- inside ----------------------------------------------------------------------------------

    def _record(self, timing: TransferTiming) -> None:
        lane = self._lanes[timing.lane]
        lane.sent_bytes.observe(timing.num_bytes)
        lane.duration_s.observe(timing.duration_s)
        lane.exposed_s.observe(timing.exposed_s)
        if timing.sending_s > 0:
            lane.bytes_per_s.observe(timing.num_bytes / timing.sending_s)
        self.last_committed = timing


def _outcome_of(error: HandoffFailed | None) -> str:
    match error:
        case None:
            return "committed"
        case TransferAborted() | Revoked():
            return "aborted"
        case PeerUnreachable():
            return "unreachable"
        case TransferSlow():
            return "slow"
        case _:
            return "failed"
